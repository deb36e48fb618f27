"""Attention over packed prompts: problem sizes, and what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.prompts import Workload, layout_of_forward, visible_pairs
from benchmarks.gpu.recorder import NotHereError, Setup
from gatekern.layout import SegmentLayout


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.heads}/{self.kv_heads} x {self.dim}" + (
            f", window {self.window}" if self.window else ""
        )


class Problem:
    """Operands of one layer over one packed stream, and the peers that compute the same.

    Attributes
    ----------
    flops : int
        ``4 * heads * dim * pairs``: two products of a multiply and an add for every pair of a row and a visible key.
    bytes : int
        Queries, keys, values and results once each, ``tokens * dim * (2 * heads + 2 * kv_heads) * element_size``.
    """

    def __init__(self, workload: Workload, heads: Heads, dtype: torch.dtype, setup: Setup) -> None:
        self.workload, self.heads, self.setup = workload, heads, setup
        self.layout: SegmentLayout = layout_of_forward(workload.prompts(vocab=30_000))
        rows = self.layout.num_rows
        assert rows == workload.num_tokens, "the stream is not [context, fact, fact, ..., context, ...]"
        self.scale = heads.dim**-0.5
        self.query, self.key, self.value = (
            torch.randn(rows, count, heads.dim, device=setup.device).to(dtype)
            for count in (heads.heads, heads.kv_heads, heads.kv_heads)
        )
        self.flops = 4 * heads.heads * heads.dim * visible_pairs(self.layout, heads.window)
        self.bytes = rows * heads.dim * (2 * heads.heads + 2 * heads.kv_heads) * self.query.element_size()

    def peers(self) -> dict[str, Callable[[], Tensor]]:
        """Forms of plain PyTorch; each returns the results of the facts' rows, [all facts, own, heads, dim]."""
        return {"sdpa, dense mask": self._dense, "two flash calls": self._two_calls, "separate causal": self._separate}

    def fact_rows(self, out: Tensor) -> Tensor:
        """Rows of the facts in a result of the packed stream [rows, heads, dim]."""
        work = self.workload
        return out.view(work.contexts, -1, *out.shape[1:])[:, work.prefix :].reshape(-1, work.own, *out.shape[1:])

    def _dense(self) -> Tensor:
        """One call with a mask of all rows by all keys; keys repeated for GQA, as transformers does with a mask."""
        q, k, v = (x.transpose(0, 1)[None] for x in (self.query, self._repeated(self.key), self._repeated(self.value)))
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=self.scale)
        return self.fact_rows(out[0].transpose(0, 1))

    def _two_calls(self) -> Tensor:
        """Flash over all segments, flash of all facts of a context over it without a mask, merged by log-sum-exp."""
        work, reach = self.workload, self.heads.window
        if not self.setup.cuda:
            raise NotHereError("the flash calls run on CUDA only")
        if reach is not None and reach < work.prefix + work.own:
            raise NotHereError("the call over the context cannot express a window")
        flash = torch.ops.aten._flash_attention_forward
        longest = max(work.prefix, work.own)
        own, own_lse = flash(
            self.query, self.key, self.value, self._segments, self._segments, longest, longest, 0.0, True, False,
            scale=self.scale,
        )[:2]  # fmt: skip
        q, k, v = (x.view(work.contexts, -1, *x.shape[1:]) for x in (self.query, self.key, self.value))
        q, k, v = q[:, work.prefix :], k[:, : work.prefix], v[:, : work.prefix]
        shared, shared_lse = flash(q, k, v, None, None, q.shape[1], work.prefix, 0.0, False, False, scale=self.scale)[
            :2
        ]
        own_lse = own_lse.view(self.heads.heads, work.contexts, -1)[..., work.prefix :].permute(1, 2, 0)
        weight = torch.sigmoid(shared_lse.transpose(1, 2) - own_lse)[..., None]
        mine = own.view(work.contexts, -1, *own.shape[1:])[:, work.prefix :]
        merged = torch.lerp(mine.float(), shared.float(), weight).to(own.dtype)
        return merged.view(-1, work.own, *own.shape[1:])

    def _separate(self) -> Tensor:
        """Every prompt whole, in one causal batch: the strongest thing without sharing."""
        q, k, v = self._whole_prompts
        work, reach = self.workload, self.heads.window
        if reach is None or reach >= work.prefix + work.own:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True).transpose(
                1, 2
            )
        elif self.setup.cuda:
            length = work.prefix + work.own
            out = torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, length, length, 0.0, True, False,
                scale=self.scale, window_size_left=reach - 1, window_size_right=0,
            )[0]  # fmt: skip
        else:
            raise NotHereError("PyTorch has no windowed attention without a mask on a CPU")
        return out[:, work.prefix :]

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads.heads // self.heads.kv_heads, dim=1)

    @cached_property
    def _segments(self) -> Tensor:
        return torch.from_numpy(self.layout.own_offsets).to(self.setup.device, torch.int32)

    @cached_property
    def _whole_prompts(self) -> list[Tensor]:
        """Queries, keys and values gathered by prompt, [prompts, length, heads, dim]."""
        work, device = self.workload, self.setup.device
        begin = torch.arange(work.contexts, device=device)[:, None, None] * (work.num_tokens // work.contexts)
        fact = torch.arange(work.facts, device=device)[:, None]
        place = torch.arange(work.prefix + work.own, device=device)
        rows = (begin + place + (place >= work.prefix) * fact * work.own).flatten(0, 1)
        return [x[rows] for x in (self.query, self.key, self.value)]

    @cached_property
    def _mask(self) -> Tensor:
        """Bool [rows, keys], built on the device."""
        rows = self.layout.num_rows
        if self.setup.cuda and 4 * rows * rows > torch.cuda.mem_get_info()[0] // 2:
            raise NotHereError(f"a mask of {rows:,} x {rows:,} does not fit")
        device = self.setup.device
        begin, end = torch.from_numpy(self.layout.seen).to(device, torch.int32).unbind(1)
        position = torch.from_numpy(self.layout.key_positions).to(device, torch.int32)
        lowest = torch.from_numpy(self.layout.first_visible(self.heads.window, None)).to(device, torch.int32)
        row = torch.arange(rows, device=device, dtype=torch.int32)[:, None]
        return (begin <= row) & (row < end) & (position >= lowest[:, None])
