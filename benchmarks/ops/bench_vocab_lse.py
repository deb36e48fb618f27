"""Vocabulary log-sum-exp against the full logits: pytest benchmarks/ops/bench_vocab_lse.py --benchmark-group-by=group.

All forms run in one process on the same operands, and each is judged before it is timed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gatekern.ops import dispatch
from gatekern.ops.vocab_lse import vocab_lse
from tests.head_operands import Head

VOCAB = 49152


@pytest.mark.parametrize("form", ["auto", "float32 logits", "logits in the dtype"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 20, 256])
def test_vocab_lse(benchmark, rows, dtype, form):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = Head.random(rows, 576, VOCAB, dtype)
    head.hidden, head.weight = head.hidden.to(device), head.weight.to(device)
    benchmark.group = f"{rows} rows, H=576, V={VOCAB}, {dtype}, {device}"

    def run() -> Tensor:
        if form == "auto":
            return vocab_lse(head.hidden, head.weight)
        if form == "float32 logits":
            return (head.hidden.float() @ head.weight.float().T).logsumexp(-1)
        return (head.hidden @ head.weight.T).float().logsumexp(-1)

    if form == "logits in the dtype" and dtype == torch.bfloat16:
        torch.testing.assert_close(run(), vocab_lse(head.hidden, head.weight), rtol=0, atol=2e-2)
    else:
        head.judge_vocab_lse(run())
    if form == "auto":
        benchmark.extra_info["backend"] = dispatch.resolved_name("vocab_lse", "auto", device)

    def synchronised() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark(synchronised)
