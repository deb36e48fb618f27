"""Which implementation of an operator runs, and why not another.

An explicit backend runs or raises; ``"auto"`` takes the best one that can run and says once what it had to give up.
Triton and CUDA are touched on the first call that could use them, never at import.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from gatekern.errors import BackendError
from gatekern.ops import flash, native

logger = logging.getLogger("gatekern")

LIBRARY = torch.library.Library("gatekern", "FRAGMENT")  # type: ignore[no-untyped-call]

# The forms in which each operator exists.
FORMS: dict[str, tuple[str, ...]] = {
    "label_scores": ("triton", "native", "torch"),
    "vocab_lse": ("triton", "torch"),
    "class_lse": ("torch",),
    "prefix_attention": ("triton", "flash", "torch"),
    "merge_attention": ("triton", "torch"),
    "draw_tokens": ("torch",),
    "parse_scores": ("triton", "native", "torch"),
}
_BACKENDS = ("triton", "flash", "native", "torch")
_PREFERRED = {"cuda": ("triton", "flash"), "cpu": ("native",)}  # before "torch", the best first
_MIN_CAPABILITY = (8, 0)  # bf16 tensor cores

_broken: dict[tuple[str, str], str] = {}  # (operator, backend) -> why it failed when it ran
_said: set[tuple[str, str]] = set()

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """One backend as `gatekern doctor` prints it.

    Attributes
    ----------
    name : str
        ``"triton"``, ``"flash"``, ``"native"`` or ``"torch"``.
    available : bool
    reason : str
        Why it is not available; empty when it is.
    detail : str
        What would run: version, device or instruction set.
    """

    name: str
    available: bool
    reason: str = ""
    detail: str = ""


def backends() -> list[Backend]:
    """List every backend, whether it can run here, and the true reason where it cannot.

    Returns
    -------
    list of Backend

    Examples
    --------
    >>> [b.name for b in backends()]
    ['triton', 'flash', 'native', 'torch']
    >>> backends()[-1].available
    True
    """
    triton = _triton_state(_current_cuda_device())
    flash_reason = flash.why_not(torch.device("cuda"))
    try:
        reason, detail = native.why_not() or "", native.describe()
    except BackendError as error:  # a bad GATEKERN_ISA is reported here and raised where an operator runs
        reason, detail = str(error), ""
    return [
        Backend("triton", not triton.reason, triton.reason, triton.detail),
        Backend("flash", flash_reason is None, flash_reason or "", flash.describe() if flash_reason is None else ""),
        Backend("native", not reason, reason, detail),
        Backend("torch", True, detail=f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads"),
    ]


def select(
    op: str,
    backend: str = "auto",
    device: torch.device | str = "cpu",
    unfit: Mapping[str, str] | None = None,
) -> str:
    """Choose the implementation of an operator.

    Parameters
    ----------
    op : str
        A key of `FORMS`.
    backend : str
        ``"auto"`` or one of ``"triton"``, ``"flash"``, ``"native"``, ``"torch"``.
    device : torch.device or str
        Where the operands live.
    unfit : mapping of str to str, optional
        Backends that these particular operands rule out, with the reason.

    Returns
    -------
    str
        ``"triton"``, ``"flash"``, ``"native"`` or ``"torch"``.

    Raises
    ------
    BackendError
        If an explicit `backend` cannot run, with the reason, or its name is unknown.

    Examples
    --------
    >>> select("vocab_lse", "auto", "cpu")
    'torch'
    """
    device = torch.device(device)
    if backend == "auto":
        taken, given_up = _best(op, device, unfit)
        _say_once(op, taken, given_up, device)
        return taken
    if backend not in _BACKENDS:
        raise BackendError(f"unknown backend {backend!r}; choose 'auto' or one of {', '.join(_BACKENDS)}")
    reason = _why_not(op, backend, device, unfit)
    if reason is not None:
        raise BackendError(f"{op}: backend {backend!r} cannot run on {device}: {reason}")
    return backend


def chosen(op: str, device: torch.device | str) -> str:
    """What ``"auto"`` takes for an operator, and why nothing better, as one line.

    Examples
    --------
    >>> chosen("class_lse", "cpu")
    'torch (of torch)'
    """
    taken, given_up = _best(op, torch.device(device), None)
    return f"{taken} (of {', '.join(FORMS[op])})" + "".join(f"; {reason}" for reason in given_up)


def _best(op: str, device: torch.device, unfit: Mapping[str, str] | None) -> tuple[str, list[str]]:
    """The best form that runs, and what was given up for it."""
    given_up: list[str] = []
    for preferred in _PREFERRED.get(device.type, ()):
        if preferred in FORMS[op]:
            reason = _why_not(op, preferred, device, unfit)
            if reason is None:
                return preferred, given_up
            given_up.append(f"{preferred} cannot run: {reason}")
    return "torch", given_up


def resolved_name(op: str, backend: str = "auto", device: torch.device | str = "cpu") -> str:
    """Name what `select` would run, with the instruction set of the native form.

    Examples
    --------
    >>> resolved_name("vocab_lse", "torch")
    'torch'
    """
    name = select(op, backend, device)
    return f"native-{native.isa()}" if name == "native" else name


def with_form(op: str, backend: str) -> str:
    """`backend`, or ``"torch"`` where the operator has no form of it: for callers that run several operators."""
    return backend if backend == "auto" or backend in FORMS[op] else "torch"


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd and no autocast: the operators promise float32 accumulation wherever they are called."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def run(
    op: str,
    backend: str,
    device: torch.device,
    forms: Mapping[str, Callable[..., T]],
    *args: object,
    unfit: Mapping[str, str] | None = None,
) -> T:
    """Select and call; when Triton cannot build its kernel, remember why and let ``"auto"`` continue on PyTorch."""
    name = select(op, backend, device, unfit)
    if name != "triton":
        return forms[name](*args)
    elsewhere = device.type == "cuda" and device.index not in (None, torch.cuda.current_device())
    try:
        # Triton launches on the current device, wherever its operands are.
        with torch.cuda.device(device) if elsewhere else nullcontext():
            return forms[name](*args)
    except Exception as error:
        if not _is_build_failure(error):
            raise
        _broken[op, name] = f"{type(error).__name__}: {error}"
        if backend == "triton":
            raise BackendError(f"{op}: Triton could not build its kernel: {error}") from error
    return forms[select(op, backend, device, unfit)](*args)


def _why_not(op: str, backend: str, device: torch.device, unfit: Mapping[str, str] | None) -> str | None:
    if backend not in FORMS[op]:
        return f"{op} has no {backend} form"
    if unfit and backend in unfit:
        return unfit[backend]
    if backend == "native":
        return native.why_not() if device.type == "cpu" else "the C++ kernels run on the CPU only"
    if backend == "flash":
        return flash.why_not(device)
    if backend == "triton":
        if device.type != "cuda":
            return "Triton kernels run on CUDA devices only"
        return _broken.get((op, backend)) or _triton_state(device.index).reason or None
    return None


def _say_once(op: str, taken: str, given_up: Sequence[str], device: torch.device) -> None:
    reasons = "; ".join(given_up)
    if reasons and (op, reasons) not in _said:
        _said.add((op, reasons))
        # On a CPU PyTorch is a fine second choice; a damaged extension warns when it is loaded.
        level = logging.WARNING if device.type == "cuda" else logging.INFO
        logger.log(level, "%s runs on %s: %s", op, "PyTorch" if taken == "torch" else taken, reasons)


def _current_cuda_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


@functools.cache
def _triton_state(device_index: int | None) -> Backend:
    """Look once per device at all that Triton needs: package, device, compute capability, driver and C compiler."""
    try:
        import triton
    except Exception as error:  # an installed but broken Triton raises anything
        return Backend("triton", False, f"import failed: {type(error).__name__}: {error}")
    if not torch.cuda.is_available():
        return Backend("triton", False, "no CUDA device")
    capability = torch.cuda.get_device_capability(device_index)
    name = torch.cuda.get_device_name(device_index)
    if capability < _MIN_CAPABILITY:
        found = f"{name} has {capability[0]}.{capability[1]}"
        return Backend("triton", False, f"needs compute capability 8.0 or higher, {found}")
    try:
        # Builds Triton's helper, which needs a C compiler and Python.h.
        triton.runtime.driver.active.get_current_target()  # type: ignore[no-untyped-call]
    except Exception as error:  # compilers and drivers fail in many ways; the message is what helps
        return Backend("triton", False, f"driver failed: {type(error).__name__}: {error}")
    return Backend("triton", True, detail=f"triton {triton.__version__} on {name} (sm_{capability[0]}{capability[1]})")


def _is_build_failure(error: Exception) -> bool:
    from triton.errors import TritonError

    failed_pass = isinstance(error, RuntimeError) and "PassManager" in str(error)
    return failed_pass or isinstance(error, (TritonError, subprocess.CalledProcessError))
