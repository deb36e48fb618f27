"""Attention over packed prompts: problem sizes, and what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.recorder import NotHereError, Setup
from gatekern.layout import IntArray, SegmentLayout
from gatekern.planning import build_prefix_tree, pack


@dataclass(frozen=True)
class Workload:
    """``contexts`` of ``prefix`` tokens, ``facts`` below each of ``own`` tokens."""

    contexts: int
    prefix: int
    facts: int
    own: int

    def __str__(self) -> str:
        return f"{self.contexts} x ({self.prefix:,} + {self.facts} x {self.own})"

    def prompts(self, vocab: int, *, jitter: int = 0) -> list[IntArray]:
        """Prompts that differ in the first token of each context and of each fact, in the order of the packed stream.

        With `jitter` the length of a fact varies by up to so many tokens.
        """
        rng = np.random.default_rng(0)
        prompts = []
        for context in range(self.contexts):
            prefix = np.append(context, rng.integers(0, vocab, self.prefix - 1))
            for fact in range(self.facts):
                length = self.own + int(rng.integers(-jitter, jitter + 1))
                prompts.append(np.concatenate([prefix, [fact], rng.integers(0, vocab, length - 1)]))
        return prompts


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.model} {self.heads}/{self.kv_heads} x {self.dim}{window}"


def pairs(positions: IntArray, window: int | None = None) -> int:
    """Pairs of a row and a key that it sees: ``sum over rows of min(position + 1, window)``."""
    seen = positions + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())


@lru_cache(maxsize=1)
def _layout(workload: Workload) -> SegmentLayout:
    """The attention pattern of all prompts in one forward."""
    tree = build_prefix_tree(workload.prompts(30_000))
    (forward,) = pack(tree, len(tree.tokens))
    expected = workload.contexts * (workload.prefix + workload.facts * workload.own)
    assert forward.layout.num_rows == expected, "the stream is not [context, fact, fact, ..., context, ...]"
    return forward.layout


class Problem:
    """Operands of one layer over one packed stream, and the peers that compute the same.

    Attributes
    ----------
    flops : int
        ``4 * heads * dim * pairs``: two products of a multiply and an add for every pair of a row and a visible key.
    bytes : int
        Queries, keys, values and results once each, ``tokens * dim * (2 * heads + 2 * kv_heads) * element_size``.
    """

    def __init__(self, workload: Workload, heads: Heads, setup: Setup, dtype: torch.dtype = torch.bfloat16) -> None:
        self.workload, self.heads, self.setup = workload, heads, setup
        self.layout = _layout(workload)
        rows = self.layout.num_rows
        self.scale = heads.dim**-0.5
        self.query, self.key, self.value = (
            torch.randn(rows, count, heads.dim, device=setup.device, dtype=dtype)
            for count in (heads.heads, heads.kv_heads, heads.kv_heads)
        )
        self.flops = 4 * heads.heads * heads.dim * pairs(self.layout.row_positions, heads.window)
        self.bytes = rows * heads.dim * (2 * heads.heads + 2 * heads.kv_heads) * self.query.element_size()

    def peers(self) -> dict[str, Callable[[], Tensor]]:
        """Forms of plain PyTorch; each returns the results of the facts' rows, [all facts, own, heads, dim].

        Masks, offsets and gathered prompts are made once, before anything is timed.
        """
        return {"sdpa, dense mask": self._dense, "two flash calls": self._two_calls, "separate causal": self._separate}

    def fact_rows(self, out: Tensor) -> Tensor:
        """Rows of the facts in a result of the packed stream [rows, heads, dim]."""
        work = self.workload
        return out.view(work.contexts, -1, *out.shape[1:])[:, work.prefix :].reshape(-1, work.own, *out.shape[1:])

    @property
    def _sees_all(self) -> bool:
        return self.heads.window is None or self.heads.window >= self.workload.prefix + self.workload.own

    def _dense(self) -> Tensor:
        """One call with a mask of all rows by all keys; keys repeated for GQA, as transformers does with a mask."""
        group = self.heads.heads // self.heads.kv_heads
        key, value = (x.repeat_interleave(group, dim=1) for x in (self.key, self.value))
        q, k, v = (x.transpose(0, 1)[None] for x in (self.query, key, value))
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=self.scale)
        return self.fact_rows(out[0].transpose(0, 1))

    def _two_calls(self) -> Tensor:
        """Flash over all segments, flash of all facts of a context over it without a mask, merged by log-sum-exp."""
        work = self.workload
        if not self.setup.cuda:
            raise NotHereError("the flash calls run on CUDA only")
        if not self._sees_all:
            raise NotHereError("the call over the context cannot express a window")
        flash = torch.ops.aten._flash_attention_forward
        cuts, longest = self._segments, max(work.prefix, work.own)
        operands = (self.query, self.key, self.value)
        own, own_lse = flash(*operands, cuts, cuts, longest, longest, 0.0, True, False, scale=self.scale)[:2]
        q, k, v = (x.view(work.contexts, -1, *x.shape[1:]) for x in operands)
        q, k, v = q[:, work.prefix :], k[:, : work.prefix], v[:, : work.prefix]
        sizes = q.shape[1], work.prefix
        shared, shared_lse = flash(q, k, v, None, None, *sizes, 0.0, False, False, scale=self.scale)[:2]
        own_lse = own_lse.view(self.heads.heads, work.contexts, -1)[..., work.prefix :].permute(1, 2, 0)
        weight = torch.sigmoid(shared_lse.transpose(1, 2) - own_lse)[..., None]
        mine = own.view(work.contexts, -1, *own.shape[1:])[:, work.prefix :]
        merged = torch.lerp(mine.float(), shared.float(), weight).to(own.dtype)
        return merged.view(-1, work.own, *own.shape[1:])

    def _separate(self) -> Tensor:
        """Every prompt whole, in one causal batch: the strongest thing without sharing."""
        q, k, v = self._whole_prompts
        if self._sees_all:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            out = out.transpose(1, 2)
        elif self.setup.cuda and self.heads.window is not None:
            sizes, reach = (q.shape[1], q.shape[1]), {"window_size_left": self.heads.window - 1, "window_size_right": 0}
            flash = torch.ops.aten._flash_attention_forward
            out = flash(q, k, v, None, None, *sizes, 0.0, True, False, scale=self.scale, **reach)[0]
        else:
            raise NotHereError("PyTorch has no windowed attention without a mask on a CPU")
        return out[:, self.workload.prefix :]

    @cached_property
    def _segments(self) -> Tensor:
        return torch.from_numpy(self.layout.own_offsets).to(self.setup.device, torch.int32)

    @cached_property
    def _whole_prompts(self) -> list[Tensor]:
        """Queries, keys and values gathered by prompt, [prompts, length, heads, dim]."""
        work, device = self.workload, self.setup.device
        begin = torch.arange(work.contexts, device=device)[:, None, None] * (work.prefix + work.facts * work.own)
        fact = torch.arange(work.facts, device=device)[:, None]
        place = torch.arange(work.prefix + work.own, device=device)
        rows = (begin + place + (place >= work.prefix) * fact * work.own).flatten(0, 1)
        return [x[rows] for x in (self.query, self.key, self.value)]

    @cached_property
    def _mask(self) -> Tensor:
        """Bool [rows, keys], built on the device."""
        rows, device = self.layout.num_rows, self.setup.device
        if self.setup.cuda and 4 * rows * rows > torch.cuda.mem_get_info()[0] // 2:
            raise NotHereError(f"a mask of {rows:,} x {rows:,} does not fit")
        begin, end = torch.from_numpy(self.layout.seen).to(device, torch.int32).unbind(1)
        position = torch.from_numpy(self.layout.key_positions).to(device, torch.int32)
        lowest = torch.from_numpy(self.layout.first_visible(self.heads.window, None)).to(device, torch.int32)
        row = torch.arange(rows, device=device, dtype=torch.int32)[:, None]
        return (begin <= row) & (row < end) & (position >= lowest[:, None])
