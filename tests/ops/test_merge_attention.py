"""Merging attention results against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekern.errors import BackendError, InputError
from gatekern.ops.merge_attention import merge_attention, merge_attention_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
INF, NAN = float("inf"), float("nan")


def operands(rows, heads, dim, dtype=torch.float32, *, spread=3.0, seed=0):
    """Two parts; in some rows one side or both see no key, and the output there is garbage."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for side in range(2):
        out = torch.randn(rows, heads, dim, generator=generator).to(dtype)
        lse = torch.randn(rows, heads, generator=generator) * spread
        blind = torch.rand(rows, heads, generator=generator) < 0.2
        parts += [out.masked_fill(blind[..., None], (NAN, INF)[side]), lse.masked_fill(blind, -INF)]
    return parts


def judge(ours, parts):
    """|ours - truth| <= |plain PyTorch in the same precision - truth| + eps."""
    out_a, lse_a, out_b, lse_b = parts
    truth, truth_lse = merge_attention_reference(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    a, b = out_a.masked_fill((lse_a == -INF)[..., None], 0), out_b.masked_fill((lse_b == -INF)[..., None], 0)
    shares = torch.softmax(torch.stack([lse_a, lse_b]), 0).nan_to_num(0).to(out_a.dtype)[..., None]
    plain, plain_lse = a * shares[0] + b.to(a.dtype) * shares[1], torch.logaddexp(lse_a, lse_b)
    out, lse = ours
    assert out.dtype == out_a.dtype
    assert lse.dtype == torch.float32
    assert out.is_contiguous()
    assert lse.is_contiguous()
    if out.numel() > 0:
        error, allowed = (out.double() - truth).abs().max(), (plain.double() - truth).abs().max()
        assert error <= allowed + EPS[out.dtype] * max(1.0, truth.abs().max().item())
    seen = truth_lse > -INF
    assert torch.equal(lse > -INF, seen)
    if seen.any():
        error, allowed = (lse.double() - truth_lse)[seen].abs().max(), (plain_lse - truth_lse)[seen].abs().max()
        assert error <= allowed + 1e-6 * max(1.0, truth_lse[seen].abs().max().item())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    heads=st.integers(1, 5),
    dim=st.sampled_from([1, 7, 16, 63, 64, 80, 129]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.1, 3.0, 300.0]),
    seed=st.integers(0, 1000),
)
def test_matches_float64(rows, heads, dim, dtype, spread, seed):
    parts = operands(rows, heads, dim, dtype, spread=spread, seed=seed)
    judge(merge_attention(*parts), parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_a_softmax_make_the_whole(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 3, 20, generator=generator, dtype=torch.float64) * 4
    values = torch.randn(20, 3, 16, generator=generator, dtype=torch.float64)

    def attend(keys: slice):
        out = torch.einsum("qhk,khd->qhd", scores[..., keys].softmax(-1), values[keys])
        return out.to(dtype), scores[..., keys].logsumexp(-1).float()

    whole, whole_lse = attend(slice(None))
    out, lse = attend(slice(0, 5))
    for keys in (slice(5, 6), slice(6, 20)):
        out, lse = merge_attention(out, lse, *attend(keys))
    assert (out.double() - whole.double()).abs().max() <= 2 * EPS[dtype]
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lse_a", "lse_b", "out", "lse"),
    [
        (0.0, 0.0, 2.0, 0.6931472),
        (0.0, -INF, 1.0, 0.0),
        (-INF, 5.0, 3.0, 5.0),
        (-INF, -INF, 0.0, -INF),
        (1e4, -1e4, 1.0, 1e4),
        (-1e4, -1e4, 2.0, -1e4 + 0.6931472),
        (NAN, 0.0, NAN, NAN),
        (INF, 0.0, NAN, NAN),
        (0.0, INF, NAN, NAN),
        (INF, INF, NAN, NAN),
    ],
)
def test_policy(lse_a, lse_b, out, lse):
    garbage = torch.full((2, 1, 3), NAN)
    a = garbage if lse_a == -INF else torch.full((2, 1, 3), 1.0)
    b = garbage if lse_b == -INF else torch.full((2, 1, 3), 3.0)
    merged, merged_lse = merge_attention(a, torch.full((2, 1), lse_a), b, torch.full((2, 1), lse_b))
    torch.testing.assert_close(merged, torch.full((2, 1, 3), out), rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(merged_lse, torch.full((2, 1), lse), rtol=1e-6, atol=0, equal_nan=True)


def strided(parts):
    """Heads first, as FlashAttention reports log-sum-exps and models hold queries; every other element of the last."""
    out_a, lse_a, out_b, lse_b = parts
    wide = torch.full((*out_b.shape[:2], out_b.shape[2] * 2), NAN, dtype=out_b.dtype)
    wide[..., ::2] = out_b
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (out_a, lse_a, lse_b)]
    return heads_first[0], heads_first[1], wide[..., ::2], heads_first[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views(dtype):
    parts = operands(17, 3, 20, dtype)
    for got, expected in zip(merge_attention(*strided(parts)), merge_attention(*parts), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_batch(dtype):
    parts = operands(37, 2, 64, dtype)
    together = merge_attention(*parts)
    for row in range(37):
        alone = merge_attention(*(x[row : row + 1] for x in parts))
        for got, expected in zip(alone, together, strict=True):
            assert torch.equal(got[0], expected[row])


def test_sides_may_differ_in_dtype():
    out_a, lse_a, out_b, lse_b = operands(5, 2, 8, torch.bfloat16)
    parts = (out_a, lse_a, out_b.float(), lse_b)
    judge(merge_attention(*parts), parts)


OUT, LSE = torch.ones(3, 2, 4), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((OUT[0], LSE, OUT[0], LSE), r"must both be \[rows, heads, dim\]"),
        ((OUT, LSE, OUT[..., :3], LSE), r"must both be \[rows, heads, dim\]"),
        ((OUT.double(), LSE, OUT, LSE), "out_a must be float32, bfloat16 or float16"),
        ((OUT, LSE, OUT.int(), LSE), "out_b must be float32, bfloat16 or float16"),
        ((OUT, LSE.half(), OUT, LSE), r"lse_a must be float32 \[rows, heads\] = \(3, 2\)"),
        ((OUT, LSE, OUT, LSE.T), r"lse_b must be float32 \[rows, heads\] = \(3, 2\)"),
        ((OUT, LSE, OUT, LSE.to("meta")), "lse_b is on meta and out_a on cpu"),
    ],
)
def test_bad_operands(parts, message):
    with pytest.raises(InputError, match=message):
        merge_attention(*parts)
    with pytest.raises(InputError, match=message):  # the registered operator guards memory by itself
        torch.ops.gatekern.merge_attention(*parts)


def test_an_explicit_backend_runs_or_raises():
    with pytest.raises(BackendError, match="Triton kernels run on CUDA devices only"):
        merge_attention(OUT, LSE, OUT, LSE, backend="triton")
    with pytest.raises(BackendError, match="has no native form"):
        merge_attention(OUT, LSE, OUT, LSE, backend="native")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    parts = operands(5, 2, 16, dtype, seed=1)
    for given_parts in (parts, strided(parts)):
        whole = [x.nan_to_num(0, 0) if x.ndim == 3 else x for x in given_parts]  # it compares without equal_nan
        torch.library.opcheck(torch.ops.gatekern.merge_attention.default, (*whole, "auto"))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(compiler):
    def caller(out_a, lse_a, out_b, lse_b):
        out, lse = merge_attention(out_a * 2, lse_a, out_b, lse_b)
        return out + 1, lse

    compiled = torch.compile(caller, fullgraph=True, backend=compiler, dynamic=True)
    for rows in (17, 4):
        parts = operands(rows, 2, 16)
        for got, expected in zip(compiled(*parts), caller(*parts), strict=True):
            assert torch.equal(got, expected)
