"""Checks and repairs of the pairs that a caller passes, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gatekern.errors import InputError

Pair = tuple[str, str]


@dataclass(frozen=True)
class CheckedPair:
    """One pair after the checks: `text` is None when it cannot be put to the model, and `note` says why."""

    text: Pair | None
    note: str | None = None


def check_pairs(pairs: Iterable[Pair]) -> list[CheckedPair]:
    """Check every pair; never raises for the content of one.

    A context may be empty (nothing is supported by an empty source, and the model is asked so). A fact may not: there
    is nothing to check. Lone surrogates, which no tokenizer accepts, become U+FFFD; surrogate pairs are joined. All
    other text, control characters included, is passed on as it is.

    Raises
    ------
    InputError
        `pairs` itself is a string or not iterable.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise InputError(f"pairs must be an iterable of (context, fact) pairs, got {type(pairs).__name__}")
    return [_check(pair) for pair in pairs]


def _check(pair: object) -> CheckedPair:
    if isinstance(pair, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return CheckedPair(None, f"expected a (context, fact) pair, got {_describe(pair)}")
    texts, repaired = [], []
    for name, text in zip(("context", "fact"), pair, strict=True):
        if not isinstance(text, str):
            return CheckedPair(None, f"{name} must be str, got {_describe(text)}")
        clean = text
        if not _is_valid(text):
            clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            repaired.append(name)
        texts.append(clean)
    context, fact = texts
    if not fact.strip():
        return CheckedPair(None, "fact is empty")
    note = f"unpaired surrogates in {' and '.join(repaired)} repaired" if repaired else None
    return CheckedPair((context, fact), note)


def _is_valid(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
