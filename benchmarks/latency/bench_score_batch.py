"""`score_batch` against plain transformers, same prompts, same model, in turn.

``python -m pytest benchmarks/latency`` (about 15 minutes on two cores) prints the table.
Before anything is timed the two score the same facts and have to agree. Peers score every n-th fact only, because
they cost the same for each; facts per second are compared, and the ratio is the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from functools import cache

import numpy as np
import pytest

import gatekern as gk
from benchmarks.latency.peers import PEERS
from benchmarks.latency.workloads import SHAPES, Pair, load, synthetic
from tools.fetch_smollm2 import fetch

#: Facts that a peer scores in one round.
SAMPLE = {"structured": 40, "document": 8, "dialogue": 2}
#: Largest difference of a score: float32 by order of summation, bfloat16 by rounding (any two orders differ so).
AGREE = {"float32": 1e-4, "bfloat16": 0.1}


@cache
def verifier_for(model: str, dtype: str, layout: str) -> gk.Verifier:
    return gk.Verifier.from_pretrained(model, dtype=dtype, layout=layout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workload", SHAPES)
@pytest.mark.parametrize(
    ("layout", "peer"),
    [("paper", "one by one"), ("paper", "padded 32"), ("paper", "prefix cache"), ("fact_last", "one by one")],
)
def test_score_batch(benchmark, request, workload, layout, dtype, peer):
    if peer == "padded 32" and workload != "structured":
        pytest.skip("padding full prompts of this length shows nothing that one by one does not")
    folder = request.config.getoption("--workloads")
    pairs = (load(folder, workload) if folder else synthetic(workload))[: request.config.getoption("--facts")]
    verifier = verifier_for(request.config.getoption("--model") or str(fetch()), dtype, layout)
    whole_groups = peer == "prefix cache"  # it shares too: give it every fact
    sample: list[Pair] = pairs if whole_groups else pairs[:: max(1, len(pairs) // SAMPLE[workload])]

    theirs = PEERS[peer](verifier, sample)
    ours = verifier.score_batch(sample).scores
    difference = float(np.abs(ours - theirs).max())
    assert difference <= AGREE[dtype], f"scores differ by {difference}"

    peer_rates: list[float] = []

    def run_peer() -> None:
        begin = time.perf_counter()
        PEERS[peer](verifier, sample)
        peer_rates.append(len(sample) / (time.perf_counter() - begin))

    our_rates: list[float] = []

    def run_ours() -> gk.ScoreBatch:
        begin = time.perf_counter()
        result = verifier.score_batch(pairs)
        our_rates.append(len(pairs) / (time.perf_counter() - begin))
        return result

    result = benchmark.pedantic(run_ours, setup=run_peer, rounds=request.config.getoption("--rounds"))
    ratios = [mine / other for mine, other in zip(our_rates, peer_rates, strict=True)]
    benchmark.extra_info |= {
        "workload": workload,
        "layout": layout,
        "dtype": dtype,
        "peer": peer,
        "peer facts/s": f"{statistics.median(peer_rates):.2f}",
        "gatekern facts/s": f"{statistics.median(our_rates):.2f}",
        "ratio": f"{statistics.median(ratios):.2f}",
        "tokens": f"{result.usage.computed_tokens} / {result.usage.prompt_tokens}",
        "max score difference": f"{difference:.1e}",
    }
