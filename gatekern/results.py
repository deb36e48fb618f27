"""What `score_batch` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


class Status(StrEnum):
    """What happened to one pair. Compares equal to its text."""

    OK = "ok"  #: scored
    LOW_LABEL_MASS = "low_label_mass"  #: scored, but the model hardly meant to give one of the labels
    UNPARSED = "unparsed"  #: the model gave no usable answer; no score
    TOO_LONG = "too_long"  #: the prompt exceeds the model's positions; no score
    INVALID_INPUT = "invalid_input"  #: the pair cannot be put to the model; no score


@dataclass(frozen=True)
class Usage:
    """What a call cost.

    Attributes
    ----------
    contexts : int
        Distinct context texts that were scored.
    prompt_tokens : int
        Tokens of all prompts, as if each were sent alone.
    computed_tokens : int
        Tokens that went through the model (padding included, where a path pads).
    forwards : int
        Model forwards.
    seconds : dict of str to float
        Wall time per stage: ``encode``, ``plan``, ``forward``, ``score``.
    """

    contexts: int
    prompt_tokens: int
    computed_tokens: int
    forwards: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def saved_tokens(self) -> int:
        """Tokens that sharing did not have to compute."""
        return self.prompt_tokens - self.computed_tokens


@dataclass(frozen=True)
class ScoreDistribution:
    """Distribution of a score over the values that a model may reply with.

    Attributes
    ----------
    values : float32 [num_values]
        Scores in [0, 1], ascending.
    probabilities : float32 [num_pairs, num_values]
        Sum to `ScoreBatch.label_mass` in each row that has a score (to 1 under the masked law); NaN in the others.
    """

    values: FloatArray
    probabilities: FloatArray

    @property
    def mean(self) -> FloatArray:
        """Expected score, given that the reply is one, float32 [num_pairs]."""
        return np.asarray(self._weights() @ self.values, dtype=np.float32)

    @property
    def variance(self) -> FloatArray:
        """Variance of the score, given that the reply is one, float32 [num_pairs]."""
        weights = self._weights()
        deviation = self.values - (weights @ self.values)[:, None]
        return np.asarray((weights * deviation**2).sum(axis=1), dtype=np.float32)

    def _weights(self) -> NDArray[np.float64]:
        total = self.probabilities.sum(axis=1, keepdims=True, dtype=np.float64)
        weights = np.full(self.probabilities.shape, np.nan)
        np.divide(self.probabilities, total, out=weights, where=total > 0)
        return weights


@dataclass(frozen=True)
class ScoreBatch:
    """Scores and evidence, aligned with the pairs of the call.

    Attributes
    ----------
    scores : float32 [num_pairs]
        Support, probability in [0, 1]; NaN where `status` is neither ``ok`` nor ``low_label_mass``.
    status : tuple of Status, length num_pairs
    notes : tuple of str or None, length num_pairs
        Why a pair has no score, or what was repaired in its text.
    label_names : tuple of str, length num_labels
        Names of the label groups; empty in modes that ask for a number.
    label_logits : float32 [num_pairs, num_labels] or None
        Log-sum-exp of each label group's logits, nats; NaN where no labels were read. None in "exact" and "sample".
    label_mass : float32 [num_pairs] or None
        Probability, over the whole vocabulary, that the model answers as asked: with one of the labels ("logprob"), or
        with a number from 0 to 1 ("exact"). In "adaptive", of the mode that decided. None in "sample".
    usage : Usage
    attention : str
        What computed attention: ``"triton"``, ``"flash"``, ``"torch"``, or ``"model"`` where the model's own ran.
    backend : str
        What read the labels from hidden states, e.g. ``native-avx512_bf16``, ``triton`` or ``torch``.
    path : str
        How hidden states were computed: ``packed``, ``branched`` or ``full``.
    prompt_version : str
        Version of the prompt template; of both, joined by "+", in "adaptive".
    decided_by : tuple of str or None, length num_pairs
        Mode that gave each score: "logprob", "exact" or "sample"; None for a pair that could not be put to the model.
    samples : float32 [num_pairs, num_samples] or None
        Score of each reply in "sample"; NaN where a reply was no score, or was not drawn (`early_stop`).
    replies : tuple of (tuple of str or None) or None, length num_pairs
        Text of each sample up to where its score was settled; None for one that was not drawn to its end, and for a
        pair that could not be put to the model.
    distribution : ScoreDistribution or None
        Law of the scores that the model would reply with, in "exact"; in "adaptive", of the facts that went there.
    """

    scores: FloatArray
    status: tuple[Status, ...]
    notes: tuple[str | None, ...]
    label_names: tuple[str, ...]
    label_logits: FloatArray | None
    label_mass: FloatArray | None
    usage: Usage
    attention: str
    backend: str
    path: str
    prompt_version: str
    decided_by: tuple[str | None, ...]
    samples: FloatArray | None = None
    replies: tuple[tuple[str | None, ...] | None, ...] | None = None
    distribution: ScoreDistribution | None = None

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def yes_logit(self) -> FloatArray | None:
        """Logits of the group named "yes", float32 [num_pairs] in nats; None without such a group."""
        return self._logit("yes")

    @property
    def no_logit(self) -> FloatArray | None:
        """Logits of the group named "no", float32 [num_pairs] in nats; None without such a group."""
        return self._logit("no")

    def _logit(self, name: str) -> FloatArray | None:
        if self.label_logits is None or name not in self.label_names:
            return None
        return self.label_logits[:, self.label_names.index(name)]
