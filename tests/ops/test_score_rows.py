"""The fused entry: what it adds to `label_scores` and `vocab_lse`, which have tests of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gatekern.errors import BackendError, InputError
from gatekern.ops import HeadSpec, label_scores, native, score_rows
from gatekern.ops.label_scores import Groups, LabelScores, _label_scores, label_scores_reference, pack_groups
from gatekern.ops.score_rows import RowScores
from gatekern.ops.vocab_lse import _vocab_lse, vocab_lse_reference
from tests.head_operands import Head, HeadOperands, assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = [[3, 96, 11], [40, 0]]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["torch", "native"])
def form(request) -> str:
    if request.param == "native" and (reason := native.why_not()):
        pytest.skip(reason)
    return request.param


def spec(head: Head) -> HeadSpec:
    return HeadSpec(head.weight, head.bias, head.scale, head.softcap)


def mass_of(operands: HeadOperands, packed: tuple[Tensor, Tensor]) -> Tensor:
    hidden, weight, *terms = operands
    logits = label_scores_reference(hidden, weight, *packed, *terms).logits
    return torch.exp(logits.logsumexp(-1) - vocab_lse_reference(*operands)).clamp(max=1)


def judge(head: Head, rows: RowScores, groups: list[list[int]]) -> None:
    packed = pack_groups(groups, head.weight.shape[0])
    head.judge_label_scores(LabelScores(rows.logits, rows.score), packed)
    if rows.mass is not None:
        truth = mass_of(head.operands64, packed)
        assert_as_accurate(rows.mass, mass_of(head.operands, packed), truth, head.magnitude())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("width", [1, 63, 576])
def test_shapes_and_dtypes(form, dtype, mass, width):
    for rows in (0, 1, 17):
        head = Head.random(rows, width, 97, dtype)
        result = score_rows(head.hidden, spec(head), GROUPS, mass=mass, backend=form)
        assert result.logits.shape == (rows, 2)
        assert result.score.shape == (rows,)
        assert (result.mass is not None) == mass
        judge(head, result, GROUPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("softcap", [None, 3.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, 0.0625, -1.5])
def test_head_variants(form, dtype, bias_dtype, softcap, scale):
    head = Head.random(17, 63, 97, dtype, spread=10.0, bias_dtype=bias_dtype, softcap=softcap, scale=scale)
    judge(head, score_rows(head.hidden, spec(head), GROUPS, mass=True, backend=form), GROUPS)


def test_labels_that_are_the_whole_vocabulary_have_mass_one(form):
    head = Head.random(255, 63, 97, spread=6.0)
    result = score_rows(head.hidden, spec(head), [list(range(50)), list(range(50, 97))], mass=True, backend=form)
    assert (result.mass <= 1).all()
    torch.testing.assert_close(result.mass, torch.ones(255), rtol=0, atol=1e-5)


def test_one_group_is_certain_and_its_mass_is_its_probability(form):
    head = Head.random(17, 63, 97)
    result = score_rows(head.hidden, spec(head), [[5, 9]], mass=True, backend=form)
    probabilities = (head.hidden @ head.weight.T).softmax(-1)
    assert torch.equal(result.score, torch.ones(17))
    torch.testing.assert_close(result.mass, probabilities[:, [5, 9]].sum(-1))


def test_the_mass_changes_nothing_else_and_packed_groups_change_nothing(form):
    head = Head.random(17, 63, 97, torch.bfloat16, softcap=30.0, scale=0.5)
    given = {"lists": GROUPS, "packed": pack_groups(GROUPS, 97)}
    expected = label_scores(head.hidden, head.weight, GROUPS, softcap=30.0, scale=0.5, backend=form)
    masses = []
    for groups in given.values():
        for mass in (False, True):
            result = score_rows(head.hidden, spec(head), groups, mass=mass, backend=form)
            assert torch.equal(result.logits, expected.logits)
            assert torch.equal(result.score, expected.score)
            masses += [] if result.mass is None else [result.mass]
    assert torch.equal(*masses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_and_in_a_batch(form, dtype):
    head = Head.random(33, 576, 97, dtype)
    packed = pack_groups(GROUPS, 97)
    together = score_rows(head.hidden, spec(head), packed, mass=True, backend=form)
    for row in range(33):
        alone = score_rows(head.hidden[row : row + 1], spec(head), packed, mass=True, backend=form)
        if form == "native":
            assert torch.equal(alone.logits[0], together.logits[row])
            assert torch.equal(alone.score[0], together.score[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(alone.score[0], together.score[row], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(alone.mass[0], together.mass[row], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("bias", "score", "mass"),
    [
        ([0.0, -INF, 0.0], 1.0, 0.5),
        ([-INF, -INF, 0.0], NAN, 0.0),  # no label is possible
        ([-INF, -INF, -INF], NAN, NAN),
        ([0.0, 0.0, INF], 0.5, 0.0),
        ([INF, 0.0, 0.0], NAN, NAN),
        ([0.0, 0.0, NAN], 0.5, NAN),  # the labels are fine, the vocabulary is not
        ([NAN, 0.0, 0.0], NAN, NAN),
    ],
)
def test_policy_on_values_that_are_not_numbers(form, bias, score, mass):
    head = HeadSpec(torch.zeros(3, 5), torch.tensor(bias))
    result = score_rows(torch.zeros(2, 5), head, [[0], [1]], mass=True, backend=form)
    torch.testing.assert_close(result.score, torch.tensor([score] * 2), equal_nan=True)
    torch.testing.assert_close(result.mass, torch.tensor([mass] * 2), equal_nan=True)


def test_packed_ids_outside_the_vocabulary_give_nan(form):
    packed = torch.tensor([0, 99]), torch.tensor([0, 1, 2])
    result = score_rows(torch.ones(2, 7), HeadSpec(torch.ones(3, 7)), packed, mass=True, backend=form)
    assert result.score.isnan().all()
    assert result.mass.isnan().all()


def test_nothing_is_recorded_and_autocast_changes_nothing(form):
    head = Head.random(5, 63, 97)
    weight = torch.nn.Parameter(head.weight)
    expected = score_rows(head.hidden, spec(head), GROUPS, mass=True, backend=form)
    with torch.autocast("cpu", torch.bfloat16):
        result = score_rows(head.hidden.requires_grad_(), HeadSpec(weight), GROUPS, mass=True, backend=form)
    for got, wanted in zip(result, expected, strict=True):
        assert not got.requires_grad
        assert torch.equal(got, wanted)


ONES = torch.ones(3, 7)


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize(
    ("hidden", "head", "groups", "message"),
    [
        (ONES[0], HeadSpec(ONES), [[0], [1]], r"hidden must be \[N, H\]"),
        (ONES, HeadSpec(ONES[:, :6]), [[0], [1]], "must share one H"),
        (ONES, HeadSpec(ONES.bfloat16()), [[0], [1]], "must share one dtype"),
        (ONES, HeadSpec(ONES.T.contiguous().T), [[0], [1]], "each row of weight must be contiguous"),
        (ONES, HeadSpec(ONES, bias=torch.ones(2)), [[0], [1]], r"bias must be \[V\] = \[3\]"),
        (ONES, HeadSpec(ONES, softcap=0.0), [[0], [1]], "softcap must be a positive number"),
        (ONES, HeadSpec(ONES, scale=INF), [[0], [1]], "scale must be finite"),
        (ONES, HeadSpec(ONES), [], "groups is empty"),
        (ONES, HeadSpec(ONES), [[0], [3]], r"group 1: token id 3 is outside the vocabulary \[0, 3\)"),
        (ONES, HeadSpec(ONES), [[0], [0]], "group 1: token id 0 is already in group 0"),
        (ONES, HeadSpec(ONES), (torch.tensor([0.0]), torch.tensor([0, 1])), "label_ids must be int64"),
    ],
)
def test_bad_operands(hidden, head, groups, message, mass):
    with pytest.raises(InputError, match=message):
        score_rows(hidden, head, groups, mass=mass)


@pytest.mark.parametrize("backend", ["triton", "fast"])
def test_a_backend_that_cannot_run_raises(backend):
    with pytest.raises(BackendError):
        score_rows(ONES, HeadSpec(ONES), [[0], [1]], mass=True, backend=backend)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(compiler, packed):
    head = Head.random(17, 63, 97)
    groups: Groups = pack_groups(GROUPS, 97) if packed else GROUPS

    def caller(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = score_rows(hidden.relu(), HeadSpec(weight, softcap=30.0), groups, mass=True)
        return rows.score * 2, rows.logits, rows.mass

    compiled = torch.compile(caller, fullgraph=True, backend=compiler, dynamic=True)
    for rows in (17, 4):
        operands = head.hidden[:rows], head.weight
        for got, expected in zip(compiled(*operands), caller(*operands), strict=True):
            assert torch.equal(got, expected)


BODIES = {torch.ops.gatekern.label_scores.default: _label_scores, torch.ops.gatekern.vocab_lse.default: _vocab_lse}
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::item"}


class Operations(TorchDispatchMode):
    """Record every operation, also those inside the two operators, whose bodies run under this mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        if func not in BODIES:
            return func(*args, **(kwargs or {}))
        with self:
            return BODIES[func](*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mass", [False, True])
def test_packed_groups_never_make_the_host_wait(form, dtype, mass):
    head = Head.random(17, 63, 97, dtype, bias_dtype=torch.float32, softcap=30.0, scale=0.5)
    packed = pack_groups(GROUPS, 97)
    with Operations() as seen:
        score_rows(head.hidden, spec(head), packed, mass=mass, backend=form)
    assert ("aten::tanh_" in seen.names) == (form == "torch" or mass)  # it looks into the operators
    assert not seen.names & WAITS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_torch_form_runs_on_tensors_without_values(dtype):
    head = Head.random(17, 63, 97, dtype, bias_dtype=torch.float32, softcap=30.0, scale=0.5)
    with FakeTensorMode() as fake, Operations() as seen:
        hidden, weight, bias, *packed = map(
            fake.from_tensor, (head.hidden, head.weight, head.bias, *pack_groups(GROUPS, 97))
        )
        result = score_rows(hidden, HeadSpec(weight, bias, 0.5, 30.0), tuple(packed), mass=True, backend="torch")
    assert "aten::tanh_" in seen.names
    assert [tuple(x.shape) for x in result] == [(17, 2), (17,), (17,)]


@pytest.mark.parametrize("wait", [Tensor.item, torch.nonzero, bool])
def test_the_recorder_sees_what_makes_the_host_wait(wait):
    with Operations() as seen:
        wait(torch.ones(1))
    assert seen.names & WAITS


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.numpy, torch.nonzero, bool])
def test_tensors_without_values_cannot_be_read(read):
    with FakeTensorMode(), pytest.raises(RuntimeError):
        read(torch.ones(1))
