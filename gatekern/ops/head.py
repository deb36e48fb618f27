"""What the operators on a language-model head share: its description, operand checks, the map from product to logit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gatekern.errors import InputError

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadSpec:
    """A language-model head: ``logit[t] = softcap * tanh(scale * (h . weight[t] + bias[t]) / softcap)``, nats.

    Without a cap ``logit[t] = scale * (h . weight[t] + bias[t])``. The tensors are read where they are, never copied,
    and checked by the operator that is called with them.

    Attributes
    ----------
    weight : Tensor, float32 | bfloat16 | float16 [V, H]
        Each row contiguous. May have more rows than the tokenizer has tokens.
    bias : Tensor, float32 or same dtype [V], or None
    scale : float
        Factor on the logits, as in Cohere and Granite.
    softcap : float or None
        Cap in nats, as in Gemma 2.

    Examples
    --------
    >>> import torch
    >>> HeadSpec(torch.zeros(100, 8), softcap=30.0).vocab_rows
    100
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_rows(self) -> int:
        """Rows of the weight, `V`."""
        return int(self.weight.shape[0])


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float) -> None:
    """Check the operands of a head operator; metadata only, so it costs no device synchronisation.

    Raises
    ------
    InputError
        If a rank, size, dtype, device or layout does not fit, or `softcap` or `scale` is not usable.
    """
    if hidden.ndim != 2 or weight.ndim != 2:
        shapes = f"got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise InputError(f"hidden must be [N, H] and weight [V, H]; {shapes}")
    if hidden.shape[1] != weight.shape[1] or hidden.shape[1] == 0 or weight.shape[0] == 0:
        shapes = f"got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise InputError(f"hidden [N, H] and weight [V, H] must share one H, with H and V at least 1; {shapes}")
    if hidden.dtype not in DTYPES or weight.dtype != hidden.dtype:
        dtypes = f"got {hidden.dtype} and {weight.dtype}"
        raise InputError(f"hidden and weight must share one dtype of float32, bfloat16, float16; {dtypes}")
    if hidden.device != weight.device:
        raise InputError(f"hidden is on {hidden.device} and weight on {weight.device}")
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise InputError(f"each row of weight must be contiguous; its strides are {weight.stride()}")
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise InputError(f"bias must be [V] = [{weight.shape[0]}]; got {tuple(bias.shape)}")
        if bias.dtype not in (torch.float32, hidden.dtype):
            raise InputError(f"bias must be float32 or {hidden.dtype}; got {bias.dtype}")
        if bias.device != hidden.device:
            raise InputError(f"bias is on {bias.device} and hidden on {hidden.device}")
    # The kernels take both as float32. Comparisons, not math.isfinite: torch.compile can trace these.
    if softcap is not None and not _SMALLEST <= softcap <= _LARGEST:
        raise InputError(f"softcap must be a positive number or None, within float32; got {softcap}")
    if not abs(scale) <= _LARGEST:
        raise InputError(f"scale must be finite, within float32; got {scale}")


def with_contiguous_rows(hidden: Tensor) -> Tensor:
    """Copy hidden states whose rows are not contiguous; unlike the weight they are small."""
    return hidden if hidden.stride(1) == 1 else hidden.contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which the references compute: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finish_logits_(dots: Tensor, bias: Tensor | None, softcap: float | None, scale: float) -> Tensor:
    """Turn dot products into logits in place: ``softcap * tanh(scale * (dots + bias) / softcap)``."""
    if bias is not None:
        dots += bias
    if scale != 1.0:
        dots *= scale
    if softcap is not None:
        dots.div_(softcap).tanh_().mul_(softcap)
    return dots
