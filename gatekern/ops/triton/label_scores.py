# ruff: noqa: N803
# mypy: ignore-errors
"""One kernel: gather the label rows by index, dot, log-sum-exp per group, softmax over groups.

A program owns 16 rows and all labels, so each hidden row is read once; the label rows are a few hundred KiB and stay in
the L2 cache. Sixteen rows are enough for tensor cores and few enough that 64 rows already spread over several
multiprocessors. One tile shape for every N makes a row's result independent of its batch.

Kernel parameters in capitals are constexpr, as everywhere in Triton; mypy cannot read its language.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gatekern.ops.triton.configs import ENABLE_FP_FUSION, label_scores_config
from gatekern.ops.triton.math import finish_logits, finite_shift, log_sum_exp


# What changes from call to call is not worth a compilation of its own.
@triton.jit(do_not_specialize=["rows"])
def label_scores_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    label_ids: tl.tensor,
    group_offsets: tl.tensor,
    logits: tl.tensor,
    score: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    vocab: tl.tensor,
    labels: tl.tensor,
    groups: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LABELS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    position = tl.arange(0, BLOCK_LABELS)
    ids = tl.load(label_ids + position, mask=position < labels, other=0)
    known = (ids >= 0) & (ids < vocab)

    k = tl.arange(0, BLOCK_WIDTH)
    hidden_tile = hidden + row[:, None] * hidden_stride + k[None, :]
    weight_tile = weight + ids[None, :] * weight_stride + k[:, None]
    dots = tl.zeros((BLOCK_ROWS, BLOCK_LABELS), dtype=tl.float32)
    for begin in range(0, width, BLOCK_WIDTH):
        inside = begin + k < width
        h = tl.load(hidden_tile + begin, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_tile + begin, mask=known[None, :] & inside[:, None], other=0.0)
        if UPCAST:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        dots = tl.dot(h, w, dots, input_precision="ieee")

    b = tl.zeros((BLOCK_LABELS,), dtype=tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + ids, mask=known, other=0.0).to(tl.float32)
    z = finish_logits(dots, b[None, :], scale, softcap, HAS_SOFTCAP)
    z = tl.where(known[None, :], z, float("nan"))

    # Softmax over groups, online: `total` is the sum of exp(logit - maximum) so far.
    first = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    maximum = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for group in range(groups):
        start = tl.load(group_offsets + group)
        stop = tl.minimum(tl.load(group_offsets + group + 1), labels)
        member = (position >= start) & (position < stop)
        logit = log_sum_exp(tl.where(member[None, :], z, float("-inf")))
        tl.store(logits + row * groups + group, logit, mask=row < rows)
        first = tl.where(group == 0, logit, first)
        higher = tl.maximum(maximum, logit)
        shift = finite_shift(higher)
        total = total * tl.exp(maximum - shift) + tl.exp(logit - shift)
        maximum = higher
    # Without the guard on purpose: no finite maximum means no evidence, and the answer is NaN.
    tl.store(score + row, tl.exp(first - maximum) / total, mask=row < rows)


def label_scores(
    hidden: Tensor,
    weight: Tensor,
    label_ids: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch on operands that `gatekern.ops.label_scores` has checked."""
    rows, width = hidden.shape
    groups = group_offsets.shape[0] - 1
    logits = hidden.new_empty((rows, groups), dtype=torch.float32)
    score = hidden.new_empty((rows,), dtype=torch.float32)
    config = label_scores_config(hidden.element_size(), label_ids.shape[0])
    if rows > 0:
        label_scores_kernel[(triton.cdiv(rows, config.block_rows),)](
            hidden,
            weight,
            hidden if bias is None else bias.contiguous(),
            label_ids.contiguous(),
            group_offsets.contiguous(),
            logits,
            score,
            rows,
            width,
            weight.shape[0],
            label_ids.shape[0],
            groups,
            hidden.stride(0),
            weight.stride(0),
            scale,
            softcap or 0.0,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=softcap is not None,
            UPCAST=hidden.device.type == "cpu",  # the interpreter, whose dot multiplies the bit patterns of bf16
            BLOCK_ROWS=config.block_rows,
            BLOCK_LABELS=config.block_vocab,
            BLOCK_WIDTH=config.block_width,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
    return logits, score
