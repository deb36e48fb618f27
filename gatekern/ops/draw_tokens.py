"""Draw next tokens from hidden states by inverse transform: a uniform number gives the same token in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from gatekern.errors import InputError
from gatekern.ops import dispatch
from gatekern.ops.head import check_head, finish_logits_

_LOGITS_PER_BLOCK = 1 << 23  # elements of the logits that are held at once
_TILE = 8192  # rows of the weight that are widened at a time
_NUCLEUS = 1024  # tokens that hold nearly every nucleus


def draw_tokens(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    uniforms: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Tensor:
    r"""Draw one token for each uniform number from the distribution of its row.

    The token is the first :math:`t`, in order of ids, whose cumulative probability exceeds :math:`u`; probabilities are
    a softmax of the finished logits over `temperature`, cut to the nucleus of `top_p`. Rows are read once, however many
    draws they have.

    Parameters
    ----------
    hidden : Tensor, float32 | bfloat16 | float16 [N, H]
        Final hidden states.
    weight : Tensor, same dtype and device [V, H]
        LM head.
    rows : Tensor, int64 [D]
        Row of each draw.
    uniforms : Tensor, float64 [D]
        In [0, 1).
    bias, softcap, scale
        As in `vocab_lse`.
    temperature : float
        0 takes the most probable token (the lowest id among equals).
    top_p : float
        In (0, 1]: the most probable tokens whose mass just reaches it are kept.

    Returns
    -------
    Tensor, int64 [D]
        Token ids; -1 where a row's logits are not finite.

    Raises
    ------
    InputError
        If an operand does not fit.

    Examples
    --------
    >>> import torch
    >>> weight = torch.tensor([[0.0], [0.0], [-100.0]])
    >>> draw_tokens(torch.ones(1, 1), weight, torch.tensor([0, 0]), torch.tensor([0.25, 0.75]).double())
    tensor([0, 1])
    """
    check_head(hidden, weight, bias, softcap, scale)
    if not 0.0 <= temperature < float("inf"):
        raise InputError(f"temperature must be from 0 on and finite; got {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise InputError(f"top_p must be above 0 and at most 1; got {top_p}")
    tokens = torch.empty_like(rows)
    step = max(1, _LOGITS_PER_BLOCK // weight.shape[0])
    with dispatch.plain_arithmetic(hidden.device):
        for begin in range(0, hidden.shape[0], step):
            block = hidden[begin : begin + step].float()
            dots = torch.cat([block @ part.float().T for part in weight.split(_TILE)], dim=1)
            logits = finish_logits_(dots, bias, softcap, scale)
            mine = (rows >= begin) & (rows < begin + step)
            tokens[mine] = _draw(logits, rows[mine] - begin, uniforms[mine], temperature, top_p)
    return tokens


def _draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    if temperature == 0.0:
        best = logits.max(dim=-1)
        return best.indices.where(best.values.isfinite(), -1)[rows]
    weights = logits.div_(temperature).softmax(dim=-1)
    if top_p < 1.0:
        weights.masked_fill_(weights < _nucleus_floor(weights, top_p), 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # One search a row for all its draws: numbers go into a matrix of rows by draws.
    order = rows.argsort(stable=True)
    row = rows[order]
    counts = rows.bincount(minlength=len(logits))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    wanted = cumulative.new_zeros(len(logits), int(counts.max()))
    total = cumulative[:, -1]
    wanted[row, place] = uniforms[order] * total[row]
    # u * total < total, so the token that is found has a weight above zero.
    found = torch.searchsorted(cumulative, wanted, right=True).where(total.isfinite()[:, None], -1)
    tokens = torch.empty_like(rows)
    tokens[order] = found[row, place]
    return tokens


def _nucleus_floor(weights: Tensor, top_p: float) -> Tensor:
    """Smallest probability inside each row's nucleus, [rows, 1]; tokens as probable as it are all inside."""
    largest = weights.topk(min(_NUCLEUS, weights.shape[-1]), dim=-1).values
    if bool((largest.sum(dim=-1) < top_p).any()):
        largest = weights.sort(dim=-1, descending=True).values
    before = largest.cumsum(dim=-1) - largest
    last = (before < top_p).sum(dim=-1, keepdim=True) - 1
    return largest.gather(-1, last.clamp(min=0))  # -1: a row that is not finite
