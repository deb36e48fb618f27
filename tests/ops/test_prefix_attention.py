"""Attention over a packed stream against one dense mask in float64."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekern.layout import SegmentLayout, layout_of
from gatekern.ops.prefix_attention import prefix_attention, prefix_attention_reference, visibility
from gatekern.planning import build_prefix_tree, build_trie, pack

module = import_module("gatekern.ops.prefix_attention")  # the package exports the function of that name

EPS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def layouts(seed: int, num_prompts: int, longest: int, budget: int) -> list[SegmentLayout]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(1, longest + 1)) for _ in range(num_prompts)]
    trie = build_trie([rng.integers(0, 2, 3).tolist() for _ in range(rng.integers(0, 4))])
    budget = max(budget, len(trie))
    tree = build_prefix_tree(prompts, trie=trie, max_segment=budget, min_saved=int(rng.integers(0, 6)))
    found = []
    for forward in pack(tree, budget):
        found.append(forward.layout)
        for _ in range(3):  # and of a decode below it
            rows = rng.integers(0, found[-1].num_rows, rng.integers(1, 8))
            found.append(found[-1].extended(np.sort(rows)))
    return found


def operands(layout: SegmentLayout, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (layout.num_rows, heads, dim),
        (layout.num_keys, kv_heads, dim),
        (layout.num_keys, kv_heads, value_dim),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_as_exact_as_torch(layout, q, k, v, **options):
    """|ours - truth| <= |dense attention in the same dtype - truth| + eps, elementwise maximum."""
    truth = prefix_attention_reference(q.double(), k.double(), v.double(), layout, **options)
    ours = prefix_attention(q, k, v, layout, **options)
    assert ours.dtype == q.dtype
    assert ours.shape == truth.shape
    sinks = options.pop("sinks", None)
    plain = prefix_attention_reference(q, k, v, layout, sinks=sinks, **options)
    error, allowed = (ours.double() - truth).abs().max(), (plain.double() - truth).abs().max()
    assert error <= allowed + EPS[q.dtype] * max(1.0, truth.abs().max().item())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(3, 60),
    window=st.sampled_from([None, 1, 3, 9]),
    chunk=st.sampled_from([None, None, 4]),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    dims=st.sampled_from([(8, 8), (16, 16), (16, 12)]),
    tiles=st.sampled_from([(2, 3), (5, 256), (256, 256)]),
)
def test_matches_the_dense_mask(seed, budget, window, chunk, softcap, sink, heads, dims, tiles):
    before = module._ROWS_PER_MASK, module._ALONE
    module._ROWS_PER_MASK, module._ALONE = tiles  # small tiles, so that small inputs have several
    try:
        for layout in layouts(seed, 7, 24, budget):
            q, k, v = operands(layout, *heads, *dims, torch.float32)
            sinks = torch.linspace(-1, 2, heads[0]) if sink else None
            assert_as_exact_as_torch(
                layout, q, k, v, scale=0.4, window=window, chunk=chunk, softcap=softcap, sinks=sinks
            )
    finally:
        module._ROWS_PER_MASK, module._ALONE = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 3.0)])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_low_precision_is_as_exact_as_plain_torch(dtype, window, softcap, dim):
    rng = np.random.default_rng(3)
    context = rng.integers(0, 50, 300)
    prompts = [np.concatenate([context, rng.integers(0, 50, length)]) for length in (5, 17, 1, 60, 33)]
    for forward in pack(build_prefix_tree(prompts, max_segment=350), 350):
        layout = forward.layout
        q, k, v = operands(layout, 6, 2, dim, dim, dtype)
        assert_as_exact_as_torch(layout, q, k, v, scale=dim**-0.5, window=window, softcap=softcap)


def test_strided_views_as_models_pass_them():
    """Models hand over [1, heads, rows, dim] views; rows-first views of them are strided."""
    layout = layouts(0, 5, 20, 1000)[0]
    q, k, v = operands(layout, 4, 2, 16, 16, torch.float32)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert not heads_first[0].is_contiguous()
    torch.testing.assert_close(
        prefix_attention(*heads_first, layout, scale=0.3), prefix_attention(q, k, v, layout, scale=0.3)
    )


def test_large_scores_do_not_overflow():
    layout = layouts(1, 5, 20, 1000)[0]
    q, k, v = operands(layout, 4, 2, 16, 16, torch.float32)
    out = prefix_attention(q * 100, k * 100, v, layout, scale=1.0, window=4)
    assert torch.isfinite(out).all()
    truth = prefix_attention_reference(q.double() * 100, k.double() * 100, v.double(), layout, scale=1.0, window=4)
    assert (out - truth).abs().max() < 1e-2  # scores of 1e5 have a float32 spacing of 8e-3


def test_no_mask_of_all_rows_by_all_keys_is_built(monkeypatch):
    """A long context with a window: masks stay a block of rows by the keys that it spans."""
    masks = []
    attend = module._attend

    def spy(*args, bias=None, **options):
        if bias is not None:
            masks.append(bias.shape)
        return attend(*args, bias=bias, **options)

    monkeypatch.setattr(module, "_attend", spy)
    rng = np.random.default_rng(0)
    context = rng.integers(0, 50, 3000)
    prompts = [np.concatenate([context, rng.integers(0, 50, 20)]) for _ in range(4)]
    (forward,) = pack(build_prefix_tree(prompts), 10_000)
    layout = forward.layout
    q, k, v = operands(layout, 2, 1, 8, 8, torch.float32)
    prefix_attention(q, k, v, layout, scale=0.3, window=64)
    assert masks
    assert max(rows for *_, rows, _ in masks) <= 256
    assert max(keys for *_, keys in masks) <= 256 + 64


def test_visibility_is_the_tree():
    layout = layout_of(
        seen=np.array([[0, 3], [1, 3], [2, 3]]),
        key_positions=np.array([0, 1, 2]),
        own_offsets=np.array([0, 2, 3]),
        own=[[(0, 2)], [(2, 3)]],
        shared=[((2, 3), [(0, 2)])],
    )
    assert visibility(layout).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert visibility(layout, window=2).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert visibility(layout, chunk=2).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
