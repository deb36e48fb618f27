"""What a mode finds out about each prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gatekern.results import FloatArray


@dataclass(frozen=True)
class Evidence:
    """Aligned with the prompts of one call of a mode; what a mode does not measure is None.

    Attributes
    ----------
    scores : float32 [num_prompts]
        In [0, 1]; NaN where the model gave no score.
    finite : bool [num_prompts]
        Whether every logit that mattered was a number.
    mass : float32 [num_prompts]
        Probability that the model answers as asked: with a label, or with a score.
    label_logits : float32 [num_prompts, num_labels]
        Nats.
    probabilities : float32 [num_prompts, num_values]
        Of each value that a reply can give.
    samples : float32 [num_prompts, num_samples]
        NaN where a reply was no score or was not drawn.
    replies : list of list of str or None
        The text of each sample; None where it was not drawn.
    """

    scores: FloatArray
    finite: NDArray[np.bool_]
    mass: FloatArray | None = None
    label_logits: FloatArray | None = None
    probabilities: FloatArray | None = None
    samples: FloatArray | None = None
    replies: list[list[str | None]] | None = None
