"""Every mode of `score_batch` against K sampled replies of plain transformers, in turn.

``python -m pytest benchmarks/latency/bench_modes.py`` (about half an hour on two cores) prints the table. The peer is
what people do: ``generate(num_return_sequences=K)`` for every fact, each reply decoded and read. It scores every n-th
fact only; facts per second are compared, and ratios are medians over rounds. Log-probability scoring runs in every
round too, for the cost of a mode relative to it.

Before anything is timed, greedy replies of the two have to be the same, token by token.
"""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import gatekern as gk
from benchmarks.latency.workloads import SHAPES, Pair, load, synthetic
from tools.fetch_smollm2 import fetch

#: Facts that the peer scores in one round.
SAMPLE = {"structured": 12, "document": 4, "dialogue": 1}
MAX_NEW_TOKENS = 8

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "logprob": ("logprob", {}),
    "exact": ("exact", {}),
    "adaptive": ("adaptive", {"threshold": 0.7}),
    "sample, number": ("sample", {}),
    "sample, text": ("sample", {"reply": "text"}),
}
CASES = [(name, 5) for name in MODES] + [("sample, text", k) for k in (1, 3, 10)]


@cache
def verifier_for(model: str, dtype: str) -> gk.Verifier:
    return gk.Verifier.from_pretrained(model, dtype=dtype)


@torch.no_grad()
def generated(verifier: gk.Verifier, pairs: list[Pair], k: int, **options: Any) -> list[list[str]]:
    """K replies to each fact, one call of `generate` a fact."""
    replies = []
    for pair in pairs:
        ids = torch.tensor([verifier.encode(*pair, mode="sample")])
        out = verifier.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_NEW_TOKENS,
            num_return_sequences=k,
            pad_token_id=0,
            **options,
        )
        replies.append(verifier.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True))
    return replies


def peer(verifier: gk.Verifier, pairs: list[Pair], k: int) -> np.ndarray:
    """Mean of the scores in K sampled replies, NaN where none has one."""
    replies = generated(verifier, pairs, k, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    values = gk.parse_scores([reply for some in replies for reply in some]).values.reshape(-1, k)
    valid = np.isfinite(values)
    total = np.where(valid, values, 0.0).sum(axis=1)
    return np.divide(total, valid.sum(axis=1), out=np.full(len(pairs), np.nan), where=valid.any(axis=1))


def verify(verifier: gk.Verifier, pairs: list[Pair]) -> None:
    """Greedy replies agree, but for what follows a tie within rounding."""
    ours = verifier.score_batch(
        pairs, "sample", k=1, temperature=0.0, reply="text", max_new_tokens=MAX_NEW_TOKENS
    ).replies
    theirs = generated(verifier, pairs, 1, do_sample=False)
    ends = verifier.tokenizer.all_special_tokens
    same = 0
    for (mine,), (other,) in zip(ours, theirs, strict=True):
        for end in ends:
            mine = mine.removesuffix(end)
        same += mine == other
    assert same >= 0.7 * len(pairs), f"{same} of {len(pairs)} greedy replies are the same"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workload", SHAPES)
@pytest.mark.parametrize(("name", "k"), CASES, ids=[f"{name} K={k}" for name, k in CASES])
def test_mode(benchmark, request, name, k, workload, dtype):
    folder = request.config.getoption("--workloads")
    pairs = (load(folder, workload) if folder else synthetic(workload))[: request.config.getoption("--facts")]
    verifier = verifier_for(request.config.getoption("--model") or str(fetch()), dtype)
    sample: list[Pair] = pairs[:: max(1, len(pairs) // SAMPLE[workload])]
    mode, options = MODES[name]
    if mode == "sample":
        options = {**options, "k": k, "max_new_tokens": MAX_NEW_TOKENS}
    if dtype == "float32":
        verify(verifier, sample)
    verifier.score_batch(pairs[:2], mode, **options)  # what is built once

    rates: dict[str, list[float]] = {"peer": [], "logprob": [], "ours": []}

    def timed(what: str, count: int, run: Any) -> Any:
        begin = time.perf_counter()
        result = run()
        rates[what].append(count / (time.perf_counter() - begin))
        return result

    def others() -> None:
        timed("peer", len(sample), lambda: peer(verifier, sample, k))
        timed("logprob", len(pairs), lambda: verifier.score_batch(pairs))

    def ours() -> gk.ScoreBatch:
        return timed("ours", len(pairs), lambda: verifier.score_batch(pairs, mode, **options))

    result = benchmark.pedantic(ours, setup=others, rounds=request.config.getoption("--rounds"))
    plain = verifier.score_batch(pairs).usage.computed_tokens

    def ratio(of: str, to: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(rates[of], rates[to], strict=True)):.2f}"

    benchmark.extra_info |= {
        "workload": workload,
        "dtype": dtype,
        "mode": name,
        "K": k if mode == "sample" else "",
        "facts/s": f"{statistics.median(rates['ours']):.2f}",
        "generate, K": k,
        "facts/s of generate": f"{statistics.median(rates['peer']):.2f}",
        "times generate": ratio("ours", "peer"),
        "time / logprob's": ratio("logprob", "ours"),
        "tokens / logprob's": f"{result.usage.computed_tokens / plain:.2f}",
        "scored": f"{np.isfinite(result.scores).mean():.0%}",
    }
