"""Score the facts of pairs.jsonl with a small real model, and show what sharing the context saved.

``python examples/first_scores.py`` fetches SmolLM2-135M-Instruct (92 MB) on the first run. A model of this size answers
yes or no but can hardly tell a right fact from a wrong one: this shows the machinery, not a verdict to rely on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

import transformers  # noqa: E402
from fetch_smollm2 import fetch  # noqa: E402

import gatekern as gk  # noqa: E402


def main() -> None:
    """Score, and print one line a fact."""
    rows = [json.loads(line) for line in (HERE / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    transformers.utils.logging.disable_progress_bar()
    verifier = gk.Verifier.from_pretrained(fetch())
    result = verifier.score_batch([(row["context"], row["fact"]) for row in rows])

    print(f"{'score':>7} {'yes':>7} {'no':>7} {'mass':>6}  fact")
    for row, score, yes, no, mass in zip(
        rows, result.scores, result.yes_logit, result.no_logit, result.label_mass, strict=True
    ):
        print(f"{score:7.3f} {yes:7.2f} {no:7.2f} {mass:6.2f}  {row['fact']}")
    usage = result.usage
    print(
        f"\n{len(rows)} facts, {usage.contexts} contexts: {usage.computed_tokens} tokens computed, "
        f"{usage.saved_tokens} of {usage.prompt_tokens} saved, {usage.forwards} forward "
        f"({result.path} path, {result.backend} operators, prompt {result.prompt_version})"
    )


if __name__ == "__main__":
    main()
