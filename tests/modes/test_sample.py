"""K replies as one decode: their law, their independence of the batch, and when drawing stops."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gatekern as gk
from gatekern.engine import packed
from gatekern.modes.sample import SampleOptions, _uniforms
from gatekern.modes.settled import settled
from tests.numbers import PAIRS, number_verifier


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom, values with fewer than five expected draws taken together."""
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "lfm2"])
def test_converges_to_exact(family):
    """At a fixed seed; the 99.9 % point of chi-square is below d + 3.1 sqrt(2 d) + 8 for any d."""
    verifier, draws = number_verifier(family), 20_000
    exact = verifier.score_batch(PAIRS[:2], "exact")
    result = verifier.score_batch(PAIRS[:2], "sample", k=draws, seed=7)
    for at in range(2):
        # `exact` weighs the usual spelling of each score; samples may also say ".5" or " 0.5".
        usual = np.array([reply[:1] in "01" for reply in result.replies[at]])
        found = np.where(usual, result.samples[at], np.nan)
        counts = np.bincount(np.round(found[np.isfinite(found)] * 100).astype(int), minlength=101)
        expected = exact.distribution.probabilities[at] * draws
        counts, expected = np.append(counts, draws - counts.sum()), np.append(expected, draws - expected.sum())
        statistic, freedom = chi_square(counts, expected)
        assert freedom > 10
        assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5 + 8
        error = exact.distribution.variance[at] ** 0.5 / np.isfinite(found).sum() ** 0.5
        assert abs(np.nanmean(found) - exact.scores[at]) < 4 * error


def test_the_comparison_can_fail():
    """Samples at another temperature are told apart."""
    verifier, draws = number_verifier(), 20_000
    exact = verifier.score_batch(PAIRS[:1], "exact").distribution.probabilities[0] * draws
    result = verifier.score_batch(PAIRS[:1], "sample", k=draws, seed=7, temperature=1.3)
    usual = np.array([reply[:1] in "01" for reply in result.replies[0]])
    found = np.where(usual, result.samples[0], np.nan)
    counts = np.bincount(np.round(found[np.isfinite(found)] * 100).astype(int), minlength=101)
    statistic, freedom = chi_square(np.append(counts, draws - counts.sum()), np.append(exact, draws - exact.sum()))
    assert statistic > freedom + 3.1 * (2 * freedom) ** 0.5 + 8


@pytest.mark.parametrize("reply", ["number", "text"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_samples_do_not_depend_on_the_batch(family, reply):
    """Alone, among others, shuffled, twice, and in other forwards."""
    verifier = number_verifier(family)
    options = {"k": 6, "seed": 3, "reply": reply}
    together = verifier.score_batch(PAIRS, "sample", **options)
    alone = np.array([verifier.score_batch([pair], "sample", **options).samples[0] for pair in PAIRS])
    np.testing.assert_array_equal(together.samples, alone)
    twice = verifier.score_batch(PAIRS[::-1] + PAIRS, "sample", **options)
    np.testing.assert_array_equal(twice.samples, np.concatenate([alone[::-1], alone]))
    for max_tokens in (40, 150):
        cut = number_verifier(family, max_tokens_per_forward=max_tokens).score_batch(PAIRS, "sample", **options)
        np.testing.assert_array_equal(cut.samples, alone)
        assert cut.replies == together.replies
    assert np.isfinite(alone).any()


def test_more_samples_and_longer_replies_keep_the_first_ones():
    verifier = number_verifier()
    ten = verifier.score_batch(PAIRS, "sample", k=10).samples
    for k in range(1, 10):
        np.testing.assert_array_equal(verifier.score_batch(PAIRS, "sample", k=k).samples, ten[:, :k])
    longer = verifier.score_batch(PAIRS, "sample", k=10, max_new_tokens=20).samples
    assert np.array_equal(longer[np.isfinite(ten)], ten[np.isfinite(ten)])
    assert not np.array_equal(verifier.score_batch(PAIRS, "sample", k=10, seed=1).samples, ten, equal_nan=True)


def test_the_score_is_the_mean_over_valid_samples():
    result = number_verifier().score_batch(PAIRS, "sample", k=20)
    assert np.isnan(result.samples).any()
    np.testing.assert_allclose(result.scores, np.nanmean(result.samples.astype(np.float64), axis=1), rtol=1e-6)
    assert result.label_mass is result.label_logits is result.distribution is None
    assert result.decided_by == ("sample",) * len(PAIRS)
    for samples, replies in zip(result.samples, result.replies, strict=True):
        assert len(replies) == 20
        for value, reply in zip(samples.tolist(), replies, strict=True):
            assert np.isnan(value) or reply.lstrip("0").startswith(f"{value:.2f}".strip("0").rstrip("."))


def test_no_valid_sample_is_a_status_and_names_the_replies():
    verifier = number_verifier(likely=["7"])
    result = verifier.score_batch(PAIRS, "sample", k=3, temperature=0.2)
    assert set(result.status) == {"unparsed"}
    assert np.isnan(result.scores).all()
    assert all("none of 3 replies gave a score, among them '7'" in note for note in result.notes)


def test_min_valid():
    verifier = number_verifier()
    valid = np.isfinite(verifier.score_batch(PAIRS, "sample", k=8).samples).sum(axis=1)
    assert valid.min() < valid.max()
    result = verifier.score_batch(PAIRS, "sample", k=8, min_valid=int(valid.max()))
    assert np.array_equal(np.isfinite(result.scores), valid == valid.max())
    assert [status == "ok" for status in result.status] == (valid == valid.max()).tolist()


def test_greedy_replies_are_those_of_generate():
    """Temperature 0 against transformers, token by token."""
    verifier = number_verifier(other=-1.0)
    result = verifier.score_batch(PAIRS, "sample", k=2, temperature=0.0, reply="text", max_new_tokens=12)
    for pair, replies in zip(PAIRS, result.replies, strict=True):
        ids = torch.tensor([verifier.encode(*pair, mode="sample")])
        out = verifier.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=verifier.tokenizer.eos_token_id,
            pad_token_id=verifier.tokenizer.pad_token_id,
        )
        assert set(replies) == {verifier.tokenizer.decode(out[0, ids.shape[1] :])}


def test_rows_are_shared_by_samples_with_one_history():
    """A thousand samples cost no more rows than there are distinct beginnings."""
    verifier = number_verifier()
    plain = verifier.score_batch(PAIRS[:1], "sample", k=1, max_new_tokens=1).usage.computed_tokens
    result = verifier.score_batch(PAIRS[:1], "sample", k=1000)
    beginnings = {reply[:at] for reply in result.replies[0] for at in range(1, len(reply))}
    assert result.usage.computed_tokens - plain <= 2 * len(beginnings)
    assert result.usage.forwards <= 8


def test_drawing_stops_when_every_reply_is_settled():
    verifier = number_verifier(likely=["1", "</s>"])
    result = verifier.score_batch(PAIRS, "sample", k=4, temperature=0.1, max_new_tokens=100)
    assert result.usage.forwards <= 4


def test_top_p_keeps_the_nucleus():
    verifier = number_verifier()
    greedy = verifier.score_batch(PAIRS, "sample", k=1, temperature=0.0)
    narrow = verifier.score_batch(PAIRS, "sample", k=6, top_p=1e-6)
    np.testing.assert_array_equal(narrow.samples, np.repeat(greedy.samples, 6, axis=1))


def test_replies_as_text_are_read_whole():
    """Words before the score make no difference to the text reader."""
    verifier = number_verifier(other=-4.0)
    number = verifier.score_batch(PAIRS, "sample", k=200)
    text = verifier.score_batch(PAIRS, "sample", k=200, reply="text", max_new_tokens=12)
    assert np.isfinite(text.samples).any()
    ends = re.compile("</s>$")
    flat = [reply for replies in text.replies for reply in replies]
    ended = np.array([bool(ends.search(reply)) for reply in flat])
    assert 0 < ended.sum() < len(flat)
    expected = gk.parse_scores([ends.sub("", reply) for reply in flat])
    np.testing.assert_array_equal(text.samples.ravel()[ended], expected.values[ended])
    assert number.replies != text.replies


def test_replies_as_text_may_think_first():
    """The marks of thinking are control tokens, but no end of a reply."""
    verifier = number_verifier(likely=["<think>"])
    verifier.model.lm_head.bias.data[verifier.tokenizer.convert_tokens_to_ids("<think>")] = 30.0
    result = verifier.score_batch(PAIRS[:1], "sample", k=1, reply="text", temperature=0.0, max_new_tokens=4)
    assert result.replies == (("<think>" * 4,),)
    assert result.status == ("unparsed",)


def test_the_rows_of_a_decode_are_bounded(monkeypatch):
    """Many samples of many facts are drawn for some facts at a time, with the same samples."""
    pairs = [(f"context {at}", "a fact") for at in range(12)]
    options = {"k": 20, "reply": "text", "max_new_tokens": 6}
    expected = number_verifier().score_batch(pairs, "sample", **options)
    held = []
    take = packed.PackedDecode.extend

    def spy(self, parents, tokens):
        take(self, parents, tokens)
        held.append(self._layout.num_keys)

    monkeypatch.setattr(packed.PackedDecode, "extend", spy)
    found = number_verifier(max_tokens_per_forward=600).score_batch(pairs, "sample", **options)
    assert found.replies == expected.replies
    assert max(held) <= 2 * 600 + 600


def test_replies_as_text_are_longer_by_default():
    assert SampleOptions().max_new_tokens == 8
    assert SampleOptions(reply="text").max_new_tokens == 64
    assert SampleOptions(reply="text", max_new_tokens=8).max_new_tokens == 8


def test_no_room_for_an_answer():
    with pytest.raises(
        gk.InputError, match=r"an answer of 5,000 tokens leaves no room for a prompt in 2,048 positions"
    ):
        number_verifier().score_batch(PAIRS, "sample", max_new_tokens=5000)


CASES = st.integers(0, 2**32 - 1)


def random_case(rng: np.random.Generator):
    """Samples of one fact, which of them are open, and what the open ones become."""
    k = int(rng.integers(1, 11))
    values = np.where(rng.random(k) < 0.2, np.nan, rng.integers(0, 101, k) / 100).astype(np.float32)
    if rng.random() < 0.5:
        values = np.where(np.isnan(values), values, np.round(values)).astype(np.float32)
    going = rng.random(k) < rng.random()
    threshold = float(rng.choice([0.0, 0.3, 0.5, 0.7, 0.9, 1.0, rng.random()]))
    return values, going, threshold, int(rng.integers(1, k + 1))


def decision(values: np.ndarray, threshold: float, min_valid: int) -> str:
    valid = values[np.isfinite(values)].astype(np.float64)
    if len(valid) < min_valid:
        return "unparsed"
    return "accept" if np.float32(valid.sum() / len(valid)) >= np.float32(threshold) else "reject"


@settings(max_examples=100, deadline=None)
@given(seed=CASES)
def test_a_settled_decision_never_changes(seed):
    """100 examples of 100 cases; each with what the open samples turned out to be, and the extremes they could be."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        values, going, threshold, min_valid = random_case(rng)
        seen = np.where(going, np.nan, values).astype(np.float32)
        endings = [
            values,
            *(np.where(going, end, values).astype(np.float32) for end in (0.0, 1.0, np.nan)),
        ]
        decisions = {decision(ending, threshold, min_valid) for ending in endings}
        done = bool(settled(seen[None], going[None], threshold, min_valid)[0])
        if done:
            assert len(decisions) == 1
            drawn = decision(seen, threshold, min_valid)
            assert drawn in decisions, "the score of what was drawn lies on the other side"
        elif going.any() and min_valid <= np.isfinite(seen).sum():
            extremes = {decision(ending, threshold, min_valid) for ending in endings[1:3]}
            assert len(extremes) == 2, "it could have stopped"


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_early_stop_decides_alike(family, threshold):
    verifier = number_verifier(family, likely=["0", "1", "</s>"])
    pairs = [(context, f"{fact} {at}") for context, fact in PAIRS for at in range(10)]
    full = verifier.score_batch(pairs, "sample", k=10, min_valid=3)
    early = verifier.score_batch(pairs, "sample", k=10, min_valid=3, early_stop=True, threshold=threshold)
    scored = np.isfinite(full.scores)
    assert np.array_equal(np.isfinite(early.scores), scored)
    limit = np.float32(threshold)
    assert np.array_equal(early.scores[scored] >= limit, full.scores[scored] >= limit)
    drawn = np.isfinite(early.samples)
    np.testing.assert_array_equal(early.samples[drawn], full.samples[drawn])
    assert any(None in replies for replies in early.replies), "nothing was stopped"
    assert early.usage.computed_tokens < full.usage.computed_tokens


def test_random_numbers_are_keyed_by_seed_prompt_sample_and_step():
    prompt = np.array([1, 2, 3])
    base = _uniforms(prompt, SampleOptions(k=4))
    assert base.shape == (4, 8)
    assert ((base >= 0) & (base < 1)).all()
    assert len(np.unique(base)) == base.size
    np.testing.assert_array_equal(_uniforms(prompt, SampleOptions(k=2, max_new_tokens=5)), base[:2, :5])
    for other in (_uniforms(prompt + 1, SampleOptions(k=4)), _uniforms(prompt, SampleOptions(k=4, seed=1))):
        assert not (other == base).any()


def test_weights_that_stop_being_finite_give_no_score():
    verifier = number_verifier()
    with torch.no_grad():
        verifier.model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(gk.NumericError, match="item 0"):
        verifier.score_batch(PAIRS, "sample")
    for options in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}):
        result = verifier.score_batch(PAIRS, "sample", on_error="report", **options)
        assert set(result.status) == {"unparsed"}
        assert all("not finite" in note for note in result.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"k": 2.0},
        {"k": True},
        {"temperature": -1},
        {"temperature": 1e-40},
        {"temperature": None},
        {"temperature": "1"},
        {"top_p": None},
        {"threshold": "x", "early_stop": True},
        {"early_stop": 1},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_new_tokens": 0},
        {"seed": -1},
        {"seed": 1 << 64},
        {"min_valid": 6},
        {"reply": "words"},
        {"threshold": 0.5},
        {"early_stop": True},
        {"early_stop": True, "threshold": 1.5},
        {"law": "masked"},
        {"samples": 5},
    ],
)
def test_wrong_options_are_input_errors(options):
    with pytest.raises(gk.InputError):
        number_verifier().score_batch(PAIRS, "sample", **options)
