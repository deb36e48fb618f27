# ruff: noqa: N803
# mypy: ignore-errors
"""Two kernels: log-sum-exp of each (row tile, vocabulary tile) in registers, then of each row's tiles in a fixed order.

Between them lives float32 [N, V / tile], 256 times smaller than the logits. Nothing is added atomically, so the result
is the same on every run.

Kernel parameters in capitals are constexpr, as everywhere in Triton; mypy cannot read its language.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gatekern.ops.triton.configs import (
    ENABLE_FP_FUSION,
    PARTIALS_PER_STEP,
    ROW_TILES_PER_BAND,
    vocab_lse_config,
)
from gatekern.ops.triton.math import finish_logits, finite_shift, log_sum_exp


# What changes from call to call is not worth a compilation of its own.
@triton.jit(do_not_specialize=["rows"])
def tile_lse_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    vocab: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    # Programs that run at the same time share tiles of both operands: BAND row tiles walk the vocabulary together.
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    vocab_tiles = tl.cdiv(vocab, BLOCK_VOCAB)
    band = tl.program_id(0) // (BAND * vocab_tiles)
    within = tl.program_id(0) % (BAND * vocab_tiles)
    band_rows = tl.minimum(row_tiles - band * BAND, BAND)
    row_tile = band * BAND + within % band_rows
    vocab_tile = within // band_rows

    row = row_tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = vocab_tile.to(tl.int64) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    k = tl.arange(0, BLOCK_WIDTH)
    hidden_tile = hidden + row[:, None] * hidden_stride + k[None, :]
    weight_tile = weight + token[None, :] * weight_stride + k[:, None]
    dots = tl.zeros((BLOCK_ROWS, BLOCK_VOCAB), dtype=tl.float32)
    for begin in range(0, width, BLOCK_WIDTH):
        inside = begin + k < width
        h = tl.load(hidden_tile + begin, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_tile + begin, mask=(token < vocab)[None, :] & inside[:, None], other=0.0)
        if UPCAST:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        dots = tl.dot(h, w, dots, input_precision="ieee")

    b = tl.zeros((BLOCK_VOCAB,), dtype=tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + token, mask=token < vocab, other=0.0).to(tl.float32)
    z = finish_logits(dots, b[None, :], scale, softcap, HAS_SOFTCAP)
    lse = log_sum_exp(tl.where((token < vocab)[None, :], z, float("-inf")))
    tl.store(partial + row * vocab_tiles + vocab_tile, lse, mask=row < rows)


@triton.jit
def row_lse_kernel(partial: tl.tensor, out: tl.tensor, tiles: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        lse = tl.load(partial + row * tiles + tile, mask=tile < tiles, other=float("-inf"))[None, :]
        higher = tl.maximum(maximum, tl.max(lse, axis=1))
        shift = finite_shift(higher)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(lse - shift[:, None]), axis=1)
        maximum = higher
    tl.store(out + row + tl.arange(0, 1), finite_shift(maximum) + tl.log(total))


def vocab_lse(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float) -> Tensor:
    """Launch on operands that `gatekern.ops.vocab_lse` has checked."""
    (rows, width), vocab = hidden.shape, weight.shape[0]
    interpreted = hidden.device.type == "cpu"
    capability = (0, 0) if interpreted else torch.cuda.get_device_capability(hidden.device)
    config = vocab_lse_config(hidden.element_size(), capability)
    vocab_tiles = triton.cdiv(vocab, config.block_vocab)
    partial = hidden.new_empty((rows, vocab_tiles), dtype=torch.float32)
    out = hidden.new_empty((rows,), dtype=torch.float32)
    if rows > 0:
        tile_lse_kernel[(triton.cdiv(rows, config.block_rows) * vocab_tiles,)](
            hidden,
            weight,
            hidden if bias is None else bias.contiguous(),
            partial,
            rows,
            width,
            vocab,
            hidden.stride(0),
            weight.stride(0),
            scale,
            softcap or 0.0,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=softcap is not None,
            UPCAST=interpreted,  # the interpreter's dot multiplies the bit patterns of bf16
            BAND=ROW_TILES_PER_BAND,
            BLOCK_ROWS=config.block_rows,
            BLOCK_VOCAB=config.block_vocab,
            BLOCK_WIDTH=config.block_width,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
        row_lse_kernel[(rows,)](
            partial, out, vocab_tiles, BLOCK=PARTIALS_PER_STEP, num_warps=4, enable_fp_fusion=ENABLE_FP_FUSION
        )
    return out
