"""Label scores against what a user would write: pytest benchmarks/ops/bench_label_scores.py --benchmark-group-by=group.

All forms run in one process on the same operands, and each is judged against float64 before it is timed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gatekern.errors import BackendError
from gatekern.ops import dispatch
from gatekern.ops.label_scores import LabelScores, label_scores, pack_groups
from tests.head_operands import Head

VOCAB = 49152
GROUPS = [list(range(100, 106)), list(range(200, 207))]


def full_head(head: Head, packed: tuple[Tensor, Tensor]) -> LabelScores:
    """All logits in float32, log-softmax, gather: the usual code."""
    yes, no = GROUPS
    log_probs = torch.log_softmax((head.hidden @ head.weight.T).float(), dim=-1)
    groups = torch.stack([log_probs[:, yes].logsumexp(-1), log_probs[:, no].logsumexp(-1)], dim=-1)
    return LabelScores(groups, torch.sigmoid(groups[:, 0] - groups[:, 1]))


@pytest.mark.parametrize("form", ["auto", "torch", "full head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (20, 576), (64, 2048)])
def test_label_scores(benchmark, rows, width, dtype, form):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = Head.random(rows, width, VOCAB, dtype)
    head.hidden, head.weight = head.hidden.to(device), head.weight.to(device)
    packed = pack_groups(GROUPS, VOCAB, device)
    benchmark.group = f"{rows} rows, H={width}, V={VOCAB}, {dtype}, {device}"

    if form == "full head":
        # Its logits are normalised and rounded to the dtype: only the score compares, at the dtype's precision.
        def run() -> LabelScores:
            return full_head(head, packed)

        exact = label_scores(head.hidden, head.weight, packed, backend="torch").score
        torch.testing.assert_close(run().score, exact, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    else:
        try:
            benchmark.extra_info["backend"] = dispatch.resolved_name("label_scores", form, device)
        except BackendError as error:
            pytest.skip(str(error))

        def run() -> LabelScores:
            return label_scores(head.hidden, head.weight, packed, backend=form)

        head.judge_label_scores(run(), packed)

    def synchronised() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark(synchronised)
