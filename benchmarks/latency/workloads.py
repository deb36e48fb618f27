"""Three shapes of work: short structured records, documents, one long dialogue.

``load`` reads (context, fact) pairs from JSONL files; ``synthetic`` makes pairs of the same shape from a word list, for
machines that do not have the files.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

Pair = tuple[str, str]


@dataclass(frozen=True)
class Shape:
    """How many contexts, facts for each, and words in them (a word is about 1.3 tokens)."""

    contexts: int
    facts: int
    context_words: int
    fact_words: int


SHAPES = {
    "structured": Shape(contexts=5, facts=40, context_words=60, fact_words=12),
    "document": Shape(contexts=4, facts=32, context_words=800, fact_words=22),
    "dialogue": Shape(contexts=1, facts=64, context_words=3000, fact_words=14),
}

_WORDS = [
    "harbour",
    "bakery",
    "river",
    "museum",
    "teacher",
    "garden",
    "engine",
    "letter",
    "winter",
    "market",
    "doctor",
    "window",
    "bridge",
    "island",
    "summer",
    "village",
    "painter",
    "station",
    "library",
    "forest",
    "captain",
    "kitchen",
    "journey",
    "concert",
    "mountain",
    "tailor",
    "orchard",
    "lantern",
    "opened",
    "moved",
    "painted",
    "visited",
    "built",
    "carried",
    "wrote",
    "found",
    "sold",
    "taught",
    "repaired",
    "kept",
]


def load(folder: Path, name: str) -> list[Pair]:
    """Pairs of ``folder/name.jsonl``."""
    rows = map(json.loads, (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["context"], row["fact"]) for row in rows]


def synthetic(name: str) -> list[Pair]:
    """Seeded pairs of the shape `name`; their sentences mean nothing."""
    shape, rng = SHAPES[name], random.Random(name)

    def text(words: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(words)).capitalize() + "."

    contexts = [" ".join(text(10) for _ in range(shape.context_words // 10)) for _ in range(shape.contexts)]
    return [(context, text(shape.fact_words)) for context in contexts for _ in range(shape.facts)]
