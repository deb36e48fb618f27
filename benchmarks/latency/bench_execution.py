"""What the ways of running a forward cost: as it is, deterministic, with a pruned last layer, compiled.

``python -m pytest benchmarks/latency/bench_execution.py`` prints the table. All ways run on the same pairs in turn, in
every round, and ratios are medians over rounds. Their scores are compared before anything is timed. Compiling costs
seconds once, before the first round.
"""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import Any

import numpy as np
import pytest

import gatekern as gk
from benchmarks.latency.workloads import SHAPES, load, synthetic
from tools.fetch_smollm2 import fetch

WAYS: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "pruned": {"prune_last_layer": True},
    "compiled": {"compile": True},
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of scores; bfloat16 rounds to 0.125 at logits of 16 to 32


@cache
def plain(model: str, dtype: str) -> gk.Verifier:
    return gk.Verifier.from_pretrained(model, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workload", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_execution(benchmark, request, way, workload, dtype):
    folder = request.config.getoption("--workloads")
    pairs = (load(folder, workload) if folder else synthetic(workload))[: request.config.getoption("--facts")]
    usual = plain(request.config.getoption("--model") or str(fetch()), dtype)
    other = gk.Verifier(usual.model, usual.tokenizer, **WAYS[way])
    expected, found = usual.score_batch(pairs), other.score_batch(pairs)
    np.testing.assert_allclose(found.scores, expected.scores, atol=TOLERANCE[dtype])

    seconds: dict[str, list[float]] = {"usual": [], "other": []}

    def timed(name: str, verifier: gk.Verifier) -> gk.ScoreBatch:
        begin = time.perf_counter()
        result = verifier.score_batch(pairs)
        seconds[name].append(time.perf_counter() - begin)
        return result

    benchmark.pedantic(
        lambda: timed("other", other),
        setup=lambda: timed("usual", usual) and None,
        rounds=request.config.getoption("--rounds"),
    )
    ratios = [a / b for a, b in zip(seconds["other"], seconds["usual"], strict=True)]
    benchmark.extra_info |= {
        "workload": workload,
        "dtype": dtype,
        "way": way,
        "facts/s": f"{len(pairs) / statistics.median(seconds['other']):.2f}",
        "facts/s as it is": f"{len(pairs) / statistics.median(seconds['usual']):.2f}",
        "time / as it is": f"{statistics.median(ratios):.3f}",
        "tokens / as it is": f"{found.usage.computed_tokens / expected.usage.computed_tokens:.2f}",
        "self-test": str(other.invariance or ""),
    }
