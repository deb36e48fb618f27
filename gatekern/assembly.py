"""From the evidence of the prompts to the result of the call, aligned with its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gatekern.encoding import Batch, Prompts
from gatekern.engine.work import Work
from gatekern.errors import NumericError
from gatekern.layout import IntArray
from gatekern.modes import Mode, Options
from gatekern.modes.evidence import Evidence
from gatekern.modes.exact import ExactOptions
from gatekern.modes.sample import SampleOptions
from gatekern.reply_table import VALUES
from gatekern.results import FloatArray, ScoreBatch, ScoreDistribution, Status, Usage


@dataclass(frozen=True)
class Part:
    """What one mode found out about some pairs of the call."""

    mode: Mode
    prompts: Prompts
    evidence: Evidence
    decides: NDArray[np.bool_] | None = None  # for which of the pairs; None for all

    @property
    def mass(self) -> FloatArray:
        """Of each pair, float32 [num_pairs]."""
        assert self.evidence.mass is not None
        return self.evidence.mass[self.prompts.index]

    def decided(self) -> tuple[IntArray, IntArray]:
        """Pairs that this part decides, and the prompt of each."""
        which = slice(None) if self.decides is None else self.decides
        return self.prompts.pairs[which], self.prompts.index[which]


def usage_of(batch: Batch, parts: Sequence[Part], work: Work) -> Usage:
    """What the call cost."""
    scored = {at for part in parts for at in part.prompts.pairs.tolist()}
    return Usage(
        contexts=len({batch.pairs[at].text[0] for at in scored}),  # type: ignore[index]
        prompt_tokens=sum(part.prompts.num_tokens for part in parts),
        computed_tokens=work.computed_tokens,
        forwards=work.forwards,
        seconds=work.seconds,
    )


def assemble(
    batch: Batch,
    parts: Sequence[Part],
    settings: Options,
    *,
    usage: Usage,
    label_names: tuple[str, ...],
    min_label_mass: float,
    on_error: str,
    **fields: Any,
) -> ScoreBatch:
    """Align the evidence with the pairs; where two parts know a pair, the later one decides its score.

    Raises
    ------
    NumericError
        A model's logits were not finite, unless `on_error` is "report".
    """
    size = len(batch.pairs)

    def aligned(name: str, *shape: int) -> FloatArray:
        """A field of the evidence by pair, NaN where there is none."""
        values = np.full((size, *shape), np.nan, dtype=np.float32)
        for part in parts:
            found: FloatArray | None = getattr(part.evidence, name)
            if found is not None:
                pairs, prompts = part.decided()
                values[pairs] = found[prompts]
        return values

    sampled, weighed = isinstance(settings, SampleOptions), isinstance(settings, ExactOptions)
    scores = aligned("scores")
    mass = None if sampled else aligned("mass")
    label_logits = aligned("label_logits", len(label_names)) if label_names else None
    samples = aligned("samples", settings.k) if isinstance(settings, SampleOptions) else None
    probabilities = aligned("probabilities", len(VALUES)) if weighed else None
    replies: list[tuple[str | None, ...] | None] = [None] * size
    decided_by: list[str | None] = [None] * size
    for part in parts:
        for at, prompt in zip(*(index.tolist() for index in part.decided()), strict=True):
            decided_by[at] = part.mode
            if part.evidence.replies is not None:
                replies[at] = tuple(part.evidence.replies[prompt])
            if not part.evidence.finite[prompt]:
                batch.fail(at, Status.UNPARSED, "the model's logits are not finite: check its weights and dtype")
                if on_error == "raise":
                    raise NumericError(f"item {at}: {batch.pairs[at].note}", index=at)
                for values in (scores, mass, label_logits, samples, probabilities):
                    if values is not None:
                        values[at] = np.nan
    for at in np.nonzero([state is Status.OK for state in batch.status])[0].tolist():
        if np.isnan(scores[at]):
            batch.fail(at, Status.UNPARSED, _why_unparsed(settings, replies[at] or ()))
        elif mass is not None and mass[at] < min_label_mass:
            batch.status[at] = Status.LOW_LABEL_MASS
    return ScoreBatch(
        scores=scores,
        status=tuple(batch.status),
        notes=tuple(pair.note for pair in batch.pairs),
        label_names=label_names,
        label_logits=label_logits,
        label_mass=mass,
        usage=usage,
        decided_by=tuple(decided_by),
        samples=samples,
        replies=tuple(replies) if sampled else None,
        distribution=None if probabilities is None else ScoreDistribution(VALUES, probabilities),
        **fields,
    )


def _why_unparsed(settings: Options, replies: Sequence[str | None]) -> str:
    if not isinstance(settings, SampleOptions):
        return "no reply that is a score has any probability"
    texts = list(dict.fromkeys(repr(reply) for reply in replies if reply is not None))
    few = "none" if settings.min_valid == 1 else f"fewer than {settings.min_valid}"
    return f"{few} of {settings.k} replies gave a score, among them {', '.join(texts[:3])}"
