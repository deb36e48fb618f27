"""Peak memory of a call against vocabulary size and number of tokens.

``python -m pytest benchmarks/latency/bench_memory.py``. Each case runs in a process of its own. The model is tiny, so
that logits of every token, which plain calls compute, would dwarf everything else. The bound: going from 1,000 to
100,000 vocabulary rows may cost a small part of those logits.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SMALL, LARGE = 1_000, 100_000

_CASE = """
import json, resource, sys
import torch
import gatekern as gk
from tests.families import tiny_model
from tests.tinytok import tiny_tokenizer
vocab, words, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tokenizer = tiny_tokenizer()
model = tiny_model("llama", vocab_size=vocab, max_position_embeddings=100_000)
verifier = gk.Verifier(model, tokenizer, min_label_mass=0.0)
pairs = [("hello world " * words, f"fact {n}") for n in range(8)]
verifier.score_batch([("a", "b")])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
if how == "gatekern":
    tokens = verifier.score_batch(pairs).usage.computed_tokens
else:
    ids = torch.tensor([verifier.encode(*pairs[0])])
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    tokens = ids.numel()
print(json.dumps({"tokens": tokens, "growth": peak() - before}))
"""


def run_case(vocab: int, words: int, how: str) -> dict[str, int]:
    command = [sys.executable, "-c", _CASE, str(vocab), str(words), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", [500, 2000])
def test_memory(benchmark, words):
    small, large, plain = (
        run_case(vocab, words, how)
        for vocab, how in ((SMALL, "gatekern"), (LARGE, "gatekern"), (LARGE, "transformers"))
    )
    all_logits = large["tokens"] * (LARGE - SMALL) * 4
    added = large["growth"] - small["growth"]
    assert added < 0.05 * all_logits, f"{added / 2**20:.0f} MiB for {LARGE - SMALL} more vocabulary rows"
    benchmark.pedantic(lambda: None)
    benchmark.extra_info |= {
        "workload": f"{large['tokens']} tokens",
        "MiB, V=1,000": f"{small['growth'] / 2**20:.0f}",
        "MiB, V=100,000": f"{large['growth'] / 2**20:.0f}",
        "MiB, one plain forward of one prompt, V=100,000": f"{plain['growth'] / 2**20:.0f}",
    }
