"""Logits of a few label groups, and the first group's share among them, read from the label rows of the LM head.

Only the rows of the labels are read, so the cost is that of a handful of dot products instead of a product with the
whole vocabulary. Products are accumulated in float32: bf16 logits near 20 are 0.125 apart, which moves a probability
near one half by 0.03.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from gatekern.errors import InputError
from gatekern.ops import dispatch, native
from gatekern.ops.head import accumulation_dtype, check_head, finish_logits_, with_contiguous_rows
from gatekern.ops.triton.configs import MAX_LABELS

_ROWS_PER_BLOCK = 16

Groups = Sequence[Sequence[int]] | tuple[Tensor, Tensor]


class LabelScores(NamedTuple):
    """What `label_scores` returns.

    Attributes
    ----------
    logits : Tensor, float32 [N, G]
        Log-sum-exp of each group's logits, in nats.
    score : Tensor, float32 [N]
        Probability of group 0 among all groups.
    """

    logits: Tensor
    score: Tensor


def label_scores(
    hidden: Tensor,
    weight: Tensor,
    groups: Groups,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    *,
    backend: str = "auto",
) -> LabelScores:
    r"""Score label groups from hidden states and the label rows of the LM head.

    With :math:`z_t = c \tanh(s (h \cdot w_t + b_t) / c)` (no cap: :math:`z_t = s (h \cdot w_t + b_t)`),

    .. math:: \ell_g = \log \sum_{t \in g} e^{z_t}, \qquad p = \frac{e^{\ell_0}}{\sum_g e^{\ell_g}},

    which for two groups is :math:`p = \sigma(\ell_0 - \ell_1)`.

    Parameters
    ----------
    hidden : Tensor, float32 | bfloat16 | float16 [N, H]
        Final hidden states, after the last norm.
    weight : Tensor, same dtype and device [V, H]
        LM head. Rows may be strided, each row is contiguous; it is never copied.
    groups : sequence of sequences of int, or (Tensor int64 [L], Tensor int64 [G + 1])
        Token ids of each label group; or the result of `pack_groups`, which saves the checks and the transfer.
    bias : Tensor, float32 or same dtype [V], optional
        Added to the dot products.
    softcap : float, optional
        Cap `c` in nats, as in Gemma 2.
    scale : float
        Factor `s` on the logits, as in Cohere and Granite.
    backend : str
        ``"auto"``, ``"triton"``, ``"native"`` or ``"torch"``.

    Returns
    -------
    LabelScores
        ``logits`` float32 [N, G] in nats and ``score`` float32 [N], on the device of `hidden`; not differentiable.

    Raises
    ------
    InputError
        If an operand does not fit, a group is empty, or an id is outside [0, V) or given twice.
    BackendError
        If an explicit `backend` cannot run here.

    Notes
    -----
    A group whose logits are all -inf has logit -inf. The score is NaN, never a plausible number, where it is undefined:
    any NaN, a logit of +inf, or all groups at -inf. Packed ids are trusted, because looking at them would stall a GPU;
    one outside [0, V) gives NaN and reads no foreign memory.

    In the native and Triton forms a row's result does not depend on the other rows, to the last bit. PyTorch's own
    matrix product does not promise that.

    Examples
    --------
    >>> import torch
    >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> weight = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> label_scores(hidden, weight, groups=[[0], [1]]).score
    tensor([0.8808, 0.1192])
    """
    check_head(hidden, weight, bias, softcap, scale)
    if _is_packed(groups):
        label_ids, group_offsets = groups
    else:
        token_groups = cast(Sequence[Sequence[int]], groups)
        label_ids, group_offsets = pack_groups(token_groups, weight.shape[0], device=hidden.device)
    logits, score = torch.ops.gatekern.label_scores(
        hidden, weight, label_ids, group_offsets, bias, softcap, scale, backend
    )
    return LabelScores(logits, score)


def pack_groups(
    groups: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Check label groups and lay them out as CSR tensors, once for many calls of `label_scores`.

    Parameters
    ----------
    groups : sequence of sequences of int
        Token ids of each group.
    vocab_size : int
        `V`; ids must be in [0, V).
    device : torch.device or str, optional
        Where the packed groups go; it must be that of `hidden`.

    Returns
    -------
    label_ids : Tensor, int64 [L]
    group_offsets : Tensor, int64 [G + 1]

    Raises
    ------
    InputError
        If there is no group, a group is empty, or an id is no integer, outside [0, V) or given twice.

    Examples
    --------
    >>> pack_groups([[7, 9], [3]], vocab_size=10)
    (tensor([7, 9, 3]), tensor([0, 2, 3]))
    """
    if len(groups) == 0:
        raise InputError("groups is empty: give at least one group of token ids")
    owner: dict[int, int] = {}
    for index, group in enumerate(groups):
        if len(group) == 0:
            raise InputError(f"group {index} is empty", index=index)
        for token in group:
            try:
                token_id = operator.index(token)
            except TypeError:
                raise InputError(f"group {index}: {token!r} is not a token id", index=index) from None
            if not 0 <= token_id < vocab_size:
                raise InputError(
                    f"group {index}: token id {token_id} is outside the vocabulary [0, {vocab_size})", index=index
                )
            if token_id in owner:
                raise InputError(
                    f"group {index}: token id {token_id} is already in group {owner[token_id]}", index=index
                )
            owner[token_id] = index
    offsets = list(accumulate((len(group) for group in groups), initial=0))
    return (
        torch.tensor(list(owner), dtype=torch.int64, device=device),
        torch.tensor(offsets, dtype=torch.int64, device=device),
    )


def label_scores_reference(
    hidden: Tensor,
    weight: Tensor,
    label_ids: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> LabelScores:
    """Compute `label_scores` in plain PyTorch: in float64 for float64 operands, else in float32.

    Examples
    --------
    >>> import torch
    >>> packed = pack_groups([[0], [1]], vocab_size=2)
    >>> label_scores_reference(torch.ones(1, 3), torch.zeros(2, 3), *packed).score
    tensor([0.5000])
    """
    dtype = accumulation_dtype(hidden.dtype)
    known = (label_ids >= 0) & (label_ids < weight.shape[0])
    rows = label_ids.where(known, 0)
    dots = hidden.to(dtype) @ weight[rows].to(dtype).T
    logits = finish_logits_(dots, None if bias is None else bias[rows], softcap, scale)
    logits = logits.where(known, float("nan"))
    position = torch.arange(label_ids.shape[0], device=label_ids.device)
    group_logits = [
        logits.where((position >= begin) & (position < end), float("-inf")).logsumexp(-1)
        for begin, end in pairwise(group_offsets)
    ]
    stacked = torch.stack(group_logits, dim=-1)
    return LabelScores(stacked, stacked.softmax(-1)[:, 0].contiguous())


def _label_scores_triton(*operands: object) -> tuple[Tensor, Tensor]:
    from gatekern.ops.triton.label_scores import label_scores as launch

    return launch(*operands)  # type: ignore[arg-type]


def _label_scores_torch(hidden: Tensor, *operands: object) -> tuple[Tensor, Tensor]:
    """In blocks of rows: PyTorch's product of a few rows adds in another order than that of many."""
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[0] % _ROWS_PER_BLOCK))
    logits, score = label_scores_reference(padded, *operands)  # type: ignore[arg-type]
    return logits[: len(hidden)], score[: len(hidden)]


_FORMS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _label_scores_triton,
    "native": native.label_scores,
    "torch": _label_scores_torch,
}


def _is_packed(groups: Groups) -> TypeGuard[tuple[Tensor, Tensor]]:
    return isinstance(groups, tuple) and len(groups) == 2 and all(isinstance(part, Tensor) for part in groups)


def _check_packed(hidden: Tensor, label_ids: Tensor, group_offsets: Tensor) -> None:
    for name, tensor, least in (("label_ids", label_ids, 1), ("group_offsets", group_offsets, 2)):
        if tensor.ndim != 1 or tensor.dtype != torch.int64 or tensor.shape[0] < least:
            found = f"got {tensor.dtype} {tuple(tensor.shape)}"
            raise InputError(f"{name} must be int64, 1-D, with at least {least} element(s); {found}")
        if tensor.device != hidden.device:
            raise InputError(f"{name} is on {tensor.device} and hidden on {hidden.device}")


dispatch.LIBRARY.define(  # type: ignore[no-untyped-call]
    "label_scores(Tensor hidden, Tensor weight, Tensor label_ids, Tensor group_offsets, Tensor? bias=None, "
    'float? softcap=None, float scale=1.0, str backend="auto") -> (Tensor, Tensor)'
)


# One body for every device: the dispatcher, not torch's, knows which form can run where.
@torch.library.impl(dispatch.LIBRARY, "label_scores", "CompositeExplicitAutograd")
def _label_scores(
    hidden: Tensor,
    weight: Tensor,
    label_ids: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    check_head(hidden, weight, bias, softcap, scale)
    _check_packed(hidden, label_ids, group_offsets)
    unfit = {}
    if label_ids.shape[0] > MAX_LABELS:
        unfit["triton"] = f"{label_ids.shape[0]} labels, its kernel takes at most {MAX_LABELS}"
    operands = (with_contiguous_rows(hidden), weight, label_ids, group_offsets, bias, softcap, scale)
    with dispatch.plain_arithmetic(hidden.device):
        return dispatch.run("label_scores", backend, hidden.device, _FORMS, *operands, unfit=unfit)


# Not differentiable, and nothing is recorded: the graph would keep every widened tile of the weight.
dispatch.LIBRARY.impl("label_scores", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("gatekern::label_scores")  # type: ignore[untyped-decorator]
def _label_scores_fake(
    hidden: Tensor,
    weight: Tensor,
    label_ids: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    check_head(hidden, weight, bias, softcap, scale)
    _check_packed(hidden, label_ids, group_offsets)
    rows, groups = hidden.shape[0], group_offsets.shape[0] - 1
    logits = hidden.new_empty((rows, groups), dtype=torch.float32)
    return logits, hidden.new_empty((rows,), dtype=torch.float32)
