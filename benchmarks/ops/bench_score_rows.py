"""Label evidence against the full logits: pytest benchmarks/ops/bench_score_rows.py --benchmark-group-by=group.

All forms run in one process on the same operands, and each is judged before it is timed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gatekern.ops import dispatch
from gatekern.ops.head import HeadSpec
from gatekern.ops.label_scores import LabelScores, pack_groups
from gatekern.ops.score_rows import RowScores, score_rows
from tests.head_operands import Head

VOCAB = 49152
GROUPS = [list(range(100, 106)), list(range(200, 207))]


def full_logits(hidden: Tensor, weight: Tensor, groups: list[Tensor]) -> RowScores:
    """All logits in the model's dtype, log-softmax in float32, gather: the usual code."""
    log_probs = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    labels = torch.stack([log_probs[:, group].logsumexp(-1) for group in groups], dim=-1)
    return RowScores(labels, labels.softmax(-1)[:, 0], labels.exp().sum(-1))


@pytest.mark.parametrize("form", ["labels only", "with mass", "full logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (20, 576), (64, 2048)])
def test_score_rows(benchmark, rows, width, dtype, form):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = Head.random(rows, width, VOCAB, dtype)
    head.hidden, head.weight = head.hidden.to(device), head.weight.to(device)
    spec, packed = HeadSpec(head.weight), pack_groups(GROUPS, VOCAB, device)
    benchmark.group = f"{rows} rows, H={width}, V={VOCAB}, {dtype}, {device}"

    if form == "full logits":
        ids = [torch.tensor(group, device=device) for group in GROUPS]

        def run() -> RowScores:
            return full_logits(head.hidden, head.weight, ids)
    else:
        benchmark.extra_info["backend"] = dispatch.resolved_name("label_scores", "auto", device)

        def run() -> RowScores:
            return score_rows(head.hidden, spec, packed, mass=form != "labels only")

        head.judge_label_scores(LabelScores(run().logits, run().score), packed)

    # The peer's logits are normalised and rounded to the dtype: score and mass compare, at the dtype's precision.
    exact = score_rows(head.hidden.float(), HeadSpec(head.weight.float()), packed, mass=True, backend="torch")
    tolerance = 2e-2 if dtype == torch.bfloat16 and form == "full logits" else 1e-5
    torch.testing.assert_close(run().score, exact.score, rtol=0, atol=tolerance)
    if form != "labels only":
        torch.testing.assert_close(run().mass, exact.mass, rtol=tolerance, atol=1e-6)

    def synchronised() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark(synchronised)
