"""Merging attention results: pytest benchmarks/ops/bench_merge_attention.py --benchmark-group-by=group.

All forms run in one process on the same operands, and each is judged against float64 before it is timed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gatekern.errors import BackendError
from gatekern.ops import dispatch
from gatekern.ops.merge_attention import merge_attention
from tests.ops.test_merge_attention import judge


def lerp(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The usual code: a sigmoid of the difference as the weight of one side."""
    out = torch.lerp(out_a.float(), out_b.float(), torch.sigmoid(lse_b - lse_a)[..., None])
    return out.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


@pytest.mark.parametrize("form", ["auto", "torch", "lerp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(40, 9, 64), (1200, 9, 64), (1200, 32, 128)])
def test_merge_attention(benchmark, rows, heads, dim, dtype, form):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(rows, heads, dim, generator=generator).to(device, dtype) for _ in range(2)]
    lses = [torch.randn(rows, heads, generator=generator).to(device) for _ in range(2)]
    parts = (outs[0], lses[0], outs[1], lses[1])
    benchmark.group = f"{rows} rows, {heads} x {dim}, {dtype}, {device}"

    if form == "lerp":

        def run() -> tuple[Tensor, Tensor]:
            return lerp(*parts)

    else:
        try:
            benchmark.extra_info["backend"] = dispatch.resolved_name("merge_attention", form, device)
        except BackendError as error:
            pytest.skip(str(error))

        def run() -> tuple[Tensor, Tensor]:
            return merge_attention(*parts, backend=form)

    judge(run(), parts)

    def synchronised() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark(synchronised)
