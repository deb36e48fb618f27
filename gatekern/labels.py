"""Label groups: the token ids that spell each answer at the answer position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from gatekern.errors import LabelError
from gatekern.prompts import PromptEncoder

#: What a caller may pass: names, or names with the words or token ids that count for them.
LabelSpec = Sequence[str] | Mapping[str, Sequence[str | int]]

YES_NO: LabelSpec = ("yes", "no")


@dataclass(frozen=True)
class LabelSet:
    """Answers as groups of token ids; the first group is the one that `scores` is the probability of.

    Attributes
    ----------
    names : tuple of str
        One per group.
    ids : tuple of tuple of int
        Token ids of each group, ascending.
    spellings : tuple of tuple of str
        Their text at the answer position.
    """

    names: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    spellings: tuple[tuple[str, ...], ...]

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self.ids[self.names.index(name)]

    @property
    def yes(self) -> tuple[int, ...]:
        """Token ids of the group named "yes"."""
        return self["yes"]

    @property
    def no(self) -> tuple[int, ...]:
        """Token ids of the group named "no"."""
        return self["no"]


def resolve_labels(encoder: PromptEncoder, spec: LabelSpec, vocab_rows: int) -> LabelSet:
    """Find every single-token spelling of each label that can follow the prompt.

    A word counts in any case and with any white space around it, as long as the tokenizer encodes ``prompt + spelling``
    as the prompt's ids and one more. Ids are taken as they are.

    Parameters
    ----------
    encoder : PromptEncoder
        Says what the answer position looks like.
    spec : sequence of str, or mapping of str to words and ids
        ``("yes", "no")``, or for example ``{"yes": ["yes", "true"], "no": ["no", 9042]}``.
    vocab_rows : int
        Rows of the output head; ids must be below (a head may have more rows than the tokenizer has tokens).

    Raises
    ------
    LabelError
        Fewer than two groups, a word without a single-token spelling, an id in two groups or out of range.
    """
    words = _groups(spec)
    spelled = _spellings(encoder, {word for group in words.values() for word in group if isinstance(word, str)})
    owner: dict[int, str] = {}
    ids: list[tuple[int, ...]] = []
    for name, group in words.items():
        found: set[int] = set()
        for word in group:
            found |= {word} if isinstance(word, int) else spelled[_key(word)]
        if not found:
            raise LabelError(f"label {name!r} has no words")
        for token in sorted(found):
            if not 0 <= token < vocab_rows:
                raise LabelError(f"label {name!r}: token id {token} is outside the head's {vocab_rows} rows")
            if owner.setdefault(token, name) != name:
                raise LabelError(f"token id {token} ({encoder.decode([token])!r}) is in {owner[token]!r} and {name!r}")
        ids.append(tuple(sorted(found)))
    spellings = tuple(tuple(encoder.decode([token]) for token in group) for group in ids)
    return LabelSet(tuple(words), tuple(ids), spellings)


def _groups(spec: LabelSpec) -> dict[str, list[str | int]]:
    """Names with their words and ids; a single word or id may stand for a list of one."""
    if isinstance(spec, str) or not isinstance(spec, (Mapping, Sequence)):
        raise LabelError(f"labels must be a sequence of words or a mapping of names to words, got {spec!r}")
    named = dict(spec) if isinstance(spec, Mapping) else {name: name for name in spec}
    if len(named) < 2 or len(named) != len(spec):
        raise LabelError(f"labels must be at least two different groups, got {spec!r}")
    groups: dict[str, list[str | int]] = {}
    for name, value in named.items():
        if not isinstance(name, str):
            raise LabelError(f"label names are text, got {name!r}; ids go into a mapping: {{'yes': [{name!r}], ...}}")
        members = [value] if isinstance(value, (str, SupportsIndex)) else list(value)
        groups[name] = [_member(name, member) for member in members]
    return groups


def _member(name: str, member: object) -> str | int:
    if isinstance(member, str) and member.strip():
        return member
    if isinstance(member, SupportsIndex) and not isinstance(member, bool):
        return member.__index__()
    raise LabelError(f"label {name!r}: {member!r} is neither a word nor a token id")


def _key(word: str) -> str:
    return word.strip().casefold()


def _spellings(encoder: PromptEncoder, words: set[str]) -> dict[str, set[int]]:
    """Token ids of each word at the answer position."""
    wanted = {_key(word): set[int]() for word in words}
    prompt = encoder.encode_one("a", "a")
    tail = prompt[-8:].tolist()
    before = encoder.decode(tail)
    for token in encoder.vocabulary() if wanted else []:
        key = _key(encoder.decode([token]))
        if key not in wanted:
            continue
        # Decoded after the prompt, because some tokenizers drop a leading space at the start of a text.
        text = encoder.decode([*tail, token]).removeprefix(before)
        if np.array_equal(encoder.encode_one("a", "a", answer=text), [*prompt, token]):
            wanted[key].add(token)
    for key, found in wanted.items():
        if not found:
            pieces = encoder.encode_one("a", "a", answer=key)[len(prompt) :].tolist()
            raise LabelError(
                f"label {key!r} has no single-token spelling at the answer position "
                f"(it reads as {[encoder.decode([piece]) for piece in pieces]}); use a shorter word or token ids"
            )
    return wanted
