"""Log-probability first, the exact distribution where that decides nothing."""

from __future__ import annotations

import numpy as np
import pytest

import gatekern as gk
from tests.numbers import PAIRS, number_verifier


def test_facts_take_the_path_that_the_rules_say():
    verifier = number_verifier()
    logprob, exact = verifier.score_batch(PAIRS), verifier.score_batch(PAIRS, "exact")
    band = float(np.median(np.abs(logprob.scores - 0.5)))
    result = verifier.score_batch(PAIRS, "adaptive", threshold=0.5, band=band, mass=0.0)
    sent = np.abs(logprob.scores - 0.5) <= band
    assert 0 < sent.sum() < len(PAIRS)
    assert [by == "exact" for by in result.decided_by] == sent.tolist()
    np.testing.assert_allclose(result.scores, np.where(sent, exact.scores, logprob.scores), atol=1e-5)
    np.testing.assert_allclose(result.label_mass, np.where(sent, exact.label_mass, logprob.label_mass), atol=1e-5)
    np.testing.assert_allclose(result.label_logits, logprob.label_logits, atol=1e-4)
    assert np.array_equal(np.isnan(result.distribution.probabilities).all(axis=1), ~sent)
    np.testing.assert_allclose(result.distribution.mean[sent], result.scores[sent], atol=1e-5)
    assert result.prompt_version == "verify-paper/1+rate-paper/1"


def test_little_label_mass_goes_to_exact():
    verifier = number_verifier()
    assert set(verifier.score_batch(PAIRS, "adaptive", threshold=0.5, band=0.0, mass=1.0).decided_by) == {"exact"}
    nothing = verifier.score_batch(PAIRS, "adaptive", threshold=0.5, band=0.0, mass=0.0)
    assert set(nothing.decided_by) == {"logprob"}
    assert np.isnan(nothing.distribution.probabilities).all()


def test_a_bad_answer_is_not_replaced_by_a_worse_one():
    """Label mass too low, but scores are less likely still."""
    verifier = number_verifier(likely=["yes", "no", "Yes", "No"], other=-3.0)
    labels = verifier.score_batch(PAIRS)
    assert 0.2 < labels.label_mass.max() < 0.999
    assert (verifier.score_batch(PAIRS, "exact").label_mass < labels.label_mass).all()
    result = verifier.score_batch(PAIRS, "adaptive", threshold=0.5, mass=1.0)
    assert set(result.decided_by) == {"logprob"}
    np.testing.assert_allclose(result.scores, labels.scores, atol=1e-5)
    assert result.usage.prompt_tokens > labels.usage.prompt_tokens, "both questions were asked"


def test_bad_rows_and_duplicates_keep_their_places():
    verifier = number_verifier()
    rows = [PAIRS[0], ("context", ""), PAIRS[1], PAIRS[0], ("x " * 3000, "fact")]
    result = verifier.score_batch(rows, "adaptive", threshold=0.5, on_error="report")
    expected = verifier.score_batch([PAIRS[0], PAIRS[1]], "adaptive", threshold=0.5)
    np.testing.assert_allclose(result.scores[[0, 2, 3]], expected.scores[[0, 1, 0]], atol=1e-5)
    assert result.status[1] == "invalid_input"
    assert result.status[4] == "too_long"
    assert result.decided_by[1] is result.decided_by[4] is None
    assert result.usage.contexts == len({pair[0] for pair in (PAIRS[0], PAIRS[1])})


def test_the_status_is_that_of_the_mode_that_decided():
    verifier = number_verifier(min_label_mass=0.0)
    masses = verifier.score_batch(PAIRS, "exact").label_mass
    strict = number_verifier(min_label_mass=float(np.median(masses)))
    result = strict.score_batch(PAIRS, "adaptive", threshold=0.5, mass=1.0)
    assert [status == "low_label_mass" for status in result.status] == (masses < np.median(masses)).tolist()
    labels = strict.score_batch(PAIRS)
    threshold = float(labels.scores[0])
    mixed = strict.score_batch(PAIRS, "adaptive", threshold=threshold, mass=0.0, band=1e-6)
    assert set(mixed.decided_by) == {"logprob", "exact"}
    flagged = [mixed.label_mass[at] < strict.min_label_mass for at in range(len(PAIRS))]
    assert [status == "low_label_mass" for status in mixed.status] == flagged
    kept = strict.score_batch(PAIRS, "adaptive", threshold=0.5, mass=0.0, band=0.0)
    assert set(kept.status) == {"low_label_mass"}, "numbers are likely here, labels are not"


def test_no_pairs():
    """Empty, and none that can be scored: every field of the mode is there."""
    verifier = number_verifier()
    for pairs in ([], [("context", "")] * 2):
        size = len(pairs)
        plain, exact, sample, adaptive = (
            verifier.score_batch(pairs, mode, on_error="report", **options)
            for mode, options in (
                ("logprob", {}),
                ("exact", {}),
                ("sample", {"k": 3}),
                ("adaptive", {"threshold": 0.5}),
            )
        )
        for result in (plain, exact, adaptive):
            assert result.label_mass.shape == (size,)
        for result in (plain, adaptive):
            assert result.label_logits.shape == (size, 2)
        for result in (exact, adaptive):
            assert result.distribution.probabilities.shape == (size, 101)
        assert sample.samples.shape == (size, 3)
        assert sample.replies == (None,) * size


@pytest.mark.parametrize(
    "options", [{}, {"threshold": 1.5}, {"threshold": 0.5, "band": -0.1}, {"threshold": 0.5, "mass": 2}, {"k": 3}]
)
def test_wrong_options_are_input_errors(options):
    with pytest.raises(gk.InputError):
        number_verifier().score_batch(PAIRS, "adaptive", **options)
