"""Sample mode: K replies to every prompt, drawn as one batched decode, and their mean (ConsistencyGate, equation 2).

Samples that have drawn the same tokens so far share one row, whose keys and values are computed once: the first step
costs nothing beyond the prompts, and a step never more rows than there are distinct beginnings. Each draw takes its own
uniform number from a counter-based generator keyed by the seed, the prompt's tokens, the sample and the step, so what a
fact is answered does not depend on its batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gatekern import ops
from gatekern.engine.backbone import Backbone
from gatekern.engine.work import Work
from gatekern.errors import InputError
from gatekern.layout import IntArray
from gatekern.modes.evidence import Evidence
from gatekern.modes.settled import settled
from gatekern.ops.parse_scores import TokenTable, token_table
from gatekern.prompts import PromptEncoder
from gatekern.reply_table import ReplyTable, is_open, values_of
from gatekern.results import FloatArray


@dataclass(frozen=True)
class SampleOptions:
    """Options of ``mode="sample"``.

    Attributes
    ----------
    k : int
        Samples for every fact.
    temperature : float
        0 always takes the most probable token.
    top_p : float
        In (0, 1]: draw among the most probable tokens whose mass just reaches it.
    max_new_tokens : int
        A reply that has given no score by then is unparsed.
    seed : int
        From 0 to 2**64 - 1.
    min_valid : int
        Fewer samples with a score than this give status ``unparsed``.
    reply : "number" or "text"
        ``number``: a reply is read until its opening number is settled (the law of ``exact``). ``text``: it runs to its
        end of turn, and `gatekern.ops.parse_scores` reads the whole, for models that put words before the score.
    threshold : float, optional
        Score from which on a fact is accepted; for `early_stop`.
    early_stop : bool
        Stop drawing for a fact once no remaining sample can change the decision at `threshold`.
    """

    k: int = 5
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 8
    seed: int = 0
    min_valid: int = 1
    reply: Literal["number", "text"] = "number"
    threshold: float | None = None
    early_stop: bool = False

    def __post_init__(self) -> None:
        for name, lowest in (("k", 1), ("max_new_tokens", 1), ("min_valid", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InputError(f"{name} must be a whole number from {lowest} on, got {value!r}")
        if self.seed >= 1 << 64:
            raise InputError(f"seed must be below 2**64, got {self.seed}")
        if self.min_valid > self.k:
            raise InputError(f"min_valid={self.min_valid} can never be reached with k={self.k}")
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be from 0 on and finite, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.reply not in ("number", "text"):
            raise InputError(f'reply must be "number" or "text", got {self.reply!r}')
        if self.threshold is not None and not 0.0 <= self.threshold <= 1.0:
            raise InputError(f"threshold must be from 0 to 1, got {self.threshold}")
        if self.early_stop != (self.threshold is not None):
            raise InputError("early_stop=True and threshold go together: it stops when the decision is certain")


def sample_evidence(
    backbone: Backbone,
    prompts: Sequence[IntArray],
    encoder: PromptEncoder,
    table: ReplyTable,
    work: Work,
    options: SampleOptions,
) -> Evidence:
    """Mean of the scores that K replies give, and the replies.

    Parameters
    ----------
    backbone : Backbone
    prompts : sequence of int64 [length_i]
        At least one, none empty.
    encoder : PromptEncoder
        Of these prompts; says how tokens read.
    table : ReplyTable
        Of `encoder`.
    work : Work
        Counters to add to.
    options : SampleOptions
    """
    samples = np.full((len(prompts), options.k), np.nan, dtype=np.float32)
    replies: list[list[str | None]] = [[None] * options.k for _ in prompts]
    finite = np.ones(len(prompts), dtype=bool)
    reader = _TextReader(encoder, backbone.head.vocab_rows) if options.reply == "text" else _NumberReader(table)
    for index, continuation in backbone.continuations(prompts, work, options.max_new_tokens - 1):
        draws = _Draws([prompts[at] for at in index], reader, options)
        hidden = continuation.hidden
        for step in range(options.max_new_tokens):
            with work.stage("score"):
                draws.take(_next_tokens(backbone, hidden, draws, step, options), step)
            if step + 1 == options.max_new_tokens or not draws.going.any():
                break
            hidden = continuation.extend(*draws.branch(step))
        draws.going[:] = False  # what goes on has been cut at max_new_tokens
        with work.stage("score"):
            samples[index], finite[index] = draws.values, draws.finite
            for at, texts in zip(index.tolist(), draws.texts(encoder), strict=True):
                replies[at] = texts
    valid = np.isfinite(samples)
    count = valid.sum(axis=1)
    total = np.where(valid, samples, 0.0).sum(axis=1, dtype=np.float64)
    means = np.divide(total, count, out=np.full(len(prompts), np.nan), where=count >= options.min_valid)
    return Evidence(scores=means.astype(np.float32), finite=finite, samples=samples, replies=replies)


def _next_tokens(backbone: Backbone, hidden: Tensor, draws: _Draws, step: int, options: SampleOptions) -> IntArray:
    """A token for every sample that goes on, int64 [num_going]."""
    head = backbone.head
    going = draws.going
    tokens = ops.draw_tokens(
        hidden.to(head.weight.device),
        head.weight,
        torch.from_numpy(draws.rows[going]).to(head.weight.device),
        torch.from_numpy(draws.uniforms[going, step]).to(head.weight.device),
        bias=head.bias,
        softcap=head.softcap,
        scale=head.scale,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    return tokens.cpu().numpy()


class _NumberReader:
    """Reads a reply until its opening number is settled."""

    def __init__(self, table: ReplyTable) -> None:
        self._next_state = table.next_state

    def read(self, states: IntArray, token: IntArray) -> IntArray:
        """States after one more token."""
        return self._next_state[states, token].astype(np.int64)

    def values(self, states: IntArray, tokens: IntArray) -> FloatArray:
        return values_of(states)


class _TextReader:
    """Lets a reply run to its end of turn and reads it whole. State 0 goes on; any other has ended."""

    def __init__(self, encoder: PromptEncoder, vocab_rows: int) -> None:
        texts = encoder.token_texts(vocab_rows)
        stops = [token for token, text in enumerate(texts) if text is None]
        self._table: TokenTable = token_table([text or "" for text in texts], stops)
        self._stops = np.array([text is None for text in texts])

    def read(self, states: IntArray, token: IntArray) -> IntArray:
        return np.where(self._stops[token], _ENDED, states)

    def values(self, states: IntArray, tokens: IntArray) -> FloatArray:
        values: FloatArray = ops.parse_scores(torch.from_numpy(tokens), self._table).values.numpy()
        return values


_ENDED = 255


class _Draws:
    """The samples of a group of prompts while they are drawn; fields run over num_prompts * k, prompt by prompt.

    Attributes
    ----------
    rows : int64
        Row of the current step's hidden states that continues the sample.
    going : bool
        Whether it goes on.
    uniforms : float64 [num_draws, max_new_tokens]
    """

    def __init__(
        self, prompts: Sequence[IntArray], reader: _NumberReader | _TextReader, options: SampleOptions
    ) -> None:
        self._reader = reader
        self._options = options
        self._shape = (len(prompts), options.k)
        count = len(prompts) * options.k
        self.rows = np.repeat(np.arange(len(prompts)), options.k)
        self.going = np.ones(count, dtype=bool)
        self.uniforms = np.concatenate([_uniforms(prompt, options) for prompt in prompts])
        self._states = np.zeros(count, dtype=np.int64)
        self._tokens = np.full((count, options.max_new_tokens), -1, dtype=np.int64)
        self._dropped = np.zeros(count, dtype=bool)
        self._failed = np.zeros(count, dtype=bool)

    def take(self, tokens: IntArray, step: int) -> None:
        """Read the tokens drawn for the samples that go on."""
        going = np.nonzero(self.going)[0]
        self._failed[going] |= tokens < 0
        self._tokens[going, step] = tokens
        self._states[going] = self._reader.read(self._states[going], tokens)
        self.going[going] = is_open(self._states[going]) & (tokens >= 0)
        options = self._options
        if options.threshold is not None:
            done = settled(self.values, self.going.reshape(self._shape), options.threshold, options.min_valid)
            self._dropped |= self.going & np.repeat(done, options.k)
            self.going &= ~self._dropped

    def branch(self, step: int) -> tuple[IntArray, IntArray]:
        """Parent rows and tokens of the next step's rows: one for each distinct history."""
        going = np.nonzero(self.going)[0]
        histories = np.stack([self.rows[going], self._tokens[going, step]], axis=1)
        distinct, inverse = np.unique(histories, axis=0, return_inverse=True)
        self.rows[going] = inverse.reshape(-1)
        return distinct[:, 0], distinct[:, 1]

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Whether every sample of a prompt could be drawn, bool [num_prompts]."""
        drawn: NDArray[np.bool_] = np.all(~self._failed.reshape(self._shape), axis=1)
        return drawn

    @property
    def values(self) -> FloatArray:
        """Score of each sample that has given one, float32 [num_prompts, k]; NaN for the others."""
        values = self._reader.values(self._states, self._tokens)
        return np.where(self.going | self._dropped, np.float32(np.nan), values).reshape(self._shape)

    def texts(self, encoder: PromptEncoder) -> list[list[str | None]]:
        """The replies, [num_prompts][k]; None for those that were not drawn to their end."""
        seen: dict[bytes, str] = {}
        flat: list[str | None] = []
        for tokens, dropped in zip(self._tokens, self._dropped.tolist(), strict=True):
            key = tokens.tobytes()
            if not dropped and key not in seen:
                seen[key] = encoder.decode(tokens[tokens >= 0].tolist())
            flat.append(None if dropped else seen[key])
        return [flat[at : at + self._shape[1]] for at in range(0, len(flat), self._shape[1])]


def _uniforms(prompt: IntArray, options: SampleOptions) -> NDArray[np.float64]:
    """Numbers in [0, 1) for each sample and step of a prompt: [k, max_new_tokens].

    Philox with the key (seed, digest of the prompt's tokens) and the sample in the counter, so no number depends on the
    batch, on `k` or on `max_new_tokens`.
    """
    digest = hashlib.blake2b(np.asarray(prompt, dtype="<i8").tobytes(), digest_size=8).digest()
    key = np.array([options.seed, int.from_bytes(digest, "little")], dtype=np.uint64)
    streams: list[Any] = [
        np.random.Generator(np.random.Philox(key=key, counter=np.array([0, sample, 0, 0], dtype=np.uint64)))
        for sample in range(options.k)
    ]
    return np.stack([stream.random(options.max_new_tokens) for stream in streams])
