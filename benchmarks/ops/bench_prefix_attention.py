"""Attention over shared prefixes against what a user would write: pytest benchmarks/ops/bench_prefix_attention.py.

The peers are PyTorch's own attention: once per fact over its whole prompt (the strongest call, a causal flash kernel),
and once over the packed stream with a dense mask. All run on the same operands, judged against float64 first.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gatekern.errors import BackendError
from gatekern.layout import SegmentLayout
from gatekern.ops import dispatch
from gatekern.ops.prefix_attention import prefix_attention, prefix_attention_reference, visibility
from gatekern.planning import build_prefix_tree, pack

HEADS = {"135M": (9, 3, 64), "8B": (32, 8, 128)}


def stream(prefix: int, facts: int, length: int) -> tuple[SegmentLayout, Tensor]:
    """One context with its facts: the layout, and the rows of each fact's whole prompt, int64 [facts, tokens]."""
    rng = np.random.default_rng(0)
    context = rng.integers(0, 1000, prefix)
    prompts = [np.concatenate([context, [1000 + at], rng.integers(0, 1000, length - 1)]) for at in range(facts)]
    (forward,) = pack(build_prefix_tree(prompts), 1 << 20)
    own = prefix + np.arange(facts)[:, None] * length + np.arange(length)
    rows = np.concatenate([np.broadcast_to(np.arange(prefix), (facts, prefix)), own], axis=1)
    return forward.layout, torch.from_numpy(rows)


@pytest.mark.parametrize("form", ["auto", "invariant", "per fact", "dense mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("prefix", "facts", "length"), [(128, 16, 32), (1024, 32, 32)])
def test_prefix_attention(benchmark, prefix, facts, length, shape, dtype, form):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads, kv_heads, dim = HEADS[shape]
    layout, whole = stream(prefix, facts, length)
    rows = layout.num_rows
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, count, dim, generator=generator).to(device, dtype) for count in (heads, kv_heads, kv_heads)
    )
    scale = dim**-0.5
    benchmark.group = f"{prefix} + {facts} x {length} tokens, {shape} heads, {dtype}, {device}"

    if form == "per fact":
        index = whole.to(device)
        batch = [x[index].transpose(1, 2) for x in (q, k, v)]

        def run() -> Tensor:
            return scaled_dot_product_attention(*batch, is_causal=True, scale=scale, enable_gqa=True)

        found = run().transpose(1, 2)[:, prefix:].flatten(0, 1)
    elif form == "dense mask":
        mask = torch.from_numpy(visibility(layout)).to(device)
        one = [x[None].transpose(1, 2) for x in (q, k, v)]

        def run() -> Tensor:
            return scaled_dot_product_attention(*one, attn_mask=mask, scale=scale, enable_gqa=True)

        found = run()[0].transpose(0, 1)[prefix:]
    else:
        try:
            benchmark.extra_info["backend"] = dispatch.select("prefix_attention", "auto", device)
        except BackendError as error:
            pytest.skip(str(error))

        def run() -> Tensor:
            return prefix_attention(q, k, v, layout, scale=scale, invariant=form == "invariant")

        found = run()[prefix:]

    truth = prefix_attention_reference(q.double(), k.double(), v.double(), layout, scale=scale)[prefix:]
    plain = prefix_attention_reference(q, k, v, layout, scale=scale)[prefix:]
    allowed = (plain.double() - truth).abs().max() + {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert (found.double() - truth).abs().max() <= allowed

    def synchronised() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark(synchronised)
