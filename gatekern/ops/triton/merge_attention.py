# ruff: noqa: N803
# mypy: ignore-errors
"""One kernel, bound by memory: a program reads some rows of one head from both sides and writes their merger.

Heads vary fastest over programs, because a row's heads lie next to each other. Nothing is reduced over rows, so a row's
result does not depend on its batch.

Kernel parameters in capitals are constexpr, as everywhere in Triton; mypy cannot read its language.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gatekern.ops.triton.configs import ENABLE_FP_FUSION, MERGE_ATTENTION


# What changes from call to call is not worth a compilation of its own.
@triton.jit(do_not_specialize=["rows"])
def merge_attention_kernel(
    out_a: tl.tensor,
    lse_a: tl.tensor,
    out_b: tl.tensor,
    lse_b: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    out_a_row_stride: tl.tensor,
    out_a_head_stride: tl.tensor,
    lse_a_row_stride: tl.tensor,
    lse_a_head_stride: tl.tensor,
    out_b_row_stride: tl.tensor,
    out_b_head_stride: tl.tensor,
    lse_b_row_stride: tl.tensor,
    lse_b_head_stride: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = (tl.program_id(0) // heads).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    l_a = tl.load(lse_a + row * lse_a_row_stride + head * lse_a_head_stride, mask=row < rows, other=0.0)
    l_b = tl.load(lse_b + row * lse_b_row_stride + head * lse_b_head_stride, mask=row < rows, other=0.0)

    maximum = tl.maximum(l_a, l_b)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)  # only there: +inf has to become NaN
    weight_a = tl.exp(l_a - shift)
    weight_b = tl.exp(l_b - shift)
    total = weight_a + weight_b
    tl.store(lse + row * heads + head, shift + tl.log(total), mask=row < rows)

    blind_a = l_a == float("-inf")
    blind_b = l_b == float("-inf")
    share_a = weight_a / total
    share_b = weight_b / total
    k = tl.arange(0, BLOCK_WIDTH)
    a_tile = out_a + row[:, None] * out_a_row_stride + head * out_a_head_stride + k[None, :]
    b_tile = out_b + row[:, None] * out_b_row_stride + head * out_b_head_stride + k[None, :]
    out_tile = out + (row[:, None] * heads + head) * dim + k[None, :]
    for begin in range(0, dim, BLOCK_WIDTH):
        inside = (row < rows)[:, None] & (begin + k < dim)[None, :]
        # A blind side is not read: whatever its output holds, it is 0 times nothing.
        a = tl.load(a_tile + begin, mask=inside & ~blind_a[:, None], other=0.0).to(tl.float32)
        b = tl.load(b_tile + begin, mask=inside & ~blind_b[:, None], other=0.0).to(tl.float32)
        merged = tl.where(blind_a[:, None], 0.0, share_a[:, None] * a)
        merged += tl.where(blind_b[:, None], 0.0, share_b[:, None] * b)
        tl.store(out_tile + begin, merged.to(out.dtype.element_ty), mask=inside)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Launch on operands that `gatekern.ops.merge_attention` has checked."""
    rows, heads, dim = out_a.shape
    out_a, out_b = (x if x.stride(2) == 1 else x.contiguous() for x in (out_a, out_b))
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)
    if lse.numel() > 0:
        merge_attention_kernel[(triton.cdiv(rows, MERGE_ATTENTION.block_rows) * heads,)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            rows,
            heads,
            dim,
            out_a.stride(0),
            out_a.stride(1),
            lse_a.stride(0),
            lse_a.stride(1),
            out_b.stride(0),
            out_b.stride(1),
            lse_b.stride(0),
            lse_b.stride(1),
            BLOCK_ROWS=MERGE_ATTENTION.block_rows,
            BLOCK_WIDTH=MERGE_ATTENTION.block_width,
            num_warps=MERGE_ATTENTION.num_warps,
            num_stages=MERGE_ATTENTION.num_stages,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
    return out, lse
