"""Sample mode: K replies to every prompt, drawn as one batched decode, and their mean (ConsistencyGate, equation 2).

Samples that have drawn the same tokens so far share one row, whose keys and values are computed once: the first step
costs nothing beyond the prompts, and a step never more rows than there are distinct beginnings. Each draw takes its own
uniform number from a counter-based generator keyed by the seed, the prompt's tokens, the sample and the step, so what a
fact is answered does not depend on its batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gatekern import ops
from gatekern.engine.backbone import Backbone, Decode
from gatekern.engine.work import Work
from gatekern.errors import InputError
from gatekern.layout import IntArray
from gatekern.modes.checks import LOWEST_TEMPERATURE, check_choice, check_real, check_whole
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
        From 0.01 on; 0 always takes the most probable token.
    top_p : float
        Above 0, at most 1: draw among the most probable tokens whose mass just reaches it.
    max_new_tokens : int, optional
        A reply that has given no score by then is unparsed. Default 8, for replies as text 64.
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
    max_new_tokens: int = None  # type: ignore[assignment]  # set by `reply`
    seed: int = 0
    min_valid: int = 1
    reply: Literal["number", "text"] = "number"
    threshold: float | None = None
    early_stop: bool = False

    def __post_init__(self) -> None:
        check_choice("reply", self.reply, ("number", "text"))
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", 8 if self.reply == "number" else 64)
        for name, lowest in (("k", 1), ("max_new_tokens", 1), ("min_valid", 1), ("seed", 0)):
            check_whole(name, getattr(self, name), lowest)
        if self.seed >= 1 << 64:
            raise InputError(f"seed must be below 2**64, got {self.seed}")
        if self.min_valid > self.k:
            raise InputError(f"min_valid={self.min_valid} can never be reached with k={self.k}")
        if self.temperature != 0:
            check_real("temperature", self.temperature, LOWEST_TEMPERATURE, math.inf)
        check_real("top_p", self.top_p, 1e-9, 1.0)
        check_choice("early_stop", self.early_stop, (True, False))
        if self.early_stop != (self.threshold is not None):
            raise InputError("early_stop=True and threshold go together: it stops when the decision is certain")
        if self.threshold is not None:
            check_real("threshold", self.threshold, 0.0, 1.0)


def sample_evidence(
    backbone: Backbone,
    prompts: Sequence[IntArray],
    encoder: PromptEncoder,
    reader: ReplyTable | TextReader,
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
    reader : ReplyTable or TextReader
        What makes scores of tokens, and when a reply is over.
    work : Work
        Counters to add to.
    options : SampleOptions
    """
    shape = len(prompts), options.k
    samples = np.full(shape, np.nan, dtype=np.float32)
    replies = np.full(shape, None, dtype=object)
    finite = np.ones(len(prompts), dtype=bool)
    # Facts that are drawn for together: all rows of their steps are no more than a forward computes, or one fact's.
    together = max(1, backbone.max_tokens // (options.max_new_tokens * options.k))
    for index, continuation in backbone.continuations(prompts, work, options.max_new_tokens - 1):
        uniforms = [_uniforms(prompts[at], options) for at in index]
        for begin in range(0, len(index), together):
            group = slice(begin, begin + together)
            draws = _Draws(np.arange(len(index))[group], np.stack(uniforms[group]), reader, options)
            _decode(backbone, continuation.start(), draws, work, options)
            with work.stage("score"):
                samples[index[group]], finite[index[group]] = draws.values, draws.finite
                replies[index[group]] = draws.texts(encoder)
    valid = np.isfinite(samples)
    count = valid.sum(axis=1)
    total = np.where(valid, samples, 0.0).sum(axis=1, dtype=np.float64)
    means = np.divide(total, count, out=np.full(len(prompts), np.nan), where=count >= options.min_valid)
    return Evidence(scores=means.astype(np.float32), finite=finite, samples=samples, replies=replies.tolist())


def _decode(backbone: Backbone, decode: Decode, draws: _Draws, work: Work, options: SampleOptions) -> None:
    """Draw token after token until every reply is over."""
    for step in range(options.max_new_tokens):
        with work.stage("score"):
            draws.take(_next_tokens(backbone, decode.hidden, draws, step, options), step)
        if step + 1 == options.max_new_tokens or not draws.going.any():
            break
        decode.extend(*draws.branch(step))
    draws.going[:] = False  # what goes on has been cut at max_new_tokens


def _next_tokens(backbone: Backbone, hidden: Tensor, draws: _Draws, step: int, options: SampleOptions) -> IntArray:
    """A token for every sample that goes on, int64 [num_going]."""
    head = backbone.head
    going = draws.going
    rows, place = np.unique(draws.rows[going], return_inverse=True)
    device = head.weight.device
    tokens = ops.draw_tokens(
        backbone.readable(hidden[torch.from_numpy(rows).to(hidden.device)].to(device)),
        head.weight,
        torch.from_numpy(place.reshape(-1)).to(device),
        torch.from_numpy(draws.uniforms[going, step]).to(device),
        bias=head.bias,
        softcap=head.softcap,
        scale=head.scale,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    return tokens.cpu().numpy()


class TextReader:
    """Lets a reply run to its end and reads it whole.

    Parameters
    ----------
    encoder : PromptEncoder
    vocab_rows : int
    ends : collection of int
        Tokens that end a reply.
    """

    def __init__(self, encoder: PromptEncoder, vocab_rows: int, ends: Collection[int]) -> None:
        texts = encoder.token_texts(vocab_rows)
        spelled = [encoder.decode([at]) if text is None else text for at, text in enumerate(texts)]
        self.ends = np.isin(np.arange(vocab_rows), list(ends))
        self.table: TokenTable = token_table(spelled, [end for end in ends if end < vocab_rows])


class _Draws:
    """The samples of some prompts while they are drawn; fields run over num_prompts * k, prompt by prompt.

    Attributes
    ----------
    rows : int64
        Row of the current step's hidden states that continues the sample.
    going : bool
        Whether it goes on.
    uniforms : float64 [num_draws, max_new_tokens]
    """

    def __init__(
        self,
        rows: IntArray,
        uniforms: NDArray[np.float64],
        reader: ReplyTable | TextReader,
        options: SampleOptions,
    ) -> None:
        self._reader = reader
        self._options = options
        self._shape = (len(rows), options.k)
        count = len(rows) * options.k
        self.rows = np.repeat(rows, options.k)
        self.going = np.ones(count, dtype=bool)
        self.uniforms = uniforms.reshape(count, -1)
        self._states = np.zeros(count, dtype=np.int64)  # of a ReplyTable
        self._tokens = np.full((count, options.max_new_tokens), -1, dtype=np.int64)
        self._dropped = np.zeros(count, dtype=bool)
        self._failed = np.zeros(count, dtype=bool)

    def take(self, tokens: IntArray, step: int) -> None:
        """Read the tokens drawn for the samples that go on."""
        going = np.nonzero(self.going)[0]
        self._failed[going] |= tokens < 0
        self._tokens[going, step] = tokens
        if isinstance(self._reader, ReplyTable):
            self._states[going] = self._reader.next_state[self._states[going], tokens]
            self.going[going] = is_open(self._states[going])
        else:
            self.going[going] = ~self._reader.ends[tokens]
        self.going &= ~self._failed
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
        if isinstance(self._reader, ReplyTable):
            values = values_of(self._states)
        else:
            values = ops.parse_scores(torch.from_numpy(self._tokens), self._reader.table).values.numpy()
        without = self.going | self._dropped | self._failed
        return np.where(without, np.float32(np.nan), values).reshape(self._shape)

    def texts(self, encoder: PromptEncoder) -> NDArray[np.object_]:
        """The replies, [num_prompts, k]; None for those that were not drawn to their end."""
        seen: dict[bytes, str] = {}
        flat = np.full(len(self._tokens), None, dtype=object)
        for at in np.nonzero(~self._dropped)[0].tolist():
            tokens = self._tokens[at]
            key = tokens.tobytes()
            if key not in seen:
                seen[key] = encoder.decode(tokens[tokens >= 0].tolist())
            flat[at] = seen[key]
        return flat.reshape(self._shape)


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
