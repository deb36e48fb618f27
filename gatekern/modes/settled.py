"""When no remaining sample can change a decision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gatekern.results import FloatArray


def settled(values: FloatArray, going: NDArray[np.bool_], threshold: float, min_valid: int = 1) -> NDArray[np.bool_]:
    r"""Whether the decision on each fact is certain before all its samples are drawn.

    A fact is accepted if the mean of its valid samples is at least the threshold, and has no score with fewer than
    `min_valid` of them. With `v` valid samples of sum `s` and `r` samples still open, each of which may become any
    score in [0, 1] or none, the mean lies in :math:`[s / (v + r), (s + r) / (v + r)]`.

    Parameters
    ----------
    values : float32 [num_facts, num_samples]
        Scores in [0, 1]; NaN where a sample has given none, or is open.
    going : bool [num_facts, num_samples]
        Samples that are still open.
    threshold : float
        Compared as float32, like the scores of a result.
    min_valid : int

    Returns
    -------
    bool [num_facts]

    Notes
    -----
    Means are rounded to float32 before they are compared, and rounding is monotonic: a bound that is on one side of the
    threshold keeps every mean within it there, and the mean of the samples drawn so far as well.

    Examples
    --------
    >>> nan = float("nan")
    >>> going = np.array([[False, False, True]])
    >>> settled(np.array([[1.0, 1.0, nan]], dtype=np.float32), going, 0.6)
    array([ True])
    >>> settled(np.array([[1.0, 0.5, nan]], dtype=np.float32), going, 0.6)
    array([False])
    """
    valid = np.isfinite(values) & ~going
    count, open_ = valid.sum(axis=1), going.sum(axis=1)
    total = np.where(valid, values, 0.0).sum(axis=1, dtype=np.float64)
    most = np.maximum(count + open_, 1)
    limit = np.float32(threshold)
    lowest, highest = (total / most).astype(np.float32), ((total + open_) / most).astype(np.float32)
    unparsed = count + open_ < min_valid
    certain: NDArray[np.bool_] = unparsed | ((count >= min_valid) & ((lowest >= limit) | (highest < limit)))
    return certain
