"""The merge kernel run on the CPU by Triton's interpreter: TRITON_INTERPRET=1 pytest tests/triton_interpret."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(allow_module_level=True, reason="needs TRITON_INTERPRET=1, in a process of its own")
pytest.importorskip("triton")

import torch

from gatekern.ops.triton.merge_attention import merge_attention
from tests.ops.test_merge_attention import DTYPES, INF, NAN, judge, operands, strided

# The interpreter computes in numpy, which warns of log(0) and inf - inf; the policy tests want both.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 63, 64, 65, 128])
def test_shapes(dtype, dim):
    for rows, heads in ((0, 2), (1, 1), (3, 5), (32, 1), (33, 3)):
        parts = operands(rows, heads, dim, dtype, seed=rows)
        judge(merge_attention(*parts), parts)


def test_large_and_equal_scores():
    for spread in (0.0, 300.0):
        parts = operands(33, 2, 16, spread=spread)
        judge(merge_attention(*parts), parts)


@pytest.mark.parametrize(
    ("lse_a", "lse_b", "out", "lse"),
    [
        (0.0, 0.0, 2.0, 0.6931472),
        (0.0, -INF, 1.0, 0.0),
        (-INF, 5.0, 3.0, 5.0),
        (-INF, -INF, 0.0, -INF),
        (1e4, -1e4, 1.0, 1e4),
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views(dtype):
    parts = operands(37, 3, 20, dtype)
    for got, expected in zip(merge_attention(*strided(parts)), merge_attention(*parts), strict=True):
        assert torch.equal(got, expected)


def test_rows_do_not_depend_on_their_batch():
    parts = operands(70, 2, 64, torch.bfloat16)
    together = merge_attention(*parts)
    for row in (0, 31, 32, 69):
        for got, expected in zip(merge_attention(*(x[row : row + 1] for x in parts)), together, strict=True):
            assert torch.equal(got[0], expected[row])


def test_sides_may_differ_in_dtype():
    out_a, lse_a, out_b, lse_b = operands(5, 2, 8, torch.bfloat16)
    parts = (out_a, lse_a, out_b.float(), lse_b)
    judge(merge_attention(*parts), parts)
