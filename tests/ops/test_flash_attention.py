"""The flash form against one dense mask in float64, with a stand-in for FlashAttention."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekern.errors import InputError
from gatekern.ops.flash import plan
from gatekern.ops.flash.prefix_attention import prefix_attention, unfit
from gatekern.ops.prefix_attention import prefix_attention_reference
from gatekern.planning import NO_TRIE, build_prefix_tree, build_trie, pack
from tests.ops.test_prefix_attention import EPS, layouts, operands


@dataclass
class StandIn:
    """Variable-length attention in plain PyTorch, as exacting about its arguments as FlashAttention, or more."""

    name: str = "stand-in"
    supports_softcap: bool = True
    supports_window: bool = True
    calls: list[tuple[bool, int]] = field(default_factory=list)  # causal, keys

    def __call__(self, q, k, v, cu_q, cu_k, max_q, max_k, *, scale, causal, window, softcap):
        assert q.dtype == k.dtype == v.dtype
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert len(cu_q) == len(cu_k)
        for cu, longest, total in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
            lengths = cu.diff()
            assert cu.dtype == torch.int32
            assert cu.is_contiguous()
            assert type(longest) is int
            assert longest == lengths.max()
            assert cu[0] == 0
            assert cu[-1] == total
            # Without rows, the reshaping of grouped queries fails; without keys, the log-sum-exp is +inf.
            assert lengths.min() > 0
        self.calls.append((causal, len(k)))
        left, right = (-1, 0 if causal else -1) if window is None else (window - 1, 0)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            out[q0:q1], lse[:, q0:q1] = dense(q[q0:q1], k[k0:k1], v[k0:k1], scale, left, right, softcap)
        return out, lse.T


def dense(q, k, v, scale, left, right, softcap):
    """One sequence: query i sees the keys i + num_keys - num_queries - left .. + right, -1 for no bound."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    seen = torch.ones_like(behind, dtype=torch.bool)
    if left >= 0:
        seen &= behind >= -left
    if right >= 0:
        seen &= behind <= right
    scores = scores.masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1)
    lse = scores.logsumexp(-1).masked_fill(blind, torch.inf)  # as FlashAttention reports a row without keys
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[..., None]), v)
    return out.to(q.dtype), lse


def assert_as_exact_as_torch(layout, q, k, v, **options):
    """|ours - truth| <= |dense attention in the same dtype - truth| + eps at the worst element; returns what ran."""
    stand_in = StandIn()
    ours = prefix_attention(q, k, v, layout, varlen=stand_in, **options)
    truth = prefix_attention_reference(q.double(), k.double(), v.double(), layout, **options)
    plain = prefix_attention_reference(q, k, v, layout, **options)
    assert ours.dtype == q.dtype
    assert ours.shape == truth.shape
    error, allowed = (ours.double() - truth).abs().max(), (plain.double() - truth).abs().max()
    assert error <= allowed + EPS[q.dtype] * max(1.0, truth.abs().max().item())
    return stand_in


def nesting(layout) -> int:
    """How many shared ranges the row in most of them is in."""
    depth = np.zeros(layout.num_rows + 1, dtype=np.int64)
    for (begin, end), _ in layout.shared():
        depth[begin] += 1
        depth[end] -= 1
    return int(np.cumsum(depth).max())


def prompts_below(context: int, facts: int, *, trie=NO_TRIE, seed: int = 0, length: int = 20):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 50, context)
    prompts = [np.concatenate([shared, rng.integers(0, 50, rng.integers(1, length + 1))]) for _ in range(facts)]
    (forward,) = pack(build_prefix_tree(prompts, trie=trie), 10**6)
    return forward.layout


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(3, 60),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
)
def test_matches_the_dense_mask(seed, budget, softcap, sink, heads):
    for layout in layouts(seed, 7, 24, budget):
        q, k, v = operands(layout, *heads, 16, 16, torch.float32)
        sinks = torch.linspace(-1, 2, heads[0]) if sink else None
        stand_in = assert_as_exact_as_torch(layout, q, k, v, scale=0.4, softcap=softcap, sinks=sinks)
        assert len(stand_in.calls) <= 3 + nesting(layout)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(3, 60),
    window=st.sampled_from([1, 2, 3, 9, 40]),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    keys_per_call=st.sampled_from([1, 10, 1 << 18]),
)
def test_windows_of_a_prefill(seed, budget, window, softcap, sink, keys_per_call):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(1, 25)) for _ in range(7)]
    before, plan._KEYS_PER_CALL = plan._KEYS_PER_CALL, keys_per_call
    try:
        for forward in pack(build_prefix_tree(prompts, max_segment=budget, min_saved=int(rng.integers(0, 6))), budget):
            layout = forward.layout
            q, k, v = operands(layout, 4, 2, 16, 16, torch.float32)
            sinks = torch.linspace(-1, 2, 4) if sink else None
            stand_in = assert_as_exact_as_torch(layout, q, k, v, scale=0.4, window=window, softcap=softcap, sinks=sinks)
            if window < layout.row_positions.max() + 1:
                assert all(causal for causal, _ in stand_in.calls)
                assert keys_per_call != 1 << 18 or len(stand_in.calls) == 1
    finally:
        plan._KEYS_PER_CALL = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 3.0)])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_low_precision_is_as_exact_as_plain_torch(dtype, window, softcap, dim):
    layout = prompts_below(300, 5, length=60)
    q, k, v = operands(layout, 6, 2, dim, dim, dtype)
    assert unfit(q, v, layout, window, None, softcap, StandIn()) is None
    assert_as_exact_as_torch(layout, q, k, v, scale=dim**-0.5, window=window, softcap=softcap)


@pytest.mark.parametrize("window", [None, 1, 8, 30])
def test_each_level_of_nested_prefixes_is_a_call(window):
    """Second children, whose keys lie apart from their parent's, and which have fewer rows than that has keys."""
    rng = np.random.default_rng(0)
    paths = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    prompts = [np.concatenate([[0] * 100, [a] * 40, [b] * 12, [c], rng.integers(0, 3, 2)]) for a, b, c in paths]
    (forward,) = pack(build_prefix_tree(prompts), 10**6)
    layout = forward.layout
    assert nesting(layout) == 3
    q, k, v = operands(layout, 4, 2, 16, 16, torch.float32)
    stand_in = assert_as_exact_as_torch(layout, q, k, v, scale=0.4, window=window)
    assert len(stand_in.calls) == (1 if window else 4)
    step = layout.extended(np.arange(0, layout.num_rows, 3))
    q, k, v = operands(step, 4, 2, 16, 16, torch.float32)
    assert len(assert_as_exact_as_torch(step, q, k, v, scale=0.4).calls) == 6


TRIE = build_trie([(4, 5, 6), (4, 5, 7), (4, 8), (9,)])


@pytest.mark.parametrize("trie", [NO_TRIE, TRIE], ids=["plain", "trie"])
def test_calls_do_not_grow_with_the_number_of_prompts(trie):
    counts = []
    for facts in (2, 20, 200):
        layout = prompts_below(30, facts, trie=trie)
        calls = []
        for _ in range(3):
            q, k, v = operands(layout, 2, 1, 8, 8, torch.float32)
            calls.append(len(assert_as_exact_as_torch(layout, q, k, v, scale=0.4).calls))
            layout = layout.extended(np.sort(np.arange(layout.num_rows)[-2 * facts :: 2].repeat(2)))
        counts.append(calls)
    assert counts[1] == counts[2]
    assert max(counts[2]) <= 4


def test_rows_of_a_prefill_and_one_run_of_shared_keys_are_not_copied():
    layout = prompts_below(30, 9)
    q, k, v = operands(layout, 2, 1, 8, 8, torch.float32)
    storages = []

    class Spy(StandIn):
        def __call__(self, q, k, v, *args, **options):
            storages.append({x.untyped_storage().data_ptr() for x in (q, k, v)})
            return super().__call__(q, k, v, *args, **options)

    prefix_attention(q, k, v, layout, scale=0.4, varlen=Spy())
    assert storages == [{x.untyped_storage().data_ptr() for x in (q, k, v)}] * 2


def test_plans_are_made_once_per_layout_and_window():
    layout = prompts_below(30, 9)
    device = torch.device("cpu")
    assert plan.plan_of(layout, None, device) is plan.plan_of(layout, None, device)
    assert plan.plan_of(layout, 5, device) is plan.plan_of(layout, 5, device)
    assert plan.plan_of(layout, 5, device) is not plan.plan_of(layout, None, device)


def test_strided_views_as_models_pass_them():
    layout = layouts(0, 5, 20, 1000)[0]
    q, k, v = operands(layout, 4, 2, 16, 16, torch.float32)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    torch.testing.assert_close(
        prefix_attention(*heads_first, layout, scale=0.3, varlen=StandIn()),
        prefix_attention(q, k, v, layout, scale=0.3, varlen=StandIn()),
    )
    assert torch.equal(heads_first[0], q)  # merged into results, never into an operand


def test_large_scores_do_not_overflow():
    layout = layouts(1, 5, 20, 1000)[0]
    q, k, v = operands(layout, 4, 2, 16, 16, torch.float32)
    out = prefix_attention(q * 100, k * 100, v, layout, scale=1.0, varlen=StandIn())
    truth = prefix_attention_reference(q.double() * 100, k.double() * 100, v.double(), layout, scale=1.0)
    assert (out - truth).abs().max() < 1e-2  # scores of 1e5 have a float32 spacing of 8e-3


@pytest.mark.parametrize(
    ("dtype", "dims", "options", "message"),
    [
        (torch.float32, (16, 16), {}, "takes float16 and bfloat16, not torch.float32"),
        (torch.bfloat16, (16, 8), {}, "keys and values of one dimension, got 16 and 8"),
        (torch.bfloat16, (264, 264), {}, "at most 256 dimensions, a multiple of 8; got 264"),
        (torch.bfloat16, (12, 12), {}, "at most 256 dimensions, a multiple of 8; got 12"),
        (torch.bfloat16, (16, 16), {"chunk": 4}, "no chunked attention"),
        (torch.bfloat16, (16, 16), {"softcap": 2.0}, "bare has no soft-cap"),
        (torch.bfloat16, (16, 16), {"window": 4}, "bare has no sliding window"),
    ],
)
def test_unfit_operands(dtype, dims, options, message):
    layout = prompts_below(30, 3)
    q, k, v = operands(layout, 2, 1, *dims, dtype)
    bare = StandIn("bare", supports_softcap=False, supports_window=False)
    given_options = {"window": None, "chunk": None, "softcap": None} | options
    assert message in str(unfit(q, v, layout, **given_options, varlen=bare))
    if options:
        with pytest.raises(InputError, match=message):
            prefix_attention(q, k, v, layout, scale=1.0, **options, varlen=bare)


def test_windows_over_branches_do_not_fit_unless_they_hide_nothing():
    layout = prompts_below(10, 3, trie=TRIE)
    q, k, v = operands(layout, 2, 1, 8, 8, torch.bfloat16)
    longest = int(layout.row_positions.max()) + 1
    for spans in ({"window": longest}, {"chunk": longest}):
        assert (
            unfit(q, v, layout, **({"window": None, "chunk": None, "softcap": None} | spans), varlen=StandIn()) is None
        )
        assert_as_exact_as_torch(layout, q, k, v, scale=0.4, **spans)
    for branching in (layout, prompts_below(10, 3).extended(np.array([12, 12, 13]))):
        q, k, v = operands(branching, 2, 1, 8, 8, torch.bfloat16)
        assert "branch" in str(unfit(q, v, branching, 4, None, None, StandIn()))
        with pytest.raises(InputError, match="branch"):
            prefix_attention(q, k, v, branching, scale=1.0, window=4, varlen=StandIn())
