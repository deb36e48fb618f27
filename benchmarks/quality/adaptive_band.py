"""What `band` of adaptive mode costs and what it keeps, on labelled facts.

``python -m benchmarks.quality.adaptive_band --model M --pairs facts.jsonl`` with lines of ``context``, ``fact`` and
``label`` (1 supported, 0 not) prints one row a band: the share of facts that go on to `exact`, how many decisions then
differ from those of `exact` for every fact, and accuracy against the labels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import gatekern as gk
from gatekern import prompts

BANDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)


def main(
    model: Annotated[str, typer.Option(help="Hub id, folder or .gguf file.")],
    pairs: Annotated[Path, typer.Option(help="JSONL with context, fact and label.")],
    prompt: Annotated[Path | None, typer.Option(help="Template of the yes/no question.")] = None,
    rating_prompt: Annotated[Path | None, typer.Option(help="Template of the question for a score.")] = None,
) -> None:
    """Print the table."""
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    facts, labels = [(row["context"], row["fact"]) for row in rows], np.array([row["label"] == 1 for row in rows])
    verifier = gk.Verifier.from_pretrained(
        model,
        prompt=prompts.load(prompt) if prompt else None,
        rating_prompt=prompts.load(rating_prompt) if rating_prompt else None,
    )
    plain, exact = verifier.score_batch(facts), verifier.score_batch(facts, "exact")
    typer.echo(
        f"{len(facts)} facts; lowest label mass {plain.label_mass.min():.4f}, of exact {exact.label_mass.min():.4f}"
    )
    typer.echo("| threshold | band | sent on | differs from exact | accuracy | logprob | exact |")
    typer.echo("|---|---|---|---|---|---|---|")
    for threshold in (0.5, 0.7):
        by_plain, by_exact = plain.scores >= threshold, exact.scores >= threshold
        for band in BANDS:
            sent = np.abs(plain.scores - threshold) <= band
            decided = np.where(sent, by_exact, by_plain)
            typer.echo(
                f"| {threshold} | {band} | {sent.mean():.1%} | {(decided != by_exact).mean():.2%} "
                f"| {(decided == labels).mean():.3f} | {(by_plain == labels).mean():.3f} "
                f"| {(by_exact == labels).mean():.3f} |"
            )


if __name__ == "__main__":
    typer.run(main)
