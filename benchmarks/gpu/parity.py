"""Every operator in every form against float64 on random operands: attention and its merge here, heads beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.judge import ATTENTION_EPS, forms, gate, name_of, verdict
from benchmarks.gpu.parity_heads import heads_and_parser
from benchmarks.gpu.recorder import NotHereError, Recorder, Results, Row, Setup
from gatekern.layout import SegmentLayout
from gatekern.ops import prefix_attention
from gatekern.ops.merge_attention import merge_attention, merge_attention_reference
from gatekern.ops.prefix_attention import prefix_attention_reference
from gatekern.planning import NO_TRIE, build_prefix_tree, build_trie, pack

Kind = Literal["packed", "trie", "decode", "cut"]
INVARIANT = "torch, invariant"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class AttentionCase:
    """``heads / kv_heads x dim`` over a kind of layout, with what a layer may ask for.

    Layouts: ``packed`` contexts with facts of unequal length, ``trie`` continuations below every fact, ``decode`` two
    steps below them, ``cut`` the last of several forwards, which reads keys of those before it.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    kind: Kind = "packed"
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        options = [self.kind, *(f"{name} {getattr(self, name)}" for name in ("window", "chunk", "softcap")
                                if getattr(self, name) is not None), *(["sinks"] if self.sinks else [])]  # fmt: skip
        return f"{self.heads}/{self.kv_heads} x {self.dim}, {', '.join(options)}"


#: What is timed and what models use comes first; kernels are compiled once for dtype, group, dim and the options.
ATTENTION = (
    AttentionCase(BF16, 14, 2, 64),
    AttentionCase(BF16, 8, 2, 64),
    AttentionCase(BF16, 8, 2, 128),
    AttentionCase(BF16, 4, 2, 256, window=100),
    AttentionCase(BF16, 8, 2, 128, "trie"),
    AttentionCase(BF16, 8, 2, 128, "decode"),
    AttentionCase(BF16, 8, 2, 128, "cut"),
    AttentionCase(FP32, 8, 2, 64),
    AttentionCase(FP32, 8, 2, 64, "trie"),
    AttentionCase(FP32, 8, 2, 64, "decode"),
    AttentionCase(FP32, 4, 4, 128, "cut"),
    AttentionCase(BF16, 4, 4, 80),
    AttentionCase(FP32, 7, 1, 80),
    AttentionCase(FP32, 4, 2, 256, window=100),
    AttentionCase(FP16, 14, 2, 64),
    AttentionCase(BF16, 8, 2, 64, window=40, sinks=True),
    AttentionCase(BF16, 8, 2, 64, chunk=64),
    AttentionCase(BF16, 4, 2, 256, "trie", window=100, softcap=5.0),
    AttentionCase(FP32, 8, 2, 64, "trie", window=40, softcap=5.0, sinks=True),
    AttentionCase(FP16, 8, 2, 128, softcap=5.0),
)


def parity(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """All operators; ``error`` is ours, ``plain_error`` that of plain PyTorch on the same operands in their dtype."""
    heads_and_parser(setup, recorder)
    _merges(setup, recorder)
    reasons = forms("prefix_attention", setup)
    reasons[INVARIANT] = None
    for case in ATTENTION:
        for form, reason in reasons.items():
            recorder.case(
                lambda case=case, form=form, reason=reason: _attention(case, form, reason, setup),  # type: ignore[misc]
                op="prefix_attention",
                case=str(case),
                dtype=name_of(case.dtype),
                backend=form,
                gate=gate("prefix_attention", form, case.dtype, case.dim),
            )


def _attention(case: AttentionCase, form: str, reason: str | None, setup: Setup) -> Row:
    if reason is not None:
        raise NotHereError(reason)
    layout = _layout(case.kind, setup.tiny)
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        """Heads first in memory where some models have them so; a view with rows first."""
        drawn = torch.randn(heads, rows, case.dim, generator=generator).to(setup.device, case.dtype).transpose(0, 1)
        return drawn.contiguous() if case.kind == "packed" else drawn

    q, k, v = (
        draw(*shape)
        for shape in (
            (layout.num_rows, case.heads),
            (layout.num_keys, case.kv_heads),
            (layout.num_keys, case.kv_heads),
        )
    )
    sinks = torch.linspace(-1, 2, case.heads, device=setup.device) if case.sinks else None
    options = {"scale": case.dim**-0.5, "window": case.window, "chunk": case.chunk, "softcap": case.softcap}
    how = {"backend": "torch", "invariant": True} if form == INVARIANT else {"backend": form}
    ours = prefix_attention(q, k, v, layout, sinks=sinks, **how, **options)
    plain = prefix_attention_reference(q, k, v, layout, sinks=sinks, **options)
    truth = prefix_attention_reference(q.double(), k.double(), v.double(), layout, sinks=sinks, **options)
    assert ours.dtype == q.dtype
    assert ours.shape == truth.shape
    return verdict(ours, plain, truth, ATTENTION_EPS[case.dtype], truth.abs().max().item())


@cache
def _layout(kind: Kind, tiny: bool) -> SegmentLayout:
    rng = np.random.default_rng(0)
    prefix, lengths = (23, (5, 17, 1, 9)) if tiny else (333, (5, 60, 1, 129, 33, 300))
    contexts = [rng.integers(0, 1000, size) for size in (prefix, prefix // 2, prefix + 7)]
    prompts = [np.concatenate([head, rng.integers(0, 1000, size)]) for head in contexts for size in lengths]
    trie = build_trie([(1, 2, 3), (1, 2, 4), (5, 6), (7,)]) if kind in ("trie", "decode") else NO_TRIE
    total = sum(map(len, contexts)) + 3 * (sum(lengths) + len(lengths) * len(trie))
    budget = total // 3 if kind == "cut" else total
    tree = build_prefix_tree(prompts, trie=trie, max_segment=budget)
    layout = [forward.layout for forward in pack(tree, budget)][-1]
    if kind == "decode":
        for _ in range(2):
            layout = layout.extended(np.sort(rng.integers(0, layout.num_rows, 40)))
    return layout


def _merges(setup: Setup, recorder: Recorder) -> None:
    for dtype in (BF16, FP32):
        for backend, reason in forms("merge_attention", setup).items():
            recorder.case(
                lambda dtype=dtype, backend=backend, reason=reason: _merge(dtype, backend, reason, setup),  # type: ignore[misc]
                op="merge_attention",
                case="300 x 7 x 80, some rows blind on one side or both",
                dtype=name_of(dtype),
                backend=backend,
                gate=gate("merge_attention", backend, dtype),
            )


def _merge(dtype: torch.dtype, backend: str, reason: str | None, setup: Setup) -> Row:
    if reason is not None:
        raise NotHereError(reason)
    out_a, out_b = (torch.randn(300, 7, 80, device=setup.device).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(300, 7, device=setup.device) * 5 for _ in range(2))
    lse_a[:20], lse_b[10:30] = -torch.inf, -torch.inf

    def flat(result: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([x.double().flatten() for x in result])

    ours = flat(merge_attention(out_a, lse_a, out_b, lse_b, backend=backend))
    plain = flat(merge_attention_reference(out_a, lse_a, out_b, lse_b))
    # The result is rounded to the dtype of the first operand, so float64 needs both as float64.
    truth = flat(merge_attention_reference(out_a.double(), lse_a.double(), out_b.double(), lse_b.double()))
    return verdict(ours, plain, truth, ATTENTION_EPS[dtype], truth[truth.isfinite()].abs().max().item())
