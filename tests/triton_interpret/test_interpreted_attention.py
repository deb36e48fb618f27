"""The Triton attention kernel in the interpreter: TRITON_INTERPRET=1 pytest tests/triton_interpret."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(allow_module_level=True, reason="needs TRITON_INTERPRET=1, in a process of its own")
pytest.importorskip("triton")

import numpy as np
import torch

from gatekern.layout import SegmentLayout
from gatekern.ops.prefix_attention import prefix_attention_reference
from gatekern.ops.triton import prefix_attention as module
from gatekern.ops.triton.configs import AttentionConfig
from gatekern.ops.triton.prefix_attention import prefix_attention
from gatekern.planning import build_prefix_tree, build_trie, pack
from tests.ops.test_prefix_attention import EPS, layouts, operands

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a short path has many blocks, with their borders in shared and in own segments."""
    config = AttentionConfig(block_rows=16, block_slots=16, num_warps=4, num_stages=1)
    monkeypatch.setattr(module, "prefix_attention_config", lambda *_: config)


def launch(q, k, v, layout: SegmentLayout, **options):
    return prefix_attention(
        q, k, v, layout, **{"window": None, "chunk": None, "softcap": None, "sinks": None, **options}
    )


def judge(q, k, v, layout, **options):
    """|ours - truth| <= |dense attention in the same dtype - truth| + eps."""
    truth = prefix_attention_reference(q.double(), k.double(), v.double(), layout, **options)
    plain = prefix_attention_reference(q, k, v, layout, **options)
    ours = launch(q, k, v, layout, **options)
    assert ours.dtype == q.dtype
    assert ours.shape == truth.shape
    error, allowed = (ours.double() - truth).abs().max(), (plain.double() - truth).abs().max()
    assert error <= allowed + EPS[q.dtype] * max(1.0, truth.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("window", "chunk", "softcap", "sink"),
    [(None, None, None, False), (3, None, None, True), (None, 4, 2.0, False), (9, None, 3.0, True)],
)
def test_random_trees(small_tiles, seed, dtype, window, chunk, softcap, sink):
    """Prefills with and without a trie, in one forward and in several, and decode steps below them."""
    heads, dims = [((1, 1), (8, 8)), ((4, 2), (16, 16)), ((6, 2), (24, 20)), ((7, 1), (16, 12))][seed % 4]
    for layout in layouts(seed, 6, 24, [1000, 20, 7][seed % 3])[:8]:
        q, k, v = operands(layout, *heads, *dims, dtype)
        sinks = torch.linspace(-1, 2, heads[0]) if sink else None
        judge(q, k, v, layout, scale=0.4, window=window, chunk=chunk, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
def test_shipped_tiles(dtype, dim):
    rng = np.random.default_rng(dim)
    context = rng.integers(0, 50, 150)
    prompts = [np.concatenate([context, rng.integers(0, 50, length)]) for length in (1, 17, 33)]
    (forward,) = pack(build_prefix_tree(prompts, trie=build_trie([(1, 2), (3,)])), 1000)
    q, k, v = operands(forward.layout, 4, 2, dim, dim, dtype)
    judge(q, k, v, forward.layout, scale=dim**-0.5, window=100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_batch(dtype, monkeypatch):
    """The same prompt alone, among strangers, and among kin, which cut its path elsewhere."""
    # numpy's product rounds a row by its place in the matrix; a matrix unit does not.
    monkeypatch.setattr(np, "matmul", lambda a, b, **options: np.stack([row @ b for row in a]))
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 150)
    kin = [np.concatenate([prompt[: int(cut)], rng.integers(0, 50, 9)]) for cut in rng.integers(1, 150, 8)]
    strangers = [rng.integers(0, 50, int(length)) for length in rng.integers(1, 40, 8)]
    trie = build_trie([(1, 2), (1, 3), (4,)])
    tables = [torch.randn(500, heads, 32, generator=torch.Generator().manual_seed(1)) for heads in (6, 2, 2)]

    def rows(prompts):
        (forward,) = pack(build_prefix_tree(prompts, trie=trie), 10_000)
        place = torch.from_numpy(forward.tokens * 7 + forward.layout.row_positions * 13) % 500
        q, k, v = (table[place].to(dtype) for table in tables)
        out = launch(q, k, v, forward.layout, scale=0.2, window=90, sinks=torch.ones(6))
        row = dict(zip(forward.reads.tolist(), forward.read_rows.tolist(), strict=True))
        return torch.stack([out[row[at]] for at in range(1 + len(trie))])

    alone = rows([prompt])
    assert torch.equal(rows([prompt, *strangers]), alone)
    assert torch.equal(rows([prompt, *kin]), alone)
    assert torch.equal(rows([prompt, *kin, *strangers]), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_operands_and_poisoned_surroundings(small_tiles, dtype):
    layout = layouts(1, 5, 20, 1000)[0]
    plain = operands(layout, 4, 2, 16, 16, dtype)
    strided = []
    for x in plain:
        rows, heads, dim = x.shape
        store = torch.full((heads, rows + 3, dim + 16), torch.nan, dtype=dtype)
        view = store[:, 1 : rows + 1, 8 : dim + 8].transpose(0, 1)
        view.copy_(x)
        strided.append(view)
    assert torch.equal(launch(*strided, layout, scale=0.3), launch(*plain, layout, scale=0.3))
    dims_first = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in plain]
    assert torch.equal(launch(*dims_first, layout, scale=0.3), launch(*plain, layout, scale=0.3))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in which the interpreter computes
def test_a_nan_stays_in_its_prompt(small_tiles):
    """Zero weights do not hide a NaN: a tile must not even read the keys of others."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, length) for length in (21, 5, 40)]
    (forward,) = pack(build_prefix_tree(prompts, trie=build_trie([(1,), (2,)])), 1000)
    q, k, v = operands(forward.layout, 4, 2, 16, 16, torch.float32)
    first, second = (int(row) for row in sorted(forward.read_rows)[2::3][:2])
    clean = launch(q, k, v, forward.layout, scale=0.3)
    for x in (q, k, v):
        x[: first + 1] = torch.nan
        x[second + 1 :] = torch.nan
    out = launch(q, k, v, forward.layout, scale=0.3)
    assert torch.equal(out[first + 1 : second + 1], clean[first + 1 : second + 1])
    assert out[: first + 1].isnan().any()


def test_every_output_is_written(small_tiles, monkeypatch):
    layout = layouts(2, 6, 24, 1000)[0].padded(200)
    q, k, v = operands(layout, 6, 2, 16, 16, torch.float32)
    empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        made = empty(self, *shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert not launch(q, k, v, layout, scale=0.3).isnan().any()


def test_a_row_that_sees_nothing_gets_zeros(small_tiles):
    """No tree has such a row; a layout by hand may."""
    layout = layouts(0, 4, 12, 1000)[0]
    layout.seen[layout.num_keys - 1] = (0, 0)  # the last row no longer sees itself
    layout.seen[:, 1] = np.minimum(layout.seen[:, 1], layout.num_rows - 1)
    q, k, v = operands(layout, 2, 1, 16, 16, torch.float32)
    out = launch(q, k, v, layout, scale=0.3)
    assert (out[-1] == 0).all()
    assert (out[:-1] != 0).all()


def test_large_scores_do_not_overflow(small_tiles):
    layout = layouts(1, 5, 20, 1000)[0]
    q, k, v = operands(layout, 4, 2, 16, 16, torch.float32)
    out = launch(q * 100, k * 100, v, layout, scale=1.0, window=4)
    truth = prefix_attention_reference(q.double() * 100, k.double() * 100, v.double(), layout, scale=1.0, window=4)
    assert (out - truth).abs().max() < 1e-2  # scores of 1e5 have a float32 spacing of 8e-3


def test_no_rows():
    layout = layouts(0, 1, 3, 1000)[0]
    none = layout.extended(np.zeros(0, dtype=np.int64))
    q, k, v = operands(none, 4, 2, 16, 16, torch.float32)
    assert launch(q, k, v, none, scale=0.3).shape == (0, 4, 16)
