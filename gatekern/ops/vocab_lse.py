"""Log-sum-exp of the logits over the whole vocabulary, without the [N, V] logits.

With it, `exp(label logit - lse)` is the probability that the model gives to a label among everything it could say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatekern.errors import InputError
from gatekern.ops import dispatch
from gatekern.ops.head import accumulation_dtype, check_head, finish_logits_, with_contiguous_rows


def vocab_lse(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    *,
    backend: str = "auto",
    tile: int = 8192,
) -> Tensor:
    r"""Compute :math:`\log \sum_{t < V} e^{z_t}` with :math:`z_t = c \tanh(s (h \cdot w_t + b_t) / c)`.

    Parameters
    ----------
    hidden : Tensor, float32 | bfloat16 | float16 [N, H]
        Final hidden states, after the last norm.
    weight : Tensor, same dtype and device [V, H]
        LM head. Rows may be strided, each row is contiguous; it is never copied as a whole.
    bias : Tensor, float32 or same dtype [V], optional
        Added to the dot products.
    softcap : float, optional
        Cap `c` in nats; None: no cap.
    scale : float
        Factor `s` on the logits.
    backend : str
        ``"auto"``, ``"triton"`` or ``"torch"``.
    tile : int
        Vocabulary rows per step of the PyTorch form, which holds [N, tile] logits. The Triton form holds none.

    Returns
    -------
    Tensor, float32 [N]
        In nats, on the device of `hidden`; -inf where every logit is -inf. Not differentiable.

    Raises
    ------
    InputError
        If an operand does not fit.
    BackendError
        If an explicit `backend` cannot run here.

    Notes
    -----
    On the CPU this is one float32 matrix product per tile by PyTorch's math library. A 16-bit weight is widened tile by
    tile, so it costs about as much as a float32 one: two to six times a product in the 16-bit dtype, which would round
    every logit. On CUDA each program reduces its tile in registers and a
    second kernel adds the tiles in a fixed order, the fusion of Cut Cross-Entropy (arXiv 2411.09009) without its locks.

    Examples
    --------
    >>> import torch
    >>> vocab_lse(torch.ones(2, 3), torch.zeros(4, 3))
    tensor([1.3863, 1.3863])
    """
    lse: Tensor = torch.ops.gatekern.vocab_lse(hidden, weight, bias, softcap, scale, backend, tile)
    return lse


def vocab_lse_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute `vocab_lse` from the full [N, V] logits: in float64 for float64 operands, else in float32.

    Examples
    --------
    >>> import torch
    >>> vocab_lse_reference(torch.ones(2, 3), torch.zeros(4, 3))
    tensor([1.3863, 1.3863])
    """
    dtype = accumulation_dtype(hidden.dtype)
    return finish_logits_(hidden.to(dtype) @ weight.to(dtype).T, bias, softcap, scale).logsumexp(-1)


def _vocab_lse_tiled(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float, tile: int
) -> Tensor:
    hidden = hidden.float()
    total = hidden.new_full((hidden.shape[0],), float("-inf"))
    for begin in range(0, weight.shape[0], tile):
        rows = slice(begin, begin + tile)
        logits = finish_logits_(hidden @ weight[rows].float().T, None if bias is None else bias[rows], softcap, scale)
        # logsumexp and logaddexp both guard the all -inf case; exponentials in place keep one [N, tile] buffer.
        maximum = logits.amax(-1)
        shift = maximum.where(maximum.isfinite(), 0.0)
        total = torch.logaddexp(total, shift + logits.sub_(shift[:, None]).exp_().sum(-1).log_())
    return total


def _vocab_lse_triton(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float, tile: int
) -> Tensor:
    from gatekern.ops.triton.vocab_lse import vocab_lse as launch

    return launch(hidden, weight, bias, softcap, scale)


_FORMS = {"triton": _vocab_lse_triton, "torch": _vocab_lse_tiled}

dispatch.LIBRARY.define(  # type: ignore[no-untyped-call]
    "vocab_lse(Tensor hidden, Tensor weight, Tensor? bias=None, float? softcap=None, float scale=1.0, "
    'str backend="auto", int tile=8192) -> Tensor'
)


@torch.library.impl(dispatch.LIBRARY, "vocab_lse", "CompositeExplicitAutograd")
def _vocab_lse(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    backend: str = "auto",
    tile: int = 8192,
) -> Tensor:
    check_head(hidden, weight, bias, softcap, scale)
    if tile < 1:
        raise InputError(f"tile must be at least 1; got {tile}")
    operands = (with_contiguous_rows(hidden), weight, bias, softcap, scale, tile)
    with dispatch.plain_arithmetic(hidden.device):
        return dispatch.run("vocab_lse", backend, hidden.device, _FORMS, *operands)


# Not differentiable, and nothing is recorded: the graph would keep every widened tile of the weight.
dispatch.LIBRARY.impl("vocab_lse", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("gatekern::vocab_lse")  # type: ignore[untyped-decorator]
def _vocab_lse_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    backend: str = "auto",
    tile: int = 8192,
) -> Tensor:
    check_head(hidden, weight, bias, softcap, scale)
    return hidden.new_empty((hidden.shape[0],), dtype=torch.float32)
