"""Replies to scores: a table of cases, a slow parser of the same grammar, and all forms against each other."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gatekern
from gatekern.errors import BackendError, InputError
from gatekern.ops import ParseStatus, native, parse_scores, parse_texts, token_table
from gatekern.ops.score_automaton import tables
from gatekern.ops.score_characters import classes_of
from tests.ops.slow_parser import slow_parse

NO_NUMBER, AMBIGUOUS, OUT_OF_RANGE = ParseStatus.NO_NUMBER, ParseStatus.AMBIGUOUS, ParseStatus.OUT_OF_RANGE
MALFORMED, INCOMPLETE = ParseStatus.MALFORMED, ParseStatus.INCOMPLETE

REPLIES = [
    ("0.8", 0.8),
    (".8", 0.8),
    ("0,8", 0.8),
    ("8e-1", 0.8),
    ("80%", MALFORMED),
    ("0.8/1", 0.8),
    ("Score: 0.85", 0.85),
    ("1", 1.0),
    ("1.0.", 1.0),
    ("1.", 1.0),
    ("0.85 because 3 of 4", 0.85),
    ("between 0.2 and 0.4", AMBIGUOUS),
    ("-0.1", OUT_OF_RANGE),
    ("1.7", OUT_OF_RANGE),
    ("nan", NO_NUMBER),
    ("inf", NO_NUMBER),
    ("1_0", MALFORMED),
    ("\u0660\u066b\u0668", MALFORMED),
    ("\uff10.\uff18", MALFORMED),
    ("<think>0.2 or so</think>\n0.7", 0.7),
    ("maybe 0.3</think>0.6", 0.6),
    ("<think> 0.3", NO_NUMBER),
    ("85.5", OUT_OF_RANGE),
    ("2.0", OUT_OF_RANGE),
    ("5", OUT_OF_RANGE),
    ("", NO_NUMBER),
    ("I cannot judge this", NO_NUMBER),
    ("N/A", NO_NUMBER),
    ("Score:", NO_NUMBER),
    ("2024-05-06", MALFORMED),
    ("1/2/2024", MALFORMED),
    ("0.8.5", MALFORMED),
    ("v1", MALFORMED),
    ("0.8x", MALFORMED),
    ("0.8\xb2", MALFORMED),
    ("3kg", MALFORMED),
    ("**Score:** 0.85", 0.85),
    ('{"score": 0.85}', 0.85),
    ("score of 0.8", 0.8),
    ("<score>0.8</score>", 0.8),
    ("```\n0.8\n```", 0.8),
    ('```json\n{"score": 0.7}\n```', 0.7),
    ("0.8\u2026", 0.8),
    ("0.8\u3002", 0.8),
    ('"0.8"', 0.8),
    ("'0.8'", 0.8),
    ("_0.8_", 0.8),
    ("\u201c0.8\u201d", 0.8),
    ("There are 3 claims, 2 hold. Score: 0.7", 0.7),
    ("2 of 10 words differ\n0.9", 0.9),
    ("Score: 8", OUT_OF_RANGE),
    ("Score (0 = no, 1 = yes): 0.7", 0.7),
    ("0.0 = no, 0.5 = in part, 1.0 = yes. Score = 0.9", 0.9),
    ("0.7 = good", NO_NUMBER),
    ("Score: 0.2-0.4 = low; 0.6", 0.6),
    ("Score (0.0-1.0): 0.7", 0.7),
    ("On a scale of 0 to 1 I say 0.6", 0.6),
    ("0.7-0.8", AMBIGUOUS),
    ("0.7 to 0.8", AMBIGUOUS),
    ("0.3 or 0.5", AMBIGUOUS),
    ("0.7 \u2013 0.8", AMBIGUOUS),
    ("0.8/1.0", 0.8),
    ("8/10", 0.8),
    ("8 / 10", 0.8),
    ("8 out of 10", 0.8),
    ("85/100", 0.85),
    ("4/5", 0.8),
    ("3/4", MALFORMED),
    ("3 of 4", MALFORMED),
    ("12/10", OUT_OF_RANGE),
    ("0.5%", MALFORMED),
    ("80 %", MALFORMED),
    ("80 percent", MALFORMED),
    ("1,000", OUT_OF_RANGE),
    ("0,85", 0.85),
    ("- 0.8", 0.8),
    ("1. 0.8", 0.8),
    ("1. First claim holds.\n2. Second does not.\n0.4", 0.4),
    ("1. The claim holds", MALFORMED),
    ("There is 1 claim", MALFORMED),
    ("\u22120.1", OUT_OF_RANGE),
    ("0.80000000000000000000001", 0.8),
    ("00000.8", 0.8),
    ("1.00000000000000000000001", OUT_OF_RANGE),
    ("0.8 0.8", 0.8),
    ("0.8 0.9", AMBIGUOUS),
    ("0.8, 0.80 and 4/5", AMBIGUOUS),
    ("0.8, 4/5", 0.8),
    ("Score: 0.2\nScore: 0.9", AMBIGUOUS),
    ("Score: 0.9\n... as I said, score: 0.90", 0.9),
    ('{"score": 0.9, "confidence": 0.7}', 0.9),
    ("Rating: 0.2\nConfidence: 0.9", 0.2),
    ("Verdict: Not supported\nScore: 0.1\nConfidence: 1.0", 0.1),
    ('{"supported": false, "score": 0.2, "evidence_support": 0.9}', 0.2),
    ("Support score: 0.8\nConfidence: 0.6", 0.8),
    ("Final score: 0.8\nInitial score: 0.4", AMBIGUOUS),
    ("Score: 0.7. A score of 1.0 would need a quote.", 0.7),
    ("A score of 1.0 would need a quote, so 0.7.", AMBIGUOUS),
    ("Score: 1.0. This would score 0.0 if the date were 1978.", AMBIGUOUS),
    ("0.0 means no support, 1.0 full support. I choose 0.8.", AMBIGUOUS),
    ("Confidence: 0.9", 0.9),
    ("Score [0, 1]: 0.7", 0.7),
    ("[0,1]", NO_NUMBER),
    ("Score: [0,1] 0.3", 0.3),
    ("< 0.5", AMBIGUOUS),
    ("Score: > 0.8", AMBIGUOUS),
    ("Score -> 0.8", 0.8),
    ("> 0.8", 0.8),
    ("Score: 0.8 (0.9 before)", 0.8),
    ("Answer:\n1. The first", MALFORMED),
    ("Answer:\n1\n", 1.0),
    ("Answer: 1. The first", 1.0),
    ("1e0", 1.0),
    ("1E-2", 0.01),
    ("0.8e", MALFORMED),
    ("e5", MALFORMED),
    ("0:30", MALFORMED),
    ("1'000", MALFORMED),
    ("0.8-", 0.8),
    ("0.8 or so", 0.8),
    ("0.8 - good", 0.8),
    ("0.8 out loud", 0.8),
    ("0.8 percentage", MALFORMED),
    ("\ud800 0.8", 0.8),
    ("0.8\ud800", MALFORMED),
    ("+0.8", 0.8),
    ("0.5+0.3", AMBIGUOUS),
    ("0.9/1 - 1/1", AMBIGUOUS),
    ("Rating: 4 out of 5", 0.8),
    ("confidence_score: 0.8", 0.8),
    ("Score: 0.8/", 0.8),
    ("8/-10", AMBIGUOUS),
    ("0", 0.0),
    ("-0", OUT_OF_RANGE),
    ("0.0", 0.0),
    ("100%", MALFORMED),
    ("0/10", 0.0),
    ("5/5", 1.0),
    ("0.25/5", 0.05),
]
PERCENTAGES = [
    ("80%", 0.8),
    ("80 %", 0.8),
    ("80 percent", 0.8),
    ("0.5%", 0.005),
    ("100%", 1.0),
    ("120%", OUT_OF_RANGE),
    ("70%-80%", AMBIGUOUS),
    ("80%/100", MALFORMED),
    ("0%", 0.0),
    ("-5%", OUT_OF_RANGE),
    ("80% sure", 0.8),
    ("5.%", 0.05),
    ("12.5%", 0.125),
]
CUT = [
    ("0.8", INCOMPLETE),
    ("0.", INCOMPLETE),
    ("0.8 ", 0.8),
    ("1 ", 1.0),
    ("1", INCOMPLETE),
    ("0.8 out", INCOMPLETE),
    ("0.8 of", INCOMPLETE),
    ("0.8 to", INCOMPLETE),
    ("0.8/", INCOMPLETE),
    ("0.8 -", INCOMPLETE),
    ("-", INCOMPLETE),
    ("8e", INCOMPLETE),
    ("8e-", INCOMPLETE),
    ("0.8 because", 0.8),
    ("0.8\n", 0.8),
    ("no num", NO_NUMBER),
    ("<think>", INCOMPLETE),
    ("0.8 </thi", INCOMPLETE),
    ("Score: 0.8 b", 0.8),
    ("0.8x", MALFORMED),
    ("0.8)", 0.8),
    (".", INCOMPLETE),
]
# What replies are made of, and what could be mistaken for it.
FRAGMENTS = (
    *("0", "1", "5", "8", "10", "100", "0.8", "0.80", ".8", "1.0", "1.", "0.0", "0.85", "0,8", "1,000", "0,85", "8e-1"),
    *("1e", "2E+1", "-0.1", "\u22120.5", "+0.3", "1.7", "85", "2024", "v1", "x", "3kg", "1_0", "\u00bd", "0.8\u00b2"),
    *("\u0668", "0.8x", "0-1", "0 to 1", "4/5", "8/10"),
    *(
        " ",
        " ",
        "  ",
        "\n",
        "\n",
        "-",
        "\u2013",
        " - ",
        "/",
        ".",
        ",",
        ":",
        "'",
        "_",
        "*",
        "**",
        '"',
        "(",
        ")",
        "[",
        "]",
    ),
    *("{", "}", "%", "=", "<", ">", "\u2265", "+", "\u2026", "\u3002", "!", "?", "#"),
    *(" to ", " or ", "and ", " and ", " of ", " out of ", " out ", "to", "percent ", " percent", "percentage "),
    *(
        "Score",
        "score",
        "Score: ",
        "rating ",
        "confidence",
        "is ",
        "of",
        "as ",
        "Answer: ",
        "support",
        "the ",
        "claim ",
    ),
    *("because ", "between ", "\u5206", "\u00e9", "<think>", "</think>", "</THINK>", "<th", "<score>", "</score>"),
)
texts_of_fragments = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=14).map("".join)


@pytest.fixture(params=["torch", "native"])
def form(request) -> str:
    if request.param == "native" and (reason := native.why_not()):
        pytest.skip(reason)
    return request.param


FORMS = ["torch"] if native.why_not() else ["torch", "native"]


def judge(cases, result) -> None:
    for (text, expected), value, code in zip(cases, result.values.tolist(), result.status.tolist(), strict=True):
        if isinstance(expected, float):
            assert (ParseStatus(code), value) == (ParseStatus.OK, float(np.float32(expected))), text
        else:
            assert ParseStatus(code) == expected, text
            assert math.isnan(value), text


def same(a, b) -> bool:
    return torch.equal(a.status, b.status) and torch.equal(a.values.view(torch.int32), b.values.view(torch.int32))


def test_replies(form):
    judge(REPLIES, parse_texts([text for text, _ in REPLIES], backend=form))


def test_percentages_where_they_are_allowed(form):
    judge(PERCENTAGES, parse_texts([text for text, _ in PERCENTAGES], percent=True, backend=form))


def test_cut_replies(form):
    judge(CUT, parse_texts([text for text, _ in CUT], complete=False, backend=form))


FORMATS = (
    "{}",
    " {} ",
    "{}\n",
    "{}.",
    "+{}",
    "**{}**",
    "Score: {}",
    '{{"score": {}}}',
    "score of {}",
    "<score>{}</score>",
    "I give it {}, because 3 of 4 hold.",
    "```\n{}\n```",
    "{}/1",
    "<think>0.123</think>{}",
    "_{}_",
    "Rating ({})",
    "On a scale of 0 to 1 I say {:.7f}",
    "2 of 10 differ\n{}",
    "- {}",
    "> {}",
)


@settings(deadline=None, max_examples=200)
@given(number=st.integers(0, 10**6), decimals=st.integers(1, 6))
def test_every_decimal_in_every_format_is_the_nearest_float32(number, decimals):
    value = Fraction(min(number, 10**decimals), 10**decimals)
    digits = f"{float(value):.{decimals}f}"
    texts = [text.format(digits) if "{}" in text else text.format(float(value)) for text in FORMATS]
    texts += [
        f"{float(value) * 10**decimals:.0f}e-{decimals}",
        f"{float(value * 100):.6f} out of 100",
        digits + "0" * 30,
    ]
    if decimals != 3:
        texts.append(digits.replace(".", ","))
    if value < 1:
        texts.append(digits[1:])
    for backend in FORMS:
        values, status = parse_texts(texts, backend=backend)
        assert status.tolist() == [0] * len(texts)
        assert values.tolist() == [float(np.float32(float(value)))] * len(texts)
        percentage = parse_texts([f"{float(value * 100):.6f}%"], percent=True, backend=backend)
        assert percentage.values.item() == float(np.float32(float(value)))


@settings(deadline=None, max_examples=200)
@given(digits=st.text("0123456789", min_size=1, max_size=60), zeros=st.integers(0, 60))
def test_long_numbers_neither_overflow_nor_round_twice_visibly(digits, zeros):
    small, large = "0." + "0" * zeros + digits, "0" * zeros + digits
    expected = float(np.float32(float(Fraction(small))))
    for backend in FORMS:
        values, status = parse_texts([small, large + ".", large + ".0", f"1.{'0' * zeros}{digits}"], backend=backend)
        assert status[0] == 0
        assert values[0].item() == expected
        fits = Fraction(large) <= 1
        assert status[1:3].tolist() == [0 if fits else OUT_OF_RANGE] * 2
        assert status[3] == (0 if int(digits) == 0 else OUT_OF_RANGE)


@settings(deadline=None, max_examples=3000)
@given(text=texts_of_fragments, percent=st.booleans())
def test_a_slow_parser_agrees(text, percent):
    values, status = parse_texts([text], percent=percent)
    value, expected = slow_parse(text, percent)
    assert ParseStatus(status.item()) == expected, text
    assert values.item() == value or (math.isnan(value) and math.isnan(values.item()))


@settings(deadline=None, max_examples=100)
@given(
    texts=st.lists(texts_of_fragments | st.text(max_size=12), max_size=40),
    percent=st.booleans(),
    complete=st.booleans(),
)
def test_forms_agree_and_rows_do_not_depend_on_their_batch(texts, percent, complete):
    results = [parse_texts(texts, percent=percent, complete=complete, backend=backend) for backend in FORMS]
    assert all(same(results[0], result) for result in results)
    for row, text in enumerate(texts[:8]):
        alone = parse_texts([text], percent=percent, complete=complete, backend=FORMS[-1])
        assert alone.status.item() == results[0].status[row]
        assert torch.equal(alone.values[0].view(torch.int32), results[0].values[row].view(torch.int32))


@settings(deadline=None, max_examples=100)
@given(pieces=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=10), min_size=1, max_size=5), data=st.data())
def test_how_a_text_is_cut_into_tokens_does_not_matter(pieces, data):
    vocabulary = ["", "</s>", *dict.fromkeys((*FRAGMENTS, *"".join(FRAGMENTS)))]
    table, number = token_table(vocabulary, [1]), {text: token for token, text in enumerate(vocabulary)}
    complete = data.draw(st.booleans())
    ends = [1, *data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=3))] if complete else [-1, 7]
    by_fragment = [[number[piece] for piece in row] + ends for row in pieces]
    by_character = [[number[character] for character in "".join(row)] + ends for row in pieces]
    expected = parse_texts(["".join(row) for row in pieces], complete=complete)
    for rows in (by_fragment, by_character):
        width = max(map(len, rows)) + data.draw(st.integers(0, 2))
        tokens = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        for backend in FORMS:
            assert same(parse_scores(tokens, table, backend=backend), expected)
            assert same(parse_scores(tokens.int(), table, backend=backend), expected)


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(0, 20), columns=st.integers(0, 12), seed=st.integers(0, 2**31))
def test_forms_agree_on_random_tokens_in_strided_views(rows, columns, seed):
    vocabulary = [*FRAGMENTS, "", "</s>"]
    table = token_table(vocabulary, [len(vocabulary) - 1])
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, len(vocabulary), (columns, 2 * rows), generator=generator).T[::2]
    results = [parse_scores(tokens, table, backend=backend) for backend in FORMS]
    assert all(same(results[0], result) for result in results)
    assert same(results[0], parse_scores(tokens.contiguous(), table))


def test_lone_surrogates_and_pieces_of_characters_are_word_characters(form):
    texts = ["\ud800", "0.8\udfff", "0.8 \udfff", "\ufffd0.8", "0.8 \U0001f600"]
    expected = [NO_NUMBER, MALFORMED, ParseStatus.OK, MALFORMED, ParseStatus.OK]
    assert parse_texts(texts, backend=form).status.tolist() == expected


def test_one_long_text_and_many_chunks(form, monkeypatch):
    size = 10_000_000 if form == "native" else 2_000
    assert parse_texts(["no number here. " * (size // 16) + "0.8"], backend=form).values.item() == pytest.approx(0.8)
    monkeypatch.setattr(sys.modules[parse_texts.__module__], "_CHUNK", 5)
    texts = ["0.1", "", "0.25", "a much longer text: 0.5", "", "1", "x"]
    assert parse_texts(texts, backend=form).status.tolist() == [0, 1, 0, 0, 1, 0, 1]


def test_nothing_at_all(form):
    assert parse_texts([], backend=form).status.shape == (0,)
    assert parse_texts(["", ""], backend=form).status.tolist() == [NO_NUMBER] * 2
    table = token_table(["0"], [])
    assert parse_scores(torch.empty(2, 0, dtype=torch.int64), table, backend=form).status.tolist() == [NO_NUMBER] * 2
    empty = token_table([], [])
    assert parse_scores(torch.tensor([[-1]]), empty, backend=form).status.tolist() == [NO_NUMBER]


def test_stop_tokens_and_the_table_of_tokens():
    table = token_table(["0", ".", "8", "<|end|> 5"], stop_ids=[3, 3])
    assert table.offsets.tolist() == [0, 1, 2, 3, 4]
    assert parse_scores(torch.tensor([[0, 1, 2, 3, 2, 2]]), table).values.item() == pytest.approx(0.8)
    assert table.to("cpu").codes.equal(table.codes)


def test_public_entry():
    scores = gatekern.parse_scores(["0.8", "80%", "?"])
    assert scores.values.dtype == np.float32
    assert scores.values[0] == np.float32(0.8)
    assert scores.status == (ParseStatus.OK, MALFORMED, NO_NUMBER)
    assert gatekern.parse_scores(["80%"], percent=True).status == (ParseStatus.OK,)
    assert gatekern.ParseStatus is ParseStatus


@pytest.mark.parametrize("parse", [gatekern.parse_scores, parse_texts])
def test_texts_that_are_none_raise(parse):
    with pytest.raises(InputError, match="one string"):
        parse("0.8")
    with pytest.raises(InputError, match="text 1 is float, not str") as error:
        parse(["0.8", 0.8])
    assert error.value.index == 1


def test_operands_that_do_not_fit_raise(form):
    table = token_table(["0", "1"], [])
    with pytest.raises(InputError, match="row 1, column 0: token id 2 is outside the vocabulary"):
        parse_scores(torch.tensor([[0, 1], [2, 0]]), table, backend=form)
    with pytest.raises(InputError, match="token id -2"):
        parse_scores(torch.tensor([[-2]]), table, backend=form)
    with pytest.raises(InputError, match="tokens must be int64 or int32"):
        parse_scores(torch.zeros(2, 2), table, backend=form)
    with pytest.raises(InputError, match="tokens must be"):
        parse_scores(torch.zeros(2, dtype=torch.int64), table, backend=form)
    with pytest.raises(InputError, match="codes must be uint8"):
        parse_scores(torch.zeros(1, 1, dtype=torch.int64), table._replace(codes=table.offsets), backend=form)
    with pytest.raises(InputError, match="offsets must be int32"):
        parse_scores(torch.zeros(1, 1, dtype=torch.int64), table._replace(offsets=table.codes), backend=form)
    with pytest.raises(InputError, match="stop id 5"):
        token_table(["0"], [5])
    with pytest.raises(InputError, match="token 0 is NoneType"):
        token_table([None], [])
    with pytest.raises(BackendError, match="CUDA devices only"):
        parse_texts(["0.8"], backend="triton")


def test_operator_is_registered_as_torch_expects(form):
    table = token_table(["0", ".", "8", "</s>"], [3])
    tokens = torch.tensor([[0, 1, 2, 3]])
    torch.library.opcheck(torch.ops.gatekern.parse_scores, (tokens, *table, False, form))
    compiled = torch.compile(
        lambda t: parse_scores(t + 0, table, backend=form).values * 2, fullgraph=True, backend="aot_eager"
    )
    assert compiled(tokens).item() == pytest.approx(1.6)


def test_tables_fit_their_bits():
    for percent in (False, True):
        table = tables(percent)
        assert table.min() >= 0
        assert (table >> 12).max() == len(table) - 1
        assert len(table) < 2**19
    assert classes_of("aZ9").tolist() == [10, 35, 9]
