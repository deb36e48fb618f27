"""`score_batch`: alignment, statuses, independence of batch mates, and what each kind of bad input gets."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import gatekern as gk
from gatekern import ops
from gatekern.encoding import _num_visible
from gatekern.prompts import PromptTemplate
from tests.families import tiny_model
from tests.tinytok import MARKERS, SPECIAL, tiny_tokenizer

CONTEXTS = ["Alice lives in Paris with her dog. " * 3, "The library was founded in 1923.", ""]
PAIRS = [(context, f"{name} lives in {city}") for context in CONTEXTS for name in ("Alice", "Bob") for city in "XYZ"]
#: fp32, any packing: the promised bound on a score.
BOUND = 1e-5


def make_verifier(family: str = "llama", dtype: torch.dtype = torch.float32, **options) -> gk.Verifier:
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, vocab_size=len(tokenizer) + 5, max_position_embeddings=2048, dtype=dtype)
    return gk.Verifier(model, tokenizer, **{"min_label_mass": 0.0, **options})


def reference(verifier: gk.Verifier, pairs) -> np.ndarray:
    """Scores from one whole, uncached Hugging Face forward a pair."""
    scores = []
    for context, fact in pairs:
        ids = torch.tensor([verifier.encode(context, fact)])
        with torch.no_grad():
            logits = verifier.model(input_ids=ids, use_cache=False).logits[0, -1].double()
        yes, no = (logits[list(group)].logsumexp(0) for group in (verifier.labels.yes, verifier.labels.no))
        scores.append(torch.sigmoid(yes - no).item())
    return np.array(scores)


def test_scores_equal_one_forward_per_fact(tiny_verifier):
    result = tiny_verifier.score_batch(PAIRS)
    np.testing.assert_allclose(result.scores, reference(tiny_verifier, PAIRS), atol=BOUND)
    assert set(result.status) == {"ok"}
    assert result.path == "packed"
    assert result.prompt_version == "verify-paper/1"
    assert result.samples is None
    assert result.distribution is None
    assert np.ptp(result.scores) > 1e-3, "scores too alike for the comparison to mean anything"


def test_evidence_is_consistent(tiny_verifier):
    result = tiny_verifier.score_batch(PAIRS[:4])
    ids = torch.tensor([tiny_verifier.encode(*PAIRS[0])])
    with torch.no_grad():
        logits = tiny_verifier.model(input_ids=ids).logits[0, -1].double()
    labels = tiny_verifier.labels
    mass = logits.softmax(0)[list(labels.yes + labels.no)].sum().item()
    np.testing.assert_allclose(result.label_mass[0], mass, rtol=1e-4)
    np.testing.assert_allclose(result.yes_logit[0], logits[list(labels.yes)].logsumexp(0).item(), atol=1e-4)
    np.testing.assert_allclose(result.scores, 1 / (1 + np.exp(result.no_logit - result.yes_logit)), rtol=1e-5)
    for array in (result.scores, result.label_mass, result.label_logits):
        assert array.dtype == np.float32


@pytest.mark.parametrize("max_tokens", [None, 64, 17])
def test_a_score_does_not_depend_on_its_batch(max_tokens):
    """Promise (a): alone, shuffled, among duplicates, in other forwards, after other calls."""
    verifier = make_verifier(max_tokens_per_forward=max_tokens)
    alone = np.array([verifier.score_batch([pair]).scores[0] for pair in PAIRS])
    together = verifier.score_batch(PAIRS).scores
    np.testing.assert_allclose(together, alone, atol=BOUND)
    order = np.random.default_rng(0).permutation(len(PAIRS))
    shuffled = verifier.score_batch([PAIRS[at] for at in order]).scores
    assert np.array_equal(shuffled, together[order]), "the same set of pairs in another order is the same computation"
    twice = verifier.score_batch(PAIRS + PAIRS[::-1]).scores
    assert np.array_equal(twice[: len(PAIRS)], twice[len(PAIRS) :][::-1])
    np.testing.assert_allclose(twice[: len(PAIRS)], alone, atol=BOUND)
    long_neighbour = [("hello world " * 60, "a stranger")]
    np.testing.assert_allclose(verifier.score_batch(PAIRS + long_neighbour).scores[:-1], alone, atol=BOUND)


def test_outputs_are_fully_written(tiny_verifier, monkeypatch):
    """GK-016: fresh memory is NaN; no row of any result may be left as it was."""
    expected = tiny_verifier.score_batch(PAIRS).scores
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *size, **options):
        out = new_empty(self, *size, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert np.array_equal(tiny_verifier.score_batch(PAIRS).scores, expected)


def test_sharing_is_counted(tiny_verifier):
    result = tiny_verifier.score_batch(PAIRS + PAIRS)
    naive = sum(len(tiny_verifier.encode(*pair)) for pair in PAIRS) * 2
    assert result.usage.prompt_tokens == naive
    assert result.usage.computed_tokens < naive / 3
    assert result.usage.saved_tokens == naive - result.usage.computed_tokens
    assert result.usage.contexts == 3
    assert result.usage.forwards == 1
    assert set(result.usage.seconds) == {"encode", "plan", "forward", "score"}


def test_no_pairs_make_an_empty_result(tiny_verifier):
    result = tiny_verifier.score_batch([])
    assert len(result) == 0
    assert result.scores.shape == result.label_mass.shape == (0,)
    assert result.label_logits.shape == (0, 2)
    assert result.usage.forwards == 0


BAD = {
    "empty fact": ("context", ""),
    "blank fact": ("context", " \n\t"),
    "number": ("context", 3),
    "none": (None, "fact"),
    "bytes": ("context", b"fact"),
    "string": "not a pair",
    "triple": ("a", "b", "c"),
    "none at all": None,
    "too long": ("hello world " * 2000, "fact"),
    "10 MB": ("x" * 10_000_000, "fact"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_items_are_named_before_any_work(tiny_verifier, name, monkeypatch):
    monkeypatch.setattr(tiny_verifier.backbone, "hidden_rows", lambda *a: pytest.fail("work was done"))
    with pytest.raises(gk.InputError, match=r"item 2:") as caught:
        tiny_verifier.score_batch([PAIRS[0], PAIRS[1], BAD[name], PAIRS[2]])
    assert caught.value.index == 2
    assert len(str(caught.value)) < 300


def test_bad_items_never_cost_the_good_ones(tiny_verifier):
    """Promise (f): one record per input, in order, each with a status; neighbours as without the bad ones."""
    mixed = [item for good, bad in zip(PAIRS, BAD.values(), strict=False) for item in (good, bad)]
    result = tiny_verifier.score_batch(mixed, on_error="report")
    assert len(result) == len(result.status) == len(result.notes) == len(mixed)
    np.testing.assert_allclose(result.scores[::2], tiny_verifier.score_batch(PAIRS[: len(BAD)]).scores, atol=BOUND)
    assert np.isnan(result.scores[1::2]).all()
    assert np.isnan(result.label_mass[1::2]).all()
    expected = ["too_long" if name in ("too long", "10 MB") else "invalid_input" for name in BAD]
    assert [str(status) for status in result.status[1::2]] == expected
    assert all(note for note in result.notes[1::2])


def test_nothing_is_ever_cut():
    """GK-018: one token below, at, and above the limit."""
    tokenizer = tiny_tokenizer()
    probe = make_verifier()
    length = len(probe.encode("hello", "fact"))
    for limit in (length - 1, length, length + 1):
        model = tiny_model("llama", vocab_size=len(tokenizer) + 5, max_position_embeddings=limit)
        verifier = gk.Verifier(model, tokenizer, min_label_mass=0.0)
        if limit >= length:
            assert verifier.score_batch([("hello", "fact")]).status == ("ok",)
            continue
        with pytest.raises(gk.InputError, match=f"{length} tokens, the model reads at most {limit}"):
            verifier.score_batch([("hello", "fact")])


@pytest.mark.parametrize(
    ("text", "clean"), [("a \ud83d x", "a \ufffd x"), ("\ude00", "\ufffd"), ("\ud83d\ude00", "\U0001f600")]
)
def test_lone_surrogates_are_repaired_and_noted(tiny_verifier, text, clean):
    result = tiny_verifier.score_batch([(text, "fact"), ("context", text + "!"), PAIRS[0]])
    expected = tiny_verifier.score_batch([(clean, "fact"), ("context", clean + "!"), PAIRS[0]])
    assert np.array_equal(result.scores, expected.scores)
    assert [bool(note) for note in result.notes] == [True, True, False]
    assert result.status == ("ok",) * 3


@pytest.mark.parametrize(
    "text", ["a\0b", "\x07", "é\u0301\u200d👩\u200d🚀", "\r\n", *SPECIAL, *MARKERS, "{fact}", "%s {0}"]
)
def test_odd_text_is_text(tiny_verifier, text):
    pairs = [(f"context {text}", f"fact {text}"), (text, "fact")]
    result = tiny_verifier.score_batch(pairs)
    assert result.status == ("ok", "ok")
    np.testing.assert_allclose(result.scores, reference(tiny_verifier, pairs), atol=BOUND)


def test_label_mass_near_zero_is_a_status_and_keeps_the_score():
    verifier = make_verifier(min_label_mass=1.0)
    result = verifier.score_batch(PAIRS[:3])
    assert result.status == ("low_label_mass",) * 3
    assert np.isfinite(result.scores).all()
    assert (result.label_mass < 1).all()


def test_weights_that_stop_being_finite_give_no_score(tiny_verifier):
    verifier = make_verifier()
    with torch.no_grad():
        verifier.model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(gk.NumericError, match="item 0: the model's logits are not finite"):
        verifier.score_batch(PAIRS[:2])
    result = verifier.score_batch(PAIRS[:2], on_error="report")
    assert result.status == ("unparsed", "unparsed")
    assert np.isnan(result.scores).all()


def test_label_sets_beyond_yes_and_no():
    verifier = make_verifier(labels=[str(digit) for digit in range(10)])
    result = verifier.score_batch(PAIRS[:3])
    assert result.label_logits.shape == (3, 10)
    assert result.label_names == tuple("0123456789")
    assert result.yes_logit is None
    probabilities = np.exp(result.label_logits - np.logaddexp.reduce(result.label_logits, axis=1, keepdims=True))
    np.testing.assert_allclose(result.scores, probabilities[:, 0], rtol=1e-5)


def test_a_prompt_of_your_own():
    mine = PromptTemplate("mine/7", "", "{fact} ?\n{context}\nyes or no")
    verifier = make_verifier(prompt=mine)
    result = verifier.score_batch(PAIRS)
    assert result.prompt_version == "mine/7"
    np.testing.assert_allclose(result.scores, reference(verifier, PAIRS), atol=BOUND)


@pytest.mark.parametrize("layout", ["paper", "fact_last"])
def test_layouts(layout):
    verifier = make_verifier(layout=layout)
    np.testing.assert_allclose(verifier.score_batch(PAIRS).scores, reference(verifier, PAIRS), atol=BOUND)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "gemma3_text", "gpt2"])
def test_other_paths_through_the_same_call(family):
    verifier = make_verifier(family)
    result = verifier.score_batch(PAIRS)
    assert result.path == {"qwen3_next": "branched", "jamba": "full"}.get(family, "packed")
    np.testing.assert_allclose(result.scores, reference(verifier, PAIRS), atol=BOUND)


def test_threads_take_turns(tiny_verifier):
    expected = tiny_verifier.score_batch(PAIRS).scores
    results: list[np.ndarray] = [np.zeros(0)] * 6

    def work(at: int) -> None:
        results[at] = tiny_verifier.score_batch(PAIRS).scores

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(scores, expected) for scores in results)


def test_an_explicit_backend_runs_or_raises():
    """Promise (e)."""
    native = [state.available for state in ops.backends() if state.name == "native"]
    backends = ["torch", "auto", *(["native"] if native == [True] else [])]
    scores = [make_verifier(backend=backend).score_batch(PAIRS[:3]) for backend in backends]
    for other in scores[2:]:
        assert other.backend.startswith("native-")
        np.testing.assert_allclose(other.scores, scores[0].scores, atol=1e-6)
    np.testing.assert_allclose(scores[0].scores, scores[1].scores, atol=1e-6)
    assert scores[0].backend == "torch"
    if not torch.cuda.is_available():
        with pytest.raises(gk.BackendError, match="CUDA"):
            make_verifier(backend="triton")
    with pytest.raises(gk.BackendError, match="unknown backend 'cuda'"):
        make_verifier(backend="cuda")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda v: v.score_batch(PAIRS, "guess"),
        lambda v: v.score_batch(PAIRS, ["exact"]),
        lambda v: v.score_batch(PAIRS, k=5),
        lambda v: v.score_batch(PAIRS, on_error="ignore"),
        lambda v: v.score_batch("context"),
        lambda v: v.score_batch(None),
        lambda v: v.encode("context", ""),
        lambda v: gk.Verifier(v.model, v.tokenizer, layout="sideways"),
        lambda v: gk.Verifier(v.model, v.tokenizer, prompt="{context} {fact}"),
        lambda v: gk.Verifier(v.model, v.tokenizer, rating_prompt="rate.toml"),
        lambda v: gk.Verifier(v.model, v.tokenizer, min_label_mass=2.0),
        lambda v: gk.Verifier(v.model, v.tokenizer, max_tokens_per_forward=0),
        lambda v: gk.Verifier(v.model, v.tokenizer, max_tokens_per_forward=64.5),
        lambda v: gk.Verifier(v.model, None),
        lambda v: gk.Verifier("model", v.tokenizer),
        lambda v: gk.Verifier.from_pretrained(".", device="cuda:7"),
        lambda v: gk.Verifier.from_pretrained("no/such/model.gguf"),
        lambda v: gk.Verifier.from_pretrained(".", dtype="int3"),
        lambda v: gk.Verifier.from_pretrained(".", device="abacus"),
    ],
)
def test_wrong_arguments_are_input_errors(tiny_verifier, wrong):
    with pytest.raises(gk.InputError):
        wrong(tiny_verifier)


def test_the_function_is_the_method(tiny_verifier):
    assert np.array_equal(gk.score_batch(tiny_verifier, PAIRS).scores, tiny_verifier.score_batch(PAIRS).scores)


def test_models_load_from_a_folder(tmp_path, tiny_verifier):
    tiny_verifier.model.save_pretrained(tmp_path)
    tiny_verifier.tokenizer.save_pretrained(tmp_path)
    loaded = gk.Verifier.from_pretrained(tmp_path, min_label_mass=0.0)
    np.testing.assert_allclose(loaded.score_batch(PAIRS).scores, tiny_verifier.score_batch(PAIRS).scores, atol=BOUND)
    half = gk.Verifier.from_pretrained(tmp_path, dtype="bfloat16", min_label_mass=0.0)
    assert half.backbone.dtype == torch.bfloat16
    assert np.isfinite(half.score_batch(PAIRS).scores).all()


def test_two_verifiers_of_one_model_share_its_lock(tiny_verifier):
    """Their attention is switched on the same configuration: forwards must not interleave, nor loading with scoring."""
    model, tokenizer = tiny_verifier.model, tiny_verifier.tokenizer
    verifiers = [gk.Verifier(model, tokenizer, layout=layout, min_label_mass=0.0) for layout in ("paper", "fact_last")]
    expected = [verifier.score_batch(PAIRS).scores for verifier in verifiers]
    wrong: list[object] = []

    def work(at: int) -> None:
        try:
            for _ in range(15):
                if not np.array_equal(verifiers[at].score_batch(PAIRS).scores, expected[at]):
                    wrong.append(at)
            gk.Verifier(model, tokenizer)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(at % 2,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert model.config._attn_implementation != "gatekern"


def test_attention_that_is_changed_behind_our_back_is_an_error(tiny_verifier, monkeypatch):
    verifier = make_verifier()
    layer = verifier.model.model.layers[2].self_attn
    monkeypatch.setattr(layer, "config", copy.deepcopy(layer.config))
    layer.config._attn_implementation = "sdpa"

    class Stubborn(type(layer.config)):
        _attn_implementation = property(lambda self: "sdpa", lambda self, value: None)

    layer.config.__class__ = Stubborn
    with pytest.raises(gk.BackendError, match="some layers ran with another attention"):
        verifier.score_batch(PAIRS)


def test_a_character_that_the_tokenizer_lacks_costs_nothing():
    """WordPiece and Unigram tokenizers answer it with <unk>, which is no control token."""
    vocab = {word: at for at, word in enumerate(["<unk>", "<s>", "yes", "no", "Yes", "No", *"abcdefghij.:?"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    verifier = gk.Verifier(tiny_model("llama"), tokenizer, min_label_mass=0.0)
    pairs = [("a b", "c"), ("a \U0001f600 b", "<unk>"), ("a", "<s> d"), ("e", "f")]
    result = verifier.score_batch(pairs, on_error="report")
    assert result.status == ("ok",) * 4
    np.testing.assert_allclose(result.scores, reference(verifier, pairs), atol=BOUND)


def test_ids_without_an_embedding_are_a_status():
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    tokenizer.add_tokens(["zebra"])
    verifier = gk.Verifier(model, tokenizer, min_label_mass=0.0)
    result = verifier.score_batch([("a", "b"), ("a", "zebra"), ("c", "d")], on_error="report")
    assert result.status == ("ok", "invalid_input", "ok")
    assert "embeddings" in result.notes[1]


def test_a_model_that_changes_after_it_was_wrapped_is_an_error():
    verifier = make_verifier()
    verifier.model.train()
    with pytest.raises(gk.InputError, match=r"model\.eval"):
        verifier.score_batch(PAIRS)
    verifier.model.eval()
    verifier.model.set_output_embeddings(torch.nn.Linear(32, len(verifier.tokenizer) + 5, bias=False))
    with pytest.raises(gk.InputError, match="head was replaced"):
        verifier.score_batch(PAIRS)


def test_mass_that_is_not_finite_is_no_score():
    verifier = make_verifier()
    with torch.no_grad():
        verifier.model.lm_head.weight[-1] = torch.nan  # an unused row
    result = verifier.score_batch(PAIRS[:2], on_error="report")
    assert result.status == ("unparsed",) * 2
    for array in (result.scores, result.label_mass, result.label_logits):
        assert np.isnan(array).all()


def test_white_space_does_not_make_a_prompt_too_long():
    """Tokenizers may drop it: the check before encoding counts visible characters."""
    assert _num_visible("a" + " " * 10_000 + "b\n") == 2


def test_autocast_around_a_call_changes_nothing(tiny_verifier):
    expected = tiny_verifier.score_batch(PAIRS).scores
    with torch.autocast("cpu", torch.bfloat16):
        assert np.array_equal(tiny_verifier.score_batch(PAIRS).scores, expected)


def test_compiled_models_are_unwrapped(tiny_verifier):
    compiled = gk.Verifier(torch.compile(tiny_verifier.model), tiny_verifier.tokenizer, min_label_mass=0.0)
    assert np.array_equal(compiled.score_batch(PAIRS).scores, tiny_verifier.score_batch(PAIRS).scores)


@pytest.mark.parametrize("family", ["jamba", "lfm2", "bloom"])
def test_equal_pairs_are_computed_once_on_every_path(family):
    verifier = make_verifier(family)
    once, often = verifier.score_batch(PAIRS), verifier.score_batch(PAIRS * 4)
    assert often.usage.computed_tokens == once.usage.computed_tokens
    assert np.array_equal(often.scores, np.tile(once.scores, 4))


def test_the_memory_bound_holds_on_the_branched_path():
    verifier = make_verifier("lfm2", max_tokens_per_forward=32)
    sizes = []
    verifier.backbone.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    pairs = [("hello world " * 40, f"fact {at}") for at in range(5)]
    result = verifier.score_batch(pairs)
    assert max(sizes) <= 32
    np.testing.assert_allclose(result.scores, reference(verifier, pairs), atol=BOUND)
