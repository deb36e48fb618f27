"""Who computes attention over packed sequences of different lengths and reports the log-sum-exp: found on first use.

`flash-attn` where it is installed, because it knows soft-caps, else PyTorch's own `varlen_attn`. What a found function
takes is read from its signature: PyTorch's has changed with every release.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gatekern.errors import BackendError

_MIN_CAPABILITY = (8, 0)


class Varlen(Protocol):
    """Attention of packed sequences: rows ``cu_q[i]..cu_q[i + 1]`` over keys ``cu_k[i]..cu_k[i + 1]``.

    Attributes
    ----------
    name : str
        For people: what runs, with its version.
    supports_softcap : bool
    supports_window : bool
    """

    @property
    def name(self) -> str: ...
    @property
    def supports_softcap(self) -> bool: ...
    @property
    def supports_window(self) -> bool: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Parameters
        ----------
        q : Tensor [total_q, num_heads, head_dim]
            Dense in the last dimension. No sequence is empty: FlashAttention reports ``+inf`` for a row without keys.
        k, v : Tensor [total_k, num_kv_heads, head_dim]
            As `q`.
        cu_q, cu_k : Tensor, int32 [num_sequences + 1]
            Offsets of the sequences.
        max_q, max_k : int
            Length of the longest sequence.
        scale : float
            Factor on the dot products.
        causal : bool
            The last row of a sequence sees its last key, the row before it one key less, and so on.
        window : int, optional
            A row sees the last `window` of the keys that causality leaves it; only with `causal`.
        softcap : float, optional
            Scores become ``softcap * tanh(score / softcap)``.

        Returns
        -------
        out : Tensor [total_q, num_heads, head_dim]
            In the dtype of `q`.
        lse : Tensor, float32 [total_q, num_heads]
            Log-sum-exp of the scores, nats.
        """
        ...


@dataclass(frozen=True)
class FlashAttn:
    """`flash_attn.flash_attn_interface.flash_attn_varlen_func`."""

    function: Callable[..., Any]
    name: str
    supports_softcap: bool = True
    supports_window: bool = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": scale, "causal": causal}
        if window is not None:
            options["window_size"] = (window - 1, 0)
        if softcap is not None:
            options["softcap"] = softcap
        out, lse, *_ = self.function(q, k, v, cu_q, cu_k, max_q, max_k, **options, return_attn_probs=True)
        return out, _rows_first(lse, q)


@dataclass(frozen=True)
class TorchVarlen:
    """`torch.nn.attention.varlen.varlen_attn`, whose kernels are FlashAttention's too."""

    function: Callable[..., Any]
    with_lse: Any  # the value of `return_aux` that asks for the log-sum-exp
    name: str
    supports_softcap: bool = False

    @property
    def supports_window(self) -> bool:
        return "window_size" in _parameters(self.function)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        takes = _parameters(self.function)
        options: dict[str, Any] = {"scale": scale, "return_aux": self.with_lse}
        if "window_size" in takes:  # causality is a window without a left end
            options["window_size"] = (-1 if window is None else window - 1, 0) if causal else (-1, -1)
        else:
            options["is_causal"] = causal
        if "enable_gqa" in takes:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        out, lse = self.function(q, k, v, cu_q, cu_k, max_q, max_k, **options)
        return out, _rows_first(lse, q)


@functools.cache
def find() -> Varlen | str:
    """Look once for a provider: it, or the reason why there is none."""
    found = _find_flash_attn()
    if not isinstance(found, str):
        return found
    own = _find_torch_varlen()
    return f"{found}, and {own}" if isinstance(own, str) else own


def provider() -> Varlen:
    """Give the provider.

    Raises
    ------
    BackendError
        If there is none, with the reason.
    """
    found = find()
    if isinstance(found, str):
        raise BackendError(found)
    return found


def why_not(device: torch.device) -> str | None:
    """Give the reason why no provider can run on a device, None when one can.

    Examples
    --------
    >>> why_not(torch.device("cpu"))
    'FlashAttention runs on CUDA devices only'
    """
    return "FlashAttention runs on CUDA devices only" if device.type != "cuda" else _why_not_cuda(device.index)


def describe() -> str:
    """Name the provider that would run; empty where there is none."""
    found = find()
    return "" if isinstance(found, str) else found.name


@functools.cache
def _why_not_cuda(index: int | None) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(index)
    if capability < _MIN_CAPABILITY:
        found = f"{torch.cuda.get_device_name(index)} has {capability[0]}.{capability[1]}"
        return f"needs compute capability 8.0 or higher, {found}"
    provider = find()
    return provider if isinstance(provider, str) else None


def _find_flash_attn() -> Varlen | str:
    try:
        package = importlib.import_module("flash_attn")
        function = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return "flash-attn is not installed"
        return f"flash-attn does not load: {error}"
    except Exception as error:  # built for another torch or CUDA, it raises anything
        return f"flash-attn does not load: {type(error).__name__}: {error}"
    name = f"flash-attn {getattr(package, '__version__', 'of unknown version')}"
    if "softcap" not in _parameters(function):  # both changed in the same release
        return f"{name} pads its log-sum-exp: install a later one"
    return FlashAttn(function, name)


def _find_torch_varlen() -> Varlen | str:
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ModuleNotFoundError:
        return f"torch {torch.__version__} has no varlen_attn"
    name = f"varlen_attn of torch {torch.__version__}"
    if not {"scale", "return_aux"} <= _parameters(module.varlen_attn):
        return f"{name} takes no scale or gives no log-sum-exp"
    if torch.version.hip is not None:
        return f"{name} pads its log-sum-exp on ROCm"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} is built without FlashAttention"
    return TorchVarlen(module.varlen_attn, module.AuxRequest(lse=True), name)


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _rows_first(lse: Tensor, q: Tensor) -> Tensor:
    """[num_heads, total_q], as both report it, seen as [total_q, num_heads]."""
    if lse.shape != (q.shape[1], q.shape[0]):
        found = f"a log-sum-exp of shape {tuple(lse.shape)} for {q.shape[0]} rows and {q.shape[1]} heads"
        raise BackendError(f"FlashAttention returned {found}, which is not [heads, rows]")
    return lse.T
