"""Masses of token classes against the full logits: pytest benchmarks/ops/bench_class_lse.py --benchmark-group-by=group.

All forms run in one process on the same operands, and each is judged before it is timed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gatekern.ops.class_lse import class_lse
from tests.head_operands import Head
from tests.ops.test_class_lse import judge, random_classes

VOCAB, GROUPS, CLASSES = 49152, 15, 13


@pytest.mark.parametrize("form", ["tiled", "full logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_class_lse(benchmark, rows, dtype, form):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = Head.random(GROUPS * rows, 576, VOCAB, dtype)
    head.hidden, head.weight = head.hidden.to(device), head.weight.to(device)
    classes = random_classes(GROUPS, VOCAB, CLASSES).to(device)
    hidden = head.hidden.view(GROUPS, rows, 576)
    benchmark.group = f"{GROUPS} x {rows} rows, H=576, V={VOCAB}, {CLASSES} classes, {dtype}, {device}"

    def run() -> Tensor:
        if form == "tiled":
            return class_lse(hidden, head.weight, classes, CLASSES)
        weights = (hidden.float() @ head.weight.float().T).softmax(-1)
        sums = hidden.new_zeros((GROUPS, rows, CLASSES), dtype=torch.float32)
        lse = (hidden.float() @ head.weight.float().T).logsumexp(-1, keepdim=True)
        return sums.scatter_add_(2, classes.long()[:, None].expand_as(weights), weights).log() + lse

    if form == "tiled":
        judge(head, classes, CLASSES, run())
    else:  # probabilities and back: a little less exact
        torch.testing.assert_close(run(), class_lse(hidden, head.weight, classes, CLASSES), rtol=0, atol=1e-4)

    def synchronised() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark(synchronised)
