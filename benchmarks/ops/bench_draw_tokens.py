"""Drawing tokens against softmax and multinomial.

``pytest benchmarks/ops/bench_draw_tokens.py --benchmark-group-by=group``.

Before anything is timed both have to draw with the frequencies of the softmax.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gatekern.ops.draw_tokens import draw_tokens
from tests.head_operands import Head

VOCAB, K = 49152, 5


@pytest.mark.parametrize("form", ["draw_tokens", "multinomial"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("rows", [1, 40, 200])
def test_draw_tokens(benchmark, rows, top_p, form):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = Head.random(rows, 576, VOCAB, spread=4.0)
    hidden, weight = head.hidden.to(device), head.weight.to(device)
    benchmark.group = f"{rows} rows x {K} draws, V={VOCAB}, top_p={top_p}, {device}"

    def run(draws: int = K) -> Tensor:
        """Token ids [rows, draws]."""
        if form == "draw_tokens":
            index = torch.arange(rows, device=device).repeat_interleave(draws)
            uniforms = torch.rand(rows * draws, dtype=torch.float64, device=device)
            return draw_tokens(hidden, weight, index, uniforms, top_p=top_p).view(rows, draws)
        weights = (hidden @ weight.T).softmax(-1)
        if top_p < 1.0:
            ordered, order = weights.sort(dim=-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= top_p] = 0.0
            weights = torch.zeros_like(weights).scatter_(1, order, ordered)
        return weights.multinomial(draws, replacement=True)

    probabilities = (hidden[0] @ weight.T).softmax(-1)
    top = probabilities.topk(1)
    share = (run(2000)[0] == top.indices).double().mean().item()
    kept = 1.0 if top_p == 1.0 else probabilities.sort(descending=True).values.cumsum(0).clamp(max=top_p).max().item()
    expected = top.values.item() / kept
    assert abs(share - expected) < 5 * (expected * (1 - expected) / 2000) ** 0.5 + 0.01

    def synchronised() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark(synchronised)
