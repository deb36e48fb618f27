"""Log-sum-exp of the vocabulary's logits by class of token, without the logits.

A class is a set of tokens that mean the same: a digit, whatever ends a number, everything else. The masses of all
classes come from one product with the LM head, tile by tile; rows differ in what tokens mean to them, so each group of
rows has a class map of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatekern.errors import InputError
from gatekern.ops import dispatch
from gatekern.ops.head import accumulation_dtype, check_head, finish_logits_

_LOGITS_PER_BLOCK = 1 << 23  # elements of the logits that are held at once


def class_lse(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    num_classes: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    *,
    temperature: float = 1.0,
    backend: str = "auto",
    tile: int = 8192,
) -> Tensor:
    r"""Sum the probability of classes of tokens, in logs.

    With the logits :math:`z_t` of `vocab_lse`, :math:`\ell_c = \log \sum_{t : c(t) = c} e^{z_t / T}`; a softmax over
    the classes gives their probabilities.

    Parameters
    ----------
    hidden : Tensor, float32 | bfloat16 | float16 [M, N, H]
        `M` groups of `N` rows.
    weight : Tensor, same dtype and device [V, H]
        LM head; each row contiguous.
    classes : Tensor, uint8 [M, V]
        Class of every token for the rows of a group, below `num_classes`. Class 0 is summed apart, so that tokens of no
        interest cannot drown the others.
    num_classes : int
        `C`, at most 256.
    bias : Tensor, float32 or same dtype [V], optional
    softcap : float, optional
        Cap in nats, as in Gemma 2.
    scale : float
        Factor on the logits, as in Cohere and Granite.
    temperature : float
        `T`, positive; divides the finished logits.
    backend : str
        ``"auto"`` or ``"torch"``.
    tile : int
        Tokens taken at a time.

    Returns
    -------
    Tensor, float32 [M, N, C]
        In nats, on the device of `hidden`; -inf for a class without tokens, or with less than about e^-87 of what the
        classes from 1 on have together. Not differentiable.

    Raises
    ------
    InputError
        If an operand does not fit.
    BackendError
        If an explicit `backend` cannot run here.

    Examples
    --------
    >>> import torch
    >>> classes = torch.tensor([[0, 0, 0, 1]], dtype=torch.uint8)
    >>> class_lse(torch.ones(1, 1, 3), torch.zeros(4, 3), classes, 2)
    tensor([[[1.0986, 0.0000]]])
    """
    lse: Tensor = torch.ops.gatekern.class_lse(
        hidden, weight, classes, num_classes, bias, softcap, scale, temperature, backend, tile
    )
    return lse


def class_lse_reference(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    num_classes: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Compute `class_lse` from the full logits [M, N, V]: in float64 for float64 operands, else in float32.

    Examples
    --------
    >>> import torch
    >>> classes = torch.tensor([[0, 0, 0, 1]], dtype=torch.uint8)
    >>> class_lse_reference(torch.ones(1, 1, 3), torch.zeros(4, 3), classes, 2)
    tensor([[[1.0986, 0.0000]]])
    """
    dtype = accumulation_dtype(hidden.dtype)
    logits = finish_logits_(hidden.to(dtype) @ weight.to(dtype).T, bias, softcap, scale) / temperature
    of_class = classes[:, None, :, None] == torch.arange(num_classes, device=classes.device)
    return logits[..., None].masked_fill(~of_class, -torch.inf).logsumexp(dim=2)


def _class_lse_tiled(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    num_classes: int,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    temperature: float,
    tile: int,
) -> Tensor:
    groups, num_rows, width = hidden.shape
    out = hidden.new_empty((groups, num_rows, num_classes), dtype=torch.float32)
    step = max(1, _LOGITS_PER_BLOCK // (groups * min(tile, weight.shape[0])))
    for begin in range(0, num_rows, step):
        rows = hidden[:, begin : begin + step].float().contiguous()
        apart = rows.new_full(rows.shape[:2], float("-inf"))
        peak = apart.clone()
        total = rows.new_zeros((*rows.shape[:2], num_classes - 1))
        for at in range(0, weight.shape[0], tile):
            part = slice(at, at + tile)
            dots = rows.view(-1, width) @ weight[part].float().T
            logits = finish_logits_(dots, None if bias is None else bias[part], softcap, scale)
            logits = logits.div_(temperature).view(*rows.shape[:2], -1)
            zero = (classes[:, part] == 0)[:, None]
            apart = torch.logaddexp(apart, logits.masked_fill(~zero, -torch.inf).logsumexp(-1))
            logits.masked_fill_(zero, -torch.inf)
            higher = torch.maximum(peak, logits.amax(-1))
            shift = higher.where(higher.isfinite(), 0.0)  # rows of -inf stay at -inf
            terms = logits.sub_(shift[..., None]).exp_()
            # Sums by class are one more product, with an indicator of a few columns.
            indicator = (classes[:, part, None] == torch.arange(1, num_classes, device=classes.device)).float()
            total = total * torch.exp(peak - shift)[..., None] + terms @ indicator
            peak = higher
        out[:, begin : begin + step, 0] = apart
        out[:, begin : begin + step, 1:] = peak.where(peak.isfinite(), 0.0)[..., None] + total.log_()
    return out


_FORMS = {"torch": _class_lse_tiled}

dispatch.LIBRARY.define(  # type: ignore[no-untyped-call]
    "class_lse(Tensor hidden, Tensor weight, Tensor classes, int num_classes, Tensor? bias=None, float? softcap=None, "
    'float scale=1.0, float temperature=1.0, str backend="auto", int tile=8192) -> Tensor'
)


@torch.library.impl(dispatch.LIBRARY, "class_lse", "CompositeExplicitAutograd")
def _class_lse(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    num_classes: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    backend: str = "auto",
    tile: int = 8192,
) -> Tensor:
    _check(hidden, weight, classes, num_classes, bias, softcap, scale, temperature, tile)
    operands = (hidden, weight, classes, num_classes, bias, softcap, scale, temperature, tile)
    with dispatch.plain_arithmetic(hidden.device):
        return dispatch.run("class_lse", backend, hidden.device, _FORMS, *operands)


# Not differentiable, and nothing is recorded: the graph would keep every widened tile of the weight.
dispatch.LIBRARY.impl("class_lse", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("gatekern::class_lse")  # type: ignore[untyped-decorator]
def _class_lse_fake(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    num_classes: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    backend: str = "auto",
    tile: int = 8192,
) -> Tensor:
    _check(hidden, weight, classes, num_classes, bias, softcap, scale, temperature, tile)
    return hidden.new_empty((*hidden.shape[:2], num_classes), dtype=torch.float32)


def _check(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    num_classes: int,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    temperature: float,
    tile: int,
) -> None:
    if hidden.ndim != 3:
        raise InputError(f"hidden must be [M, N, H]; got {tuple(hidden.shape)}")
    check_head(hidden.flatten(0, 1), weight, bias, softcap, scale)
    if classes.dtype != torch.uint8 or classes.shape != (hidden.shape[0], weight.shape[0]):
        shape = f"[{hidden.shape[0]}, {weight.shape[0]}]"
        raise InputError(f"classes must be uint8 [M, V] = {shape}; got {classes.dtype} {tuple(classes.shape)}")
    if classes.device != hidden.device:
        raise InputError(f"classes is on {classes.device} and hidden on {hidden.device}")
    if not 1 <= num_classes <= 256:
        raise InputError(f"num_classes must be from 1 to 256; got {num_classes}")
    if not 0.0 < temperature < float("inf"):
        raise InputError(f"temperature must be positive and finite; got {temperature}")
    if tile < 1:
        raise InputError(f"tile must be at least 1; got {tile}")
