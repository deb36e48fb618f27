"""The law of the replies: against one forward for every reply, and against itself under every packing."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import gatekern as gk
from gatekern import ops
from gatekern.ops import dispatch
from gatekern.ops.parse_scores import parse_texts
from gatekern.ops.score_grammar import ParseStatus
from gatekern.reply_table import INVALID, OPEN
from tests.families import tiny_model
from tests.numbers import PAIRS, number_verifier
from tests.tinytok import CHATML, SPECIAL, tiny_tokenizer

BOUND = 1e-5


@cache
def reading(text: str, *, complete: bool = False) -> tuple[str, int | None]:
    """The start of a reply by its whole text: ("open", None), ("score", hundredths) or ("none", None)."""
    number = text.lstrip()
    if not complete and re.fullmatch(r"|\.|[01]|[01][.,]|0?[.,]\d|1[.,]0", number) and number[:1] != ",":
        return "open", None
    settled = re.match(r"0?[.,]\d\d|1[.,]\d\d", number) or re.match(r"[01]\.\d(?=\s*[.,:;\u2026]+$)", number)
    if settled and number[:1] != ",":
        number, complete = settled.group(), True
    parsed = parse_texts([number], complete=complete)
    if parsed.status[0] != ParseStatus.OK:
        return "none", None
    return "score", int(parsed.values[0].item() * 100 + 1e-4)


def truth(verifier: gk.Verifier, pair, temperature: float = 1.0) -> np.ndarray:
    """Probability of each value by one whole forward for every spelled beginning, float64 [101]."""
    encoder, values = verifier._encoder("rate"), np.zeros(101)
    prompt = encoder.encode_one(*pair)
    spelled = {
        tuple(encoder.encode_one(*pair, answer=encoder.answer_lead + text)[len(prompt) :].tolist())
        for text in ("0", "1", "0.", "1.", "1.0", *(f"0.{digit}" for digit in range(10)))
    }
    beginnings = {path[:at] for path in spelled for at in range(len(path) + 1)}
    texts = encoder.token_texts(verifier.backbone.head.vocab_rows)
    reach = {(): 1.0}
    for path in sorted(beginnings, key=len):
        ids = torch.tensor([[*prompt.tolist(), *path]])
        with torch.no_grad():
            logits = verifier.model(input_ids=ids, use_cache=False).logits[0, -1].double()
        probabilities = (logits / temperature).softmax(0).numpy()
        so_far = "".join(texts[token] for token in path)
        for token, probability in enumerate(probabilities):
            if (*path, token) in beginnings:
                reach[(*path, token)] = reach[path] * probability
            elif texts[token] is None:
                kind, value = reading(so_far, complete=True)
                if kind == "score":
                    values[value] += reach[path] * probability
            elif texts[token]:
                kind, value = reading(so_far + texts[token])
                if kind == "score":
                    values[value] += reach[path] * probability
    return values


def tokenizer_with_long_digits() -> PreTrainedTokenizerFast:
    """Up to three digits in a token, as in Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [" ".join(f"{number:02d}" for number in range(100)), "yes no Yes No 857 100 500 125", "0.85 0.5 1.0"] * 8
    tokenizer.train_from_iterator(text, trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    found.chat_template = CHATML
    assert len(found.encode("85")) == len(found.encode("857")) == 1
    return found


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), tokenizer_with_long_digits()], ids=["digits", "three digits"])
def test_every_state_and_token_reads_like_the_text(tokenizer):
    verifier = number_verifier(tokenizer=tokenizer)
    texts = verifier._encoder("rate").token_texts(verifier.backbone.head.vocab_rows)
    found = verifier._replies.next_state
    seen = set()
    for state, before in enumerate(OPEN):
        for token, text in enumerate(texts):
            kind, value = reading(before + (text or ""), complete=text is None) if text != "" else ("none", None)
            after = int(found[state, token])
            seen.add(kind)
            if kind == "score":
                assert after == len(OPEN) + value, (before, text)
            elif kind == "none":
                assert after == INVALID, (before, text)
            else:
                assert after < len(OPEN), (before, text)
    assert seen == {"open", "score", "none"}


@pytest.mark.parametrize(
    ("after", "settles"),
    [(":", True), (",", True), (".", True), ("\n", True), ("%", False), ("/", False)],
)
def test_every_value_is_read_alike(after, settles):
    """A score of 1.0 is no easier to give than one of 0.0 or 0.5, whatever the model says next."""
    verifier = number_verifier(tokenizer=tokenizer_with_long_digits())
    texts = verifier._encoder("rate").token_texts(verifier.backbone.head.vocab_rows)
    states = verifier._replies.next_state[:, texts.index(after)]
    for value in range(0, 101, 10):
        expected = len(OPEN) + value if settles else INVALID
        assert states[OPEN.index(f"{value / 100:.1f}")] == expected
    assert verifier._replies.next_state[OPEN.index("1.0"), texts.index("5")] == INVALID


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "lfm2", "jamba"])
def test_equals_one_forward_for_every_reply(family):
    verifier = number_verifier(family)
    result = verifier.score_batch(PAIRS, "exact")
    expected = np.array([truth(verifier, pair) for pair in PAIRS])
    np.testing.assert_allclose(result.distribution.probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(result.label_mass, expected.sum(axis=1), atol=1e-5)
    mean = expected @ np.arange(101) / 100 / expected.sum(axis=1)
    np.testing.assert_allclose(result.scores, mean, atol=BOUND)
    np.testing.assert_allclose(result.distribution.mean, mean, atol=BOUND)
    variance = (expected * (np.arange(101) / 100 - mean[:, None]) ** 2).sum(axis=1) / expected.sum(axis=1)
    np.testing.assert_allclose(result.distribution.variance, variance, atol=BOUND)
    assert result.label_mass.min() > 0.01
    assert (expected > 1e-4).sum(axis=1).min() > 15, "too few replies for the comparison to mean anything"


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature(temperature):
    verifier = number_verifier()
    result = verifier.score_batch(PAIRS[:2], "exact", temperature=temperature)
    expected = np.array([truth(verifier, pair, temperature) for pair in PAIRS[:2]])
    np.testing.assert_allclose(result.distribution.probabilities, expected, atol=1e-6)


@pytest.mark.parametrize(
    "tokenizer",
    [tokenizer_with_long_digits(), tiny_tokenizer(None), tiny_tokenizer(None, bos=True)],
    ids=["three digits", "plain", "plain with BOS"],
)
def test_other_spellings(tokenizer):
    """Several digits in a token; a space before the answer of a plain prompt."""
    verifier = number_verifier(tokenizer=tokenizer, likely=["0", ".", "Ġ"])
    result = verifier.score_batch(PAIRS[:3], "exact")
    expected = np.array([truth(verifier, pair) for pair in PAIRS[:3]])
    np.testing.assert_allclose(result.distribution.probabilities, expected, atol=1e-6)
    assert result.label_mass.min() > 1e-4


@pytest.mark.parametrize("law", ["unconstrained", "masked"])
def test_probabilities_sum_to_what_is_promised(law):
    result = number_verifier().score_batch(PAIRS, "exact", law=law)
    total = result.distribution.probabilities.sum(axis=1)
    np.testing.assert_allclose(total, result.label_mass if law == "unconstrained" else 1.0, rtol=1e-5)
    assert ((result.scores >= 0) & (result.scores <= 1)).all()


def test_the_laws_differ_where_beginnings_do_not_end_as_scores():
    verifier = number_verifier()
    free, masked = (verifier.score_batch(PAIRS, "exact", law=law) for law in ("unconstrained", "masked"))
    np.testing.assert_allclose(free.label_mass, masked.label_mass, rtol=1e-6)
    assert np.abs(free.scores - masked.scores).max() > 1e-3


@pytest.mark.parametrize("max_tokens", [None, 64, 5])
def test_a_distribution_does_not_depend_on_its_batch(max_tokens):
    verifier = number_verifier(max_tokens_per_forward=max_tokens)
    together = verifier.score_batch(PAIRS * 2, "exact").distribution.probabilities
    alone = [verifier.score_batch([pair], "exact").distribution.probabilities[0] for pair in PAIRS]
    np.testing.assert_allclose(together[: len(PAIRS)], alone, atol=BOUND)
    assert np.array_equal(together[: len(PAIRS)], together[len(PAIRS) :])


def test_a_fact_costs_its_trie_and_no_further_forward():
    verifier = number_verifier()
    exact = verifier.score_batch(PAIRS, "exact")
    plain = gk.Verifier(verifier.model, verifier.tokenizer, prompt=verifier._templates["rate"]).score_batch(PAIRS)
    assert exact.usage.computed_tokens == plain.usage.computed_tokens + 15 * len(PAIRS)
    assert exact.usage.forwards == plain.usage.forwards == 1


def test_result_fields():
    result = number_verifier().score_batch(PAIRS, "exact")
    assert result.label_names == ()
    assert result.label_logits is result.yes_logit is result.samples is result.replies is None
    assert result.decided_by == ("exact",) * len(PAIRS)
    assert result.prompt_version == "rate-paper/1"
    assert result.backend == "torch"
    for array in (result.scores, result.label_mass, result.distribution.probabilities, result.distribution.values):
        assert array.dtype == np.float32


@pytest.mark.parametrize("mode", ["exact", "sample", "adaptive"])
def test_backends(mode):
    """An explicit backend runs, with PyTorch where it has no form of its own, or raises."""
    options = {"threshold": 0.5} if mode == "adaptive" else {}
    scores = [number_verifier(backend=backend).score_batch(PAIRS, mode, **options) for backend in ("torch", "auto")]
    np.testing.assert_allclose(scores[0].scores, scores[1].scores, atol=1e-5)
    if ops.native.why_not() is None:
        native = number_verifier(backend="native").score_batch(PAIRS, mode, **options)
        np.testing.assert_allclose(native.scores, scores[0].scores, atol=1e-5)
        assert native.backend.endswith("torch")


def test_an_operator_without_a_form_of_a_backend_runs_on_torch():
    assert dispatch.with_form("class_lse", "triton") == "torch"
    assert dispatch.with_form("vocab_lse", "native") == "torch"
    assert dispatch.with_form("vocab_lse", "triton") == "triton"
    verifier = number_verifier()
    verifier._backend = verifier.ops_backend = "triton"  # as on a GPU
    names = [verifier._backend_of(mode) for mode in ("logprob", "exact", "sample", "adaptive")]
    assert names == ["triton", "torch", "torch", "triton+torch"]


def test_low_mass_is_a_status_and_keeps_the_score():
    result = number_verifier(min_label_mass=1.0).score_batch(PAIRS[:2], "exact")
    assert result.status == ("low_label_mass",) * 2
    assert np.isfinite(result.scores).all()


def test_weights_that_stop_being_finite_give_no_score():
    verifier = number_verifier()
    with torch.no_grad():
        verifier.model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(gk.NumericError, match="item 0"):
        verifier.score_batch(PAIRS, "exact")
    result = verifier.score_batch(PAIRS, "exact", on_error="report")
    assert set(result.status) == {"unparsed"}
    assert np.isnan(result.scores).all()
    assert np.isnan(result.distribution.probabilities).all()


def test_the_answer_needs_room():
    """The trie counts towards the model's positions: one token below, and at the limit."""
    verifier = number_verifier()
    length = len(verifier.encode(*PAIRS[0], mode="exact"))
    for limit, status in ((length + 2, "too_long"), (length + 3, "ok")):
        verifier.backbone.max_prompt_tokens = limit
        assert verifier.score_batch(PAIRS[:1], "exact", on_error="report").status == (status,)
    verifier.backbone.max_prompt_tokens = length + 2
    with pytest.raises(
        gk.InputError, match=rf"{length} tokens and 3 of the answer, the model reads at most {length + 2}"
    ):
        verifier.score_batch(PAIRS[:1], "exact")


def test_a_tokenizer_that_cannot_spell_scores_is_refused():
    """Tokens that read otherwise than they are spelled (WordPiece), or lack a digit: no silently wrong law."""
    words = ["[UNK]", "yes", "no", "Yes", "No", ".", *"01235", *"abcdefghij:?"]
    for digits in ("", "46789"):
        vocab = {word: at for at, word in enumerate([*words, *digits])}
        backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
        verifier = gk.Verifier(tiny_model("llama"), tokenizer, min_label_mass=0.0)
        assert verifier.score_batch([("a b", "c")]).status == ("ok",)
        for mode in ("exact", "sample"):
            with pytest.raises(gk.LabelError, match="cannot spell scores"):
                verifier.score_batch([("a b", "c")], mode)


def test_the_masked_law_is_there_however_unlikely_a_score_is():
    verifier = number_verifier(likely=["0", "7"], other=-9.0)
    head = verifier.model.lm_head
    with torch.no_grad():
        head.bias[verifier.tokenizer.get_vocab()["a"]] = 10.0
    result = verifier.score_batch(PAIRS[:2], "exact", law="masked", temperature=0.05)
    np.testing.assert_allclose(result.distribution.probabilities.sum(axis=1), 1.0, rtol=1e-5)
    assert result.label_mass.max() < 1e-20


@pytest.mark.parametrize(
    "options",
    [
        {"law": "free"},
        {"law": None},
        *({"temperature": value} for value in (0.0, 1e-40, float("nan"), float("inf"), None, "1", True)),
        {"k": 5},
        {"threshold": 0.5},
    ],
)
def test_wrong_options_are_input_errors(options):
    with pytest.raises(gk.InputError):
        number_verifier().score_batch(PAIRS, "exact", **options)
