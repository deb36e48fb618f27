"""C++ kernels of `gatekern._native`: loaded at first need, with the reason kept when they cannot be.

The instruction set is the best that this CPU runs. The environment variable ``GATEKERN_ISA`` (``scalar``, ``avx2`` or
``avx512_bf16``; read once) picks another, to reproduce a result of a different machine.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from gatekern.errors import BackendError

logger = logging.getLogger("gatekern")

_INTERFACE_VERSION = 2  # kInterfaceVersion in csrc/label_scores.h
_KNOWN_ISAS = ("scalar", "avx2", "avx512_bf16")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum DType in csrc/label_scores.h


@dataclass(frozen=True)
class _Loaded:
    module: ModuleType | None
    reason: str | None


@functools.cache
def _load() -> _Loaded:
    try:
        module = importlib.import_module("gatekern._native")
    except ModuleNotFoundError:
        return _Loaded(
            None,
            "the C++ extension is not built (no compiler at install time); with one, "
            "pip install --force-reinstall --no-cache-dir --no-deps gatekern",
        )
    except Exception as error:  # a damaged or foreign library: keep the cause, lose only the speed
        reason = f"gatekern._native does not load: {type(error).__name__}: {error}"
        logger.warning("%s; operators on the CPU run on PyTorch", reason)
        return _Loaded(None, reason)
    built = module.interface_version
    if built != _INTERFACE_VERSION:
        reason = f"gatekern._native has interface {built}, this version needs {_INTERFACE_VERSION}: reinstall"
        logger.warning("%s; operators on the CPU run on PyTorch", reason)
        return _Loaded(None, reason)
    return _Loaded(module, None)


def _module() -> ModuleType:
    loaded = _load()
    if loaded.module is None:
        raise BackendError(str(loaded.reason))
    return loaded.module


def why_not() -> str | None:
    """Give the reason why the C++ kernels cannot run, None when they can.

    Raises
    ------
    BackendError
        If ``GATEKERN_ISA`` names an instruction set that does not exist or does not run here.
    """
    reason = _load().reason
    if reason is None:
        isa()
    return reason


@functools.cache
def isa() -> str:
    """Name the instruction set in use: the best one, or the one that ``GATEKERN_ISA`` asks for.

    Raises
    ------
    BackendError
        If the extension is not loaded, or the variable's value is unknown or cannot run on this CPU.
    """
    choices: list[str] = _module().instruction_sets()
    wanted = os.environ.get("GATEKERN_ISA", choices[-1])
    if wanted not in choices:
        known = "is not available on this CPU" if wanted in _KNOWN_ISAS else "is not an instruction set of gatekern"
        raise BackendError(f"GATEKERN_ISA={wanted!r} {known}; choices here: {', '.join(choices)}")
    return wanted


def describe() -> str:
    """Describe the choice in one line, empty when the extension is not loaded."""
    if _load().module is None:
        return ""
    return f"{isa()} (choices here: {', '.join(_module().instruction_sets())})"


def label_scores(
    hidden: Tensor,
    weight: Tensor,
    label_ids: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    *,
    instruction_set: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Call the C++ form of `gatekern.ops.label_scores` on operands that its caller has checked.

    `instruction_set` is one of the module's `instruction_sets()`; by default the one that `isa` names.
    """
    rows, width = hidden.shape
    groups = group_offsets.shape[0] - 1
    logits = torch.empty((rows, groups), dtype=torch.float32)
    score = torch.empty((rows,), dtype=torch.float32)
    label_ids, group_offsets = label_ids.contiguous(), group_offsets.contiguous()
    bias = None if bias is None else bias.contiguous()
    _module().label_scores(
        isa=instruction_set or isa(),
        hidden=hidden.data_ptr(),
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        dtype=_DTYPES[hidden.dtype],
        bias_dtype=_DTYPES[torch.float32 if bias is None else bias.dtype],
        label_ids=label_ids.data_ptr(),
        group_offsets=group_offsets.data_ptr(),
        logits=logits.data_ptr(),
        score=score.data_ptr(),
        rows=rows,
        width=width,
        vocab=weight.shape[0],
        labels=label_ids.shape[0],
        groups=groups,
        hidden_stride=hidden.stride(0),
        weight_stride=weight.stride(0),
        scale=scale,
        softcap=softcap or 0.0,
    )
    return logits, score


def parse_scores(
    tokens: Tensor, codes: Tensor, offsets: Tensor, table: Tensor, powers: Tensor, floats: Tensor
) -> tuple[Tensor, Tensor]:
    """Call the C++ form of `gatekern.ops.parse_scores` on operands that its caller has checked."""
    tokens = tokens.to(torch.int64).contiguous()
    rows, columns = tokens.shape
    values = torch.empty((rows,), dtype=torch.float32)
    status = torch.empty((rows,), dtype=torch.uint8)
    _module().parse_scores(
        tokens=tokens.data_ptr(),
        codes=codes.data_ptr(),
        offsets=offsets.data_ptr(),
        table=table.data_ptr(),
        powers=powers.data_ptr(),
        floats=floats.data_ptr(),
        values=values.data_ptr(),
        status=status.data_ptr(),
        rows=rows,
        columns=columns,
        vocab=offsets.shape[0] - 1,
        row_stride=tokens.stride(0),
    )
    return values, status
