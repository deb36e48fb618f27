"""Labels are read where the model would write them."""

from __future__ import annotations

import numpy as np
import pytest

from gatekern.errors import LabelError
from gatekern.labels import YES_NO, resolve_labels
from gatekern.prompts import PromptEncoder, PromptTemplate
from tests.tinytok import tiny_tokenizer

SIMPLE = PromptTemplate("t/1", "be fair", "C:{context} F:{fact} yes or no?")


def encoder(**options) -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer(**options), SIMPLE)


def test_every_single_token_spelling_counts():
    labels = resolve_labels(encoder(), YES_NO, 1000)
    assert {spelling.strip().lower() for spelling in labels.spellings[0]} == {"yes"}
    assert len(labels.yes) == len(set(labels.yes)) >= 2
    assert labels["no"] == labels.no
    tokenizer = tiny_tokenizer()
    forms = [" yes", " no", "yes", "no", "Yes", "No"]
    single = {form for form in forms if len(tokenizer(form, add_special_tokens=False)["input_ids"]) == 1}
    assert single <= set(labels.spellings[0] + labels.spellings[1])


def test_spellings_extend_the_prompt_by_exactly_one_token():
    enc = encoder()
    labels = resolve_labels(enc, YES_NO, 1000)
    prompt = enc.encode_one("some context", "a fact").tolist()
    for group, spellings in zip(labels.ids, labels.spellings, strict=True):
        for token, spelling in zip(group, spellings, strict=True):
            assert enc.encode_one("some context", "a fact", answer=spelling).tolist() == [*prompt, token]


def test_levels_and_choices_are_groups_like_any_other():
    levels = resolve_labels(encoder(), [str(digit) for digit in range(10)], 1000)
    assert len(levels.ids) == 10
    custom = resolve_labels(encoder(), {"good": ["yes"], "bad": ["no", 300]}, 1000)
    assert custom.names == ("good", "bad")
    assert 300 in custom["bad"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("contradicted", "no"), "no single-token spelling"),
        (("yes",), "at least two"),
        (("yes", "yes"), "at least two different"),
        ({"a": ["yes"], "b": ["yes"]}, "is in 'a' and 'b'"),
        ({"a": ["yes"], "b": [1000]}, "outside the head's 1000 rows"),
        ({"a": ["yes"], "b": [-1]}, "outside"),
        ({"a": ["yes"], "b": []}, "has no words"),
        ("yn", "sequence of words"),
        (None, "sequence of words"),
        (["", "no"], "neither a word"),
        ({"a": ["yes"], "b": [True]}, "neither a word"),
        ([1, 2], "label names are text"),
    ],
)
def test_bad_labels_are_refused_by_name(spec, message):
    with pytest.raises(LabelError, match=message):
        resolve_labels(encoder(), spec, 1000)


def test_ids_beyond_the_tokenizer_but_inside_the_head_are_fine():
    assert 999 in resolve_labels(encoder(), {"a": ["yes"], "b": [999]}, 1000)["b"]


def test_control_tokens_are_never_labels():
    tokenizer = tiny_tokenizer()
    labels = resolve_labels(encoder(), YES_NO, 1000)
    assert not set(labels.yes + labels.no) & set(tokenizer.get_added_vocab().values())


def test_one_word_or_id_may_stand_for_a_list():
    """A string is a word, never its letters."""
    plain = resolve_labels(encoder(), YES_NO, 1000)
    assert resolve_labels(encoder(), {"yes": "yes", "no": "no"}, 1000) == plain
    assert resolve_labels(encoder(), {"yes": "yes", "no": np.int64(300)}, 1000)["no"] == (300,)
