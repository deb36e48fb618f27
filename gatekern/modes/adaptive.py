"""Adaptive mode: log-probability scoring for every fact, the exact distribution for those that it leaves undecided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gatekern.modes.checks import check_real
from gatekern.modes.evidence import Evidence
from gatekern.modes.exact import ExactOptions
from gatekern.results import FloatArray


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions(ExactOptions):
    """Options of ``mode="adaptive"``: those of ``exact``, and when to take it.

    Attributes
    ----------
    threshold : float
        Score from which on a fact is accepted.
    band : float
        A log-probability score within this distance of the threshold does not settle the decision. On a small trained
        verifier 0.15 sent 7 to 18 % of the facts on, and at most 0.8 % of all decisions differed from those of
        ``exact`` for every fact (docs/modes.md).
    mass : float
        Nor does one whose labels have together less than this probability: were all the rest to go to one label, the
        score would move by up to ``1 - mass``, the default band. An exact score with less than this probability, and
        less than the labels had, does not decide: then the log-probability score stays.
    """

    threshold: float
    band: float = 0.15
    mass: float = 0.85

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold", "band", "mass"):
            check_real(name, getattr(self, name), 0.0, 1.0)


def undecided(evidence: Evidence, options: AdaptiveOptions) -> NDArray[np.bool_]:
    """Facts whose decision the log-probability scores do not settle, bool [num_prompts]."""
    assert evidence.mass is not None
    near = np.abs(evidence.scores - options.threshold) <= options.band
    unsure: NDArray[np.bool_] = near | (evidence.mass < options.mass)
    return unsure & evidence.finite


def answers_better(labels: FloatArray, scores: FloatArray, options: AdaptiveOptions) -> NDArray[np.bool_]:
    """Whether the exact score decides, bool [num_pairs], by the masses of labels and of scores.

    Not where the model would hardly reply with a score, and rather with a label: one bad answer is not to be replaced
    by a worse one.
    """
    better: NDArray[np.bool_] = ~((scores < options.mass) & (scores < labels))
    return better
