"""The pairs of a call as prompts: what cannot be put to the model is noted, what is equal is kept once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gatekern.errors import InputError
from gatekern.inputs import CheckedPair
from gatekern.layout import IntArray
from gatekern.prompts import NOT_LITERAL, PromptEncoder
from gatekern.results import Status


@dataclass
class Batch:
    """The pairs of one call, and what became of each.

    Attributes
    ----------
    pairs : list of CheckedPair
    status : list of Status
    """

    pairs: list[CheckedPair]
    status: list[Status]

    @classmethod
    def of(cls, pairs: list[CheckedPair]) -> Batch:
        return cls(pairs, [Status.OK if pair.text is not None else Status.INVALID_INPUT for pair in pairs])

    def fail(self, at: int, status: Status, note: str) -> None:
        self.status[at] = status
        self.pairs[at] = replace(self.pairs[at], note=note)

    def raise_first(self) -> None:
        """Raise for the first pair that cannot be scored."""
        for at, state in enumerate(self.status):
            if state is not Status.OK:
                raise InputError(f"item {at}: {self.pairs[at].note} (on_error='report' scores the others)", index=at)


@dataclass(frozen=True)
class Prompts:
    """The prompts of some pairs of a batch.

    Attributes
    ----------
    pairs : int64 [num_pairs]
        Which pairs of the batch these are, ascending.
    distinct : list of int64 [length_i]
        Token ids.
    index : int64 [num_pairs]
        The prompt in `distinct` of each pair.
    """

    pairs: IntArray
    distinct: list[IntArray]
    index: IntArray

    @property
    def num_tokens(self) -> int:
        """Of all pairs, as if each were sent alone."""
        return sum(len(self.distinct[at]) for at in self.index.tolist())

    def of(self, pairs: IntArray) -> Prompts:
        """Those of some of the pairs."""
        index = self.index[np.searchsorted(self.pairs, pairs)]
        used, back = np.unique(index, return_inverse=True)
        return Prompts(pairs, [self.distinct[at] for at in used.tolist()], back.reshape(-1))


def encode_batch(
    batch: Batch, encoder: PromptEncoder, *, further: int, max_tokens: int | None, embedding_rows: int
) -> Prompts:
    """Encode every pair that can be scored; the others get their status and note in `batch`.

    Parameters
    ----------
    batch : Batch
    encoder : PromptEncoder
    further : int
        Tokens that are read after a prompt.
    max_tokens : int or None
        Positions of the model.
    embedding_rows : int
        Ids from here on have no embedding.
    """
    limit = None if max_tokens is None else max_tokens - further
    texts = list(dict.fromkeys(pair.text for pair in batch.pairs if pair.text is not None))
    if limit is not None:
        # A text of this many characters cannot fit, whatever the tokenizer does: do not spend minutes on it.
        # Four characters may become one by normalisation.
        fits = 4 * limit * encoder.longest_token
        texts = [text for text in texts if _num_visible(text[0]) + _num_visible(text[1]) <= fits]
    ids = dict(zip(texts, encoder.encode(texts), strict=True))

    def problem(text: tuple[str, str], prompt: IntArray | None) -> tuple[Status, str] | None:
        if limit is not None and (text not in ids or (prompt is not None and len(prompt) > limit)):
            size = f"over {limit:,}" if prompt is None else f"{len(prompt):,}"
            answer = f" and {further} of the answer" if further else ""
            advice = f"the model reads at most {max_tokens:,}: shorten the context or split it"
            return Status.TOO_LONG, f"the prompt has {size} tokens{answer}, {advice}"
        if prompt is None:
            return Status.INVALID_INPUT, NOT_LITERAL
        if prompt.max() >= embedding_rows:
            note = f"token id {prompt.max()} is not among the model's {embedding_rows} embeddings"
            return Status.INVALID_INPUT, note
        return None

    places: dict[bytes, int] = {}
    distinct: list[IntArray] = []
    pairs: list[int] = []
    index: list[int] = []
    for at, pair in enumerate(batch.pairs):
        if pair.text is None:
            continue
        prompt = ids.get(pair.text)
        failure = problem(pair.text, prompt)
        if failure is not None:
            batch.fail(at, *failure)
            continue
        assert prompt is not None
        place = places.setdefault(prompt.tobytes(), len(distinct))
        if place == len(distinct):
            distinct.append(prompt)
        pairs.append(at)
        index.append(place)
    return Prompts(np.array(pairs, dtype=np.int64), distinct, np.array(index, dtype=np.int64))


def _num_visible(text: str) -> int:
    """Characters that are not white space, which some tokenizers drop."""
    return sum(map(len, text.split()))
