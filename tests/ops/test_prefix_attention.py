"""Attention over a packed stream against one dense mask in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekern.errors import BackendError, InputError
from gatekern.layout import SegmentLayout, layout_of
from gatekern.ops.prefix_attention import prefix_attention, prefix_attention_reference, visibility
from gatekern.ops.pytorch import cascade_attention as module
from gatekern.planning import build_prefix_tree, build_trie, pack

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


def with_some_rows(found: list[SegmentLayout]) -> list[SegmentLayout]:
    """Each layout, and a part of its rows over the same keys."""
    rng = np.random.default_rng(0)
    parts = [one.of_rows(np.sort(rng.integers(0, one.num_rows, rng.integers(1, 6)))) for one in found]
    return [*found, *parts]


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
    invariant = options.pop("invariant", False)
    truth = prefix_attention_reference(q.double(), k.double(), v.double(), layout, **options)
    ours = prefix_attention(q, k, v, layout, invariant=invariant, **options)
    assert ours.dtype == q.dtype
    assert ours.shape == truth.shape
    sinks = options.pop("sinks", None)
    plain = prefix_attention_reference(q, k, v, layout, sinks=sinks, **options)
    error, allowed = (ours.double() - truth).abs().max(), (plain.double() - truth).abs().max()
    assert error <= allowed + EPS[q.dtype] * max(1.0, truth.abs().max().item())


@settings(max_examples=100, deadline=None)
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
        for layout in with_some_rows(layouts(seed, 7, 24, budget)):
            q, k, v = operands(layout, *heads, *dims, torch.float32)
            sinks = torch.linspace(-1, 2, heads[0]) if sink else None
            assert_as_exact_as_torch(
                layout, q, k, v, scale=0.4, window=window, chunk=chunk, softcap=softcap, sinks=sinks
            )
            assert_as_exact_as_torch(
                layout, q, k, v, scale=0.4, window=window, chunk=chunk, softcap=softcap, sinks=sinks, invariant=True
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
        for invariant in (False, True):
            assert_as_exact_as_torch(
                layout, q, k, v, scale=dim**-0.5, window=window, softcap=softcap, invariant=invariant
            )


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
    attend = module.attend

    def spy(*args, bias=None, **options):
        if bias is not None:
            masks.append(bias.shape)
        return attend(*args, bias=bias, **options)

    monkeypatch.setattr(module, "attend", spy)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": 64}, {"sinks": torch.ones(6)}], ids=str)
def test_invariant_bits_do_not_depend_on_the_batch(dtype, options):
    rng = np.random.default_rng(0)
    trie = build_trie([(1, 2), (1, 3), (4,)])
    tables = [torch.randn(500, heads, 32, generator=torch.Generator().manual_seed(1)) for heads in (6, 2, 2)]

    def rows(prompts):
        (forward,) = pack(build_prefix_tree(prompts, trie=trie), 100_000)
        place = torch.from_numpy(forward.tokens * 7 + forward.layout.row_positions * 13) % 500
        q, k, v = (table[place].to(dtype) for table in tables)
        out = prefix_attention(q, k, v, forward.layout, scale=0.2, invariant=True, **options)
        row = dict(zip(forward.reads.tolist(), forward.read_rows.tolist(), strict=True))
        return torch.stack([out[row[at]] for at in range(1 + len(trie))])

    for length in (1, 40, 150, 700, 1300):  # on both sides of a block of slots
        prompt = rng.integers(0, 50, length)
        cuts = rng.integers(0, length + 1, 8)
        kin = [np.concatenate([prompt[: int(cut)], rng.integers(0, 50, 9)]) for cut in cuts]
        strangers = [rng.integers(0, 50, int(size)) for size in rng.integers(1, 90, 12)]
        alone = rows([prompt])
        assert torch.equal(rows([prompt, *kin]), alone)
        assert torch.equal(rows([prompt, *strangers, *kin]), alone)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(7, 4)}, "must be"),
        ({"query": torch.zeros(6, 4, 16)}, "the layout has 7 rows and 7 keys"),
        ({"key": torch.zeros(8, 2, 16)}, "the layout has 7 rows and 7 keys"),
        ({"key": torch.zeros(7, 3, 16)}, "a multiple"),
        ({"key": torch.zeros(7, 2, 8)}, "same head_dim"),
        ({"value": torch.zeros(7, 1, 16)}, "same heads"),
        ({"value": torch.zeros(7, 2, 16).bfloat16()}, "share one dtype"),
        ({"key": torch.zeros(7, 2, 16, device="meta")}, "key on meta"),
        ({"window": 0}, "window must be at least 1"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"softcap": 0.0}, "softcap must be a positive number"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \[num_heads\] = \[4\]"),
    ],
)
def test_operands_that_do_not_fit(change, words):
    layout = layout_of(
        seen=np.array([[at, 7] for at in range(7)]),
        key_positions=np.arange(7),
        own_offsets=np.array([0, 7]),
        own=[[(0, 7)]],
        shared=[],
    )
    operands = {"query": torch.zeros(7, 4, 16), "key": torch.zeros(7, 2, 16), "value": torch.zeros(7, 2, 16)}
    with pytest.raises(InputError, match=words):
        prefix_attention(layout=layout, scale=1.0, **{**operands, **change})


def test_an_explicit_backend_runs_or_raises():
    layout = layouts(0, 3, 9, 100)[0]
    q, k, v = operands(layout, 2, 1, 8, 8, torch.float32)
    assert torch.equal(
        prefix_attention(q, k, v, layout, scale=1.0, backend="torch"), prefix_attention(q, k, v, layout, scale=1.0)
    )
    for backend, reason in (("triton", "CUDA devices only"), ("flash", "CUDA"), ("native", "no native form")):
        with pytest.raises(BackendError, match=reason):
            prefix_attention(q, k, v, layout, scale=1.0, backend=backend)


def test_layouts_know_whether_their_rows_are_keys():
    for layout in layouts(3, 5, 20, 30):
        assert layout.rows_are_keys
        assert layout.padded(layout.num_rows + 3).rows_are_keys
        assert layout.of_rows(np.arange(layout.num_rows)).rows_are_keys
        if layout.num_rows > 1:
            assert not layout.of_rows(np.arange(layout.num_rows - 1)).rows_are_keys


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
