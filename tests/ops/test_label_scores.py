"""The operator through its public door, in each form that runs on this machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekern.errors import InputError
from gatekern.ops import label_scores, native
from gatekern.ops.label_scores import pack_groups
from tests.head_operands import Head

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["torch", "native"])
def form(request) -> str:
    if request.param == "native" and (reason := native.why_not()):
        pytest.skip(reason)
    return request.param


def make_groups(labels: int, groups: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`labels` distinct ids in `groups` groups of uneven size, in no order, with the last id of the vocabulary."""
    order = torch.randperm(vocab - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    ids = [*order[: labels - 1], vocab - 1]
    return [ids[g::groups] for g in range(groups)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("labels", "groups"), [(2, 2), (5, 3), (16, 2), (40, 11), (3, 1)])
@pytest.mark.parametrize("width", [1, 7, 63, 576, 577])
def test_shapes(form, dtype, width, labels, groups):
    token_groups = make_groups(labels, groups, vocab=97)
    for rows in (0, 1, 3, 17, 255) if form == "native" else (0, 3, 17):
        head = Head.random(rows, width, 97, dtype)
        result = label_scores(head.hidden, head.weight, token_groups, backend=form)
        assert result.logits.shape == (rows, groups)
        assert result.score.shape == (rows,)
        head.judge_label_scores(result, pack_groups(token_groups, 97))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", ["none", "float32", "same"])
@pytest.mark.parametrize("softcap", [None, 3.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, 0.0625, -1.5])
def test_head_variants(form, dtype, bias, softcap, scale):
    bias_dtype = {"none": None, "float32": torch.float32, "same": dtype}[bias]
    head = Head.random(17, 63, 97, dtype, spread=10.0, bias_dtype=bias_dtype, softcap=softcap, scale=scale)
    token_groups = make_groups(9, 3, 97)
    result = label_scores(head.hidden, head.weight, token_groups, *head.operands[2:], backend=form)
    head.judge_label_scores(result, pack_groups(token_groups, 97))
    if softcap is not None:
        assert result.logits.max() <= softcap + torch.tensor(3.0).log() + 1e-5  # three labels per group


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1e-4, 300.0, 5000.0])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_magnitudes(form, dtype, spread, softcap):
    head = Head.random(17, 63, 97, dtype, spread=spread, softcap=softcap)
    token_groups = make_groups(6, 2, 97)
    result = label_scores(head.hidden, head.weight, token_groups, softcap=softcap, backend=form)
    head.judge_label_scores(result, pack_groups(token_groups, 97))
    assert result.score.isfinite().all()


def test_two_groups_are_a_sigmoid(form):
    head = Head.random(255, 63, 97, spread=6.0)
    logits, score = label_scores(head.hidden, head.weight, make_groups(8, 2, 97), backend=form)
    torch.testing.assert_close(score, torch.sigmoid(logits[:, 0] - logits[:, 1]), rtol=1e-6, atol=0)


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
        ([1e38, 1e38, -1e38, -1e38], [1e38, -1e38], 1.0),
    ],
)
def test_policy_on_values_that_are_not_numbers(form, logits, expected_logits, expected_score):
    zeros = torch.zeros(2, 5)
    result = label_scores(zeros, torch.zeros(4, 5), [[0, 1], [2, 3]], bias=torch.tensor(logits), backend=form)
    expected = LabelExpectation(expected_logits, expected_score)
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(result.score, expected.score, rtol=1e-6, atol=0, equal_nan=True)


class LabelExpectation:
    def __init__(self, logits: list[float], score: float) -> None:
        self.logits = torch.tensor([logits, logits])
        self.score = torch.tensor([score, score])


def test_a_bad_row_does_not_touch_its_neighbours(form):
    head = Head.random(3, 577, 97)
    groups = make_groups(6, 2, 97)
    good = label_scores(head.hidden, head.weight, groups, backend=form)
    head.hidden[1, 576] = NAN
    mixed = label_scores(head.hidden, head.weight, groups, backend=form)
    assert mixed.score[1].isnan()
    assert mixed.logits[1].isnan().all()
    assert torch.equal(mixed.logits[[0, 2]], good.logits[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_strides_and_transposed_hidden(form, dtype):
    head = Head.random(17, 63, 97, dtype)
    groups = make_groups(9, 2, 97)
    expected = label_scores(head.hidden, head.weight, groups, backend=form)
    wide = torch.full((97, 80), NAN, dtype=dtype)
    wide[:, 5:68] = head.weight
    hidden = torch.full((34, 71), NAN, dtype=dtype)
    hidden[::2, 1:64] = head.hidden
    for view in (hidden[::2, 1:64], head.hidden.T.contiguous().T):
        result = label_scores(view, wide[:, 5:68], groups, backend=form)
        head.judge_label_scores(result, pack_groups(groups, 97))
        if form == "native":
            assert torch.equal(result.logits, expected.logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [63, 576, 896])
def test_native_rows_do_not_depend_on_their_batch(dtype, width):
    if reason := native.why_not():
        pytest.skip(reason)
    head = Head.random(64, width, 97, dtype)
    groups = make_groups(13, 2, 97)
    together = label_scores(head.hidden, head.weight, groups, backend="native")
    order = torch.randperm(64)
    shuffled = label_scores(head.hidden[order], head.weight, groups, backend="native")
    assert torch.equal(shuffled.logits, together.logits[order])
    for row in range(64):
        alone = label_scores(head.hidden[row : row + 1], head.weight, groups, backend="native")
        assert torch.equal(alone.logits[0], together.logits[row])
        assert torch.equal(alone.score[0], together.score[row])


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7),
    rows=st.integers(1, 9),
    width=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
def test_forms_agree_and_scores_of_all_groups_sum_to_one(sizes, rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, width, generator=generator), torch.randn(50, width, generator=generator)
    ids = iter(torch.randperm(50, generator=generator).tolist())
    groups = [[next(ids) for _ in range(size)] for size in sizes]
    total = torch.zeros(rows)
    for turn in range(len(groups)):
        rotated = groups[turn:] + groups[:turn]
        result = label_scores(hidden, weight, rotated)
        plain = label_scores(hidden, weight, rotated, backend="torch")
        torch.testing.assert_close(result.logits, plain.logits, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(result.score, plain.score, rtol=1e-4, atol=1e-6)
        total += result.score
    torch.testing.assert_close(total, torch.ones(rows), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "groups is empty"),
        ([[1], []], "group 1 is empty"),
        ([[1], [97]], r"group 1: token id 97 is outside the vocabulary \[0, 97\)"),
        ([[-1], [2]], "group 0: token id -1 is outside"),
        ([[1, 1], [2]], "group 0: token id 1 is already in group 0"),
        ([[1], [2, 1]], "group 1: token id 1 is already in group 0"),
        ([[1.5], [2]], "group 0: 1.5 is not a token id"),
        ([["yes"], ["no"]], "group 0: 'yes' is not a token id"),
    ],
)
def test_bad_groups(groups, message):
    head = Head.random(3, 7, 97)
    with pytest.raises(InputError, match=message):
        label_scores(head.hidden, head.weight, groups)


ONES = torch.ones(3, 7)


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ((ONES[0], ONES), {}, r"hidden must be \[N, H\]"),
        ((ONES, ONES[None]), {}, r"weight \[V, H\]"),
        ((ONES, ONES[:, :6]), {}, "must share one H"),
        ((ONES[:, :0], ONES[:, :0]), {}, "must share one H"),
        ((ONES, ONES.bfloat16()), {}, "must share one dtype"),
        ((ONES.double(), ONES.double()), {}, "must share one dtype"),
        ((ONES, ONES.T.contiguous().T), {}, "each row of weight must be contiguous"),
        ((ONES, ONES), {"bias": torch.ones(2)}, r"bias must be \[V\] = \[3\]"),
        ((ONES, ONES), {"bias": torch.ones(3).half()}, "bias must be float32"),
        ((ONES, ONES), {"softcap": 0.0}, "softcap must be a positive number"),
        ((ONES, ONES), {"softcap": NAN}, "softcap must be a positive number"),
        ((ONES, ONES), {"scale": INF}, "scale must be finite"),
    ],
)
def test_bad_operands(operands, options, message):
    with pytest.raises(InputError, match=message):
        label_scores(*operands, [[0], [1]], **options)
    with pytest.raises(InputError, match=message):  # the registered operator guards memory by itself
        torch.ops.gatekern.label_scores(*operands, *pack_groups([[0], [1]], 3), **options)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ((torch.tensor([0.0, 1.0]), torch.tensor([0, 1, 2])), "label_ids must be int64"),
        ((torch.tensor([[0, 1]]), torch.tensor([0, 1, 2])), "label_ids must be int64"),
        ((torch.tensor([0, 1]), torch.tensor([0])), "group_offsets must be int64"),
        ((torch.tensor([0, 1]), torch.tensor([0, 1, 2], dtype=torch.int32)), "group_offsets must be int64"),
    ],
)
def test_bad_packed_groups(packed, message):
    with pytest.raises(InputError, match=message):
        label_scores(ONES, ONES, packed)


@pytest.mark.parametrize("bad_id", [-1, 3, 2**40, -(2**62)])
def test_packed_ids_outside_the_vocabulary_give_nan(form, bad_id):
    ids, offsets = torch.tensor([0, bad_id, 1]), torch.tensor([0, 2, 3])
    logits, score = label_scores(ONES, ONES, (ids, offsets), backend=form)
    assert logits[:, 0].isnan().all()
    assert score.isnan().all()
    assert (logits[:, 1] == 7.0).all()


def test_packed_offsets_outside_the_labels_read_nothing_foreign(form):
    logits, _ = label_scores(ONES, ONES, (torch.tensor([0, 1]), torch.tensor([-(2**40), 1, 2**40])), backend=form)
    assert (logits == 7.0).all()


@pytest.mark.parametrize("bias", [None, torch.randn(97)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype, bias):
    head = Head.random(5, 63, 97, dtype)
    packed = pack_groups(make_groups(9, 3, 97), 97)
    torch.library.opcheck(
        torch.ops.gatekern.label_scores.default, (head.hidden, head.weight, *packed, bias, 30.0, 0.5, "auto")
    )


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(compiler, packed):
    head = Head.random(17, 63, 97)
    groups = make_groups(9, 3, 97)
    given_groups = pack_groups(groups, 97) if packed else groups

    def caller(hidden):
        result = label_scores(hidden.relu(), head.weight, given_groups, softcap=30.0)
        return result.score * 2, result.logits

    compiled = torch.compile(caller, fullgraph=True, backend=compiler, dynamic=True)
    for rows in (17, 4):
        for got, expected in zip(compiled(head.hidden[:rows]), caller(head.hidden[:rows]), strict=True):
            assert torch.equal(got, expected)


def test_weights_that_require_gradients_are_accepted():
    head = Head.random(3, 7, 97)
    result = label_scores(head.hidden, torch.nn.Parameter(head.weight), [[0], [1]])
    assert torch.equal(result.score, label_scores(head.hidden, head.weight, [[0], [1]]).score)
