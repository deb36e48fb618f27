"""Result types."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import gatekern as gk
from gatekern.results import ScoreDistribution


def test_moments_of_a_distribution():
    values = np.array([0.0, 0.5, 1.0], dtype=np.float32)
    rows = np.array([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [np.nan] * 3], dtype=np.float32)
    distribution = ScoreDistribution(values, rows)
    np.testing.assert_allclose(distribution.mean, [0.5, 0.5, np.nan])
    np.testing.assert_allclose(distribution.variance, [0.25, 0.0, np.nan])


def test_results_are_frozen_and_statuses_are_text(tiny_verifier):
    result = tiny_verifier.score_batch([("a", "b")])
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.scores = None
    assert result.status[0] == "ok" == str(gk.Status.OK)
