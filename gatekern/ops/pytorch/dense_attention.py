"""One dense attention call with its log-sum-exp, on any device, and the merge of two."""

from __future__ import annotations

import torch
from torch import Tensor

_SCORES_PER_BLOCK = 1 << 23  # elements of the score matrix that plain products hold at once


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None,
    causal: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One dense attention call: output [batch, heads, rows, value_dim] and float32 log-sum-exp [batch, heads, rows].

    `causal` means that key ``i`` is row ``i``. `bias` [batch, 1, rows, keys] is added to the scores.
    """
    if attends_by_flash(query, value, softcap):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse
    return _attend_by_products(query, key, value, scale=scale, softcap=softcap, causal=causal, bias=bias)


def attends_by_flash(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether PyTorch's flash kernel for the CPU takes these operands."""
    return query.device.type == "cpu" and softcap is None and query.shape[-1] == value.shape[-1]


def _attend_by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, num_rows, _ = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    k, v = key.float()[:, :, None], value.float()[:, :, None]
    step = max(16, _SCORES_PER_BLOCK // (batch * heads * num_keys))
    outs, lses = [], []
    for row in range(0, num_rows, step):
        scores = grouped[..., row : row + step, :].float() @ k.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[:, :, None, row : row + step].float()
        if causal:
            rows = torch.arange(row, row + scores.shape[-2], device=scores.device)
            scores = scores.masked_fill(rows[:, None] < torch.arange(num_keys, device=scores.device), -torch.inf)
        lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])  # a blind row keeps weights of zero
        outs.append((weights @ v).to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=-2).flatten(1, 2), torch.cat(lses, dim=-1).flatten(1, 2)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over more keys into `out` and `lse`, in place.

    With ``w = sigmoid(part_lse - lse)`` the result is ``(1 - w) * out + w * part``, and its log-sum-exp
    ``logaddexp(lse, part_lse)``.

    Parameters
    ----------
    out : Tensor float32 [rows, heads, dim]
        Attention over the keys so far.
    lse : Tensor float32 [rows, heads]
        Its log-sum-exp of scores, nats; finite.
    part : Tensor [rows, heads, dim]
        Attention over other keys.
    part_lse : Tensor float32 [rows, heads]
        Its log-sum-exp, ``-inf`` where a row sees none of those keys.
    """
    out.lerp_(part.float(), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)
