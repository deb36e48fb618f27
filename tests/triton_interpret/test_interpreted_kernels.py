"""The Triton kernels run on the CPU by Triton's interpreter: TRITON_INTERPRET=1 pytest tests/triton_interpret.

It shows what the kernels compute, not how fast or whether they race: `tests/triton_aot` looks at the machine code.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(allow_module_level=True, reason="needs TRITON_INTERPRET=1, in a process of its own")
pytest.importorskip("triton")

import torch

from gatekern.ops.label_scores import LabelScores, pack_groups
from gatekern.ops.parse_scores import automaton, parse_scores_reference, token_table
from gatekern.ops.triton import vocab_lse as vocab_lse_module
from gatekern.ops.triton.label_scores import label_scores
from gatekern.ops.triton.parse_scores import parse_scores
from gatekern.ops.triton.vocab_lse import vocab_lse
from tests.head_operands import Head
from tests.ops.test_parse_scores import CUT, FRAGMENTS, PERCENTAGES, REPLIES

# The interpreter computes in numpy, which warns of log(0) and inf - inf; the policy tests want both.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def make_groups(labels: int, groups: int, vocab: int) -> list[list[int]]:
    ids = [*torch.randperm(vocab - 1)[: labels - 1].tolist(), vocab - 1]
    return [ids[g::groups] for g in range(groups)]


def run(head: Head, packed: tuple[torch.Tensor, torch.Tensor]) -> LabelScores:
    hidden, weight, *options = head.operands
    return LabelScores(*label_scores(hidden, weight, *packed, *options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("labels", "groups"), [(2, 2), (16, 2), (17, 3), (40, 11), (100, 2), (3, 1)])
@pytest.mark.parametrize("width", [1, 7, 63, 577])
def test_label_scores_shapes(dtype, width, labels, groups):
    packed = pack_groups(make_groups(labels, groups, 130), 130)
    for rows in (0, 1, 3, 17):
        head = Head.random(rows, width, 130, dtype)
        head.judge_label_scores(run(head, packed), packed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("softcap", [None, 3.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, -1.5])
@pytest.mark.parametrize("spread", [0.05, 3000.0])
def test_head_variants(dtype, bias_dtype, softcap, scale, spread):
    head = Head.random(17, 63, 97, dtype, spread=spread, bias_dtype=bias_dtype, softcap=softcap, scale=scale)
    packed = pack_groups(make_groups(9, 3, 97), 97)
    head.judge_label_scores(run(head, packed), packed)
    head.judge_vocab_lse(vocab_lse(*head.operands))


@pytest.mark.parametrize(
    ("logits", "expected_logits", "expected_score"),
    [
        ([0.0, -INF, 0.0, 0.0], [0.0, 0.693147180], 1 / 3),
        ([-INF, -INF, 0.0, 1.0], [-INF, 1.313261687], 0.0),
        ([0.0, 1.0, -INF, -INF], [1.313261687, -INF], 1.0),
        ([-INF, -INF, -INF, -INF], [-INF, -INF], NAN),
        ([NAN, 0.0, 0.0, 0.0], [NAN, 0.693147180], NAN),
        ([0.0, 0.0, -INF, NAN], [0.693147180, NAN], NAN),
        ([INF, 0.0, 0.0, 0.0], [INF, 0.693147180], NAN),
    ],
)
def test_label_scores_policy(logits, expected_logits, expected_score):
    packed = pack_groups([[0, 1], [2, 3]], 4)
    result = run(Head(torch.zeros(2, 5), torch.zeros(4, 5), torch.tensor(logits)), packed)
    torch.testing.assert_close(result.logits, torch.tensor([expected_logits] * 2), rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(result.score, torch.tensor([expected_score] * 2), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad_id", [-1, 3, 2**40])
def test_ids_outside_the_vocabulary_give_nan(bad_id):
    packed = torch.tensor([0, bad_id, 1]), torch.tensor([0, 2, 3])
    logits, score = run(Head(torch.ones(3, 7), torch.ones(3, 7)), packed)
    assert logits[:, 0].isnan().all()
    assert score.isnan().all()
    assert (logits[:, 1] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_misaligned_operands(dtype):
    packed = pack_groups(make_groups(9, 2, 97), 97)
    plain = Head.random(17, 63, 97, dtype)
    for offset in range(4):
        hidden, weight = torch.full((34, 71), NAN, dtype=dtype), torch.full((97, 80), NAN, dtype=dtype)
        hidden[::2, offset : offset + 63], weight[:, offset : offset + 63] = plain.hidden, plain.weight
        strided = Head(hidden[::2, offset : offset + 63], weight[:, offset : offset + 63])
        assert torch.equal(run(strided, packed).logits, run(plain, packed).logits)
        assert torch.equal(vocab_lse(*strided.operands), vocab_lse(*plain.operands))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_batch(dtype):
    head = Head.random(64, 577, 300, dtype)
    packed = pack_groups(make_groups(13, 2, 300), 300)
    together, together_lse = run(head, packed), vocab_lse(*head.operands)
    for row in (0, 16, 63):
        alone = Head(head.hidden[row : row + 1], head.weight)
        assert torch.equal(run(alone, packed).logits[0], together.logits[row])
        assert torch.equal(run(alone, packed).score[0], together.score[row])
        assert torch.equal(vocab_lse(*alone.operands)[0], together_lse[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 64, 129, 600])
@pytest.mark.parametrize("width", [1, 63, 130])
def test_vocab_lse_shapes(dtype, width, vocab):
    for rows in (0, 1, 3, 150):
        head = Head.random(rows, width, vocab, dtype)
        head.judge_vocab_lse(vocab_lse(*head.operands))


def test_vocab_lse_walks_several_bands_and_steps(monkeypatch):
    monkeypatch.setattr(vocab_lse_module, "ROW_TILES_PER_BAND", 2)
    monkeypatch.setattr(vocab_lse_module, "PARTIALS_PER_STEP", 4)
    head = Head.random(
        64 * 5 + 1, 7, 64 * 9 + 1
    )  # six row tiles in bands of two, ten vocabulary tiles in steps of four
    head.judge_vocab_lse(vocab_lse(*head.operands))


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([-INF] * 200, -INF),
        ([-INF] * 198 + [0.0, 0.0], 0.693147180),  # whole tiles at -inf before the first number
        ([0.0, 0.0] + [-INF] * 198, 0.693147180),
        ([NAN] + [0.0] * 199, NAN),
        ([0.0] * 199 + [INF], INF),
    ],
)
def test_vocab_lse_policy(bias, expected):
    result = vocab_lse(torch.zeros(2, 5), torch.zeros(200, 5), torch.tensor(bias), None, 1.0)
    torch.testing.assert_close(result, torch.tensor([expected] * 2), rtol=1e-6, atol=0, equal_nan=True)


def check_parse_scores(tokens: torch.Tensor, table, percent: bool) -> None:
    values, status = parse_scores(tokens, *table, *automaton(percent, tokens.device))
    expected = parse_scores_reference(tokens, *table, percent)
    assert torch.equal(status, expected.status)
    assert torch.equal(values.view(torch.int32), expected.values.view(torch.int32))


@pytest.mark.parametrize("percent", [False, True])
@pytest.mark.parametrize("end", [-1, 1])
def test_parse_scores_character_by_character(percent, end):
    texts = [text for text, _ in REPLIES + PERCENTAGES + CUT] + [
        "0." + "3" * 40,
        "0." + "0" * 40 + "7",
        "8e-9999999999",
    ]
    vocabulary = ["", "</s>", *dict.fromkeys("".join(texts))]
    number = {character: token for token, character in enumerate(vocabulary)}
    rows = [[number[character] for character in text] + [end] for text in texts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    check_parse_scores(tokens, token_table(vocabulary, [1]), percent)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (1, 1), (3, 0), (33, 4), (65, 12)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_parse_scores_random_tokens(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows)
    vocabulary = [*FRAGMENTS, "", "</s>"]
    tokens = torch.randint(-1, len(vocabulary) + 1, (columns, rows * 2), generator=generator, dtype=dtype)
    # An id outside the vocabulary is padding where looking for it would stall the device.
    check_parse_scores(tokens.T[::2], token_table(vocabulary, [len(vocabulary) - 1]), percent=True)
