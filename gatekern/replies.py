"""Scores read from replies that some other engine generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gatekern.ops.parse_scores import parse_texts
from gatekern.ops.score_grammar import ParseStatus


@dataclass(frozen=True)
class ReplyScores:
    """What `gatekern.parse_scores` returns.

    Attributes
    ----------
    values : float32 [N]
        In [0, 1]; NaN unless the status is `ParseStatus.OK`.
    status : tuple of ParseStatus
        One per text.
    """

    values: NDArray[np.float32]
    status: tuple[ParseStatus, ...]


def parse_scores(texts: Sequence[str], percent: bool = False) -> ReplyScores:
    """Read a score from each reply that some other engine generated.

    Parameters
    ----------
    texts : sequence of str [N]
        Complete replies to a question for a decimal between 0.0 and 1.0.
    percent : bool
        Read ``80%`` as 0.8; otherwise it is malformed.

    Returns
    -------
    ReplyScores
        ``values`` float32 [N], NaN where there is no score, and ``status``, a `ParseStatus` for each.

    Raises
    ------
    InputError
        If `texts` is a single string, or one of its elements is none; the message names its index.

    Examples
    --------
    >>> import gatekern
    >>> scores = gatekern.parse_scores(["**Score:** 0.85", "It depends."])
    >>> scores.values
    array([0.85,  nan], dtype=float32)
    >>> [status.name for status in scores.status]
    ['OK', 'NO_NUMBER']
    """
    values, status = parse_texts(texts, percent=percent)
    return ReplyScores(values.numpy(), tuple(map(tuple(ParseStatus).__getitem__, status.tolist())))
