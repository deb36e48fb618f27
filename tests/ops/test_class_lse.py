"""Masses of token classes against the full logits."""

from __future__ import annotations

import pytest
import torch

from gatekern.errors import BackendError, InputError
from gatekern.ops import class_lse, vocab_lse
from gatekern.ops.class_lse import class_lse_reference
from tests.head_operands import Head, assert_as_accurate
from tests.ops.test_vocab_lse import LargestTensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def random_classes(groups: int, vocab: int, num_classes: int, seed: int = 0) -> torch.Tensor:
    """A few tokens in every class and most in the first, as between digits and all other words."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, num_classes, (groups, vocab), generator=generator, dtype=torch.uint8)
    return classes.where(torch.rand(groups, vocab, generator=generator) < 0.3, torch.zeros((), dtype=torch.uint8))


def judge(head: Head, classes: torch.Tensor, num_classes: int, result: torch.Tensor, temperature: float = 1.0) -> None:
    groups = len(classes)

    def reference(operands) -> torch.Tensor:
        hidden, *rest = operands
        hidden = hidden.unflatten(0, (groups, -1))
        weight, bias, softcap, scale = rest
        return class_lse_reference(hidden, weight, classes, num_classes, bias, softcap, scale, temperature=temperature)

    magnitude = head.magnitude().view(groups, -1, 1) / min(temperature, 1.0)
    plain, truth = reference(head.operands), reference(head.operands64)
    # Next to the largest of them, what is below e^-87 of the classes from 1 on is nothing in float32.
    nothing = torch.zeros_like(truth, dtype=torch.bool)
    if truth.numel():
        largest = truth[..., 1:].amax(-1, keepdim=True)
        nothing[..., 1:] = truth[..., 1:] < largest - 80
        assert (result[..., 1:] < largest - 79)[nothing[..., 1:]].all()
    shown = [x.masked_fill(nothing, -torch.inf) for x in (result, plain, truth)]
    assert_as_accurate(*shown, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (3, 5), (15, 2), (4, 0)])
@pytest.mark.parametrize(("vocab", "tile"), [(1, 8192), (97, 96), (1000, 128)])
def test_shapes_and_tiles(dtype, groups, rows, vocab, tile):
    head = Head.random(groups * rows, 63, vocab, dtype)
    classes = random_classes(groups, vocab, 7)
    result = class_lse(head.hidden.view(groups, rows, 63), head.weight, classes, 7, tile=tile)
    assert result.shape == (groups, rows, 7)
    judge(head, classes, 7, result)


@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.0625, -1.5])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_head_variants(bias_dtype, softcap, scale, temperature):
    head = Head.random(12, 63, 300, spread=10.0, bias_dtype=bias_dtype, softcap=softcap, scale=scale)
    classes = random_classes(3, 300, 12)
    hidden, *rest = head.operands
    hidden = hidden.view(3, 4, 63)
    result = class_lse(hidden, rest[0], classes, 12, *rest[1:], temperature=temperature, tile=64)
    judge(head, classes, 12, result, temperature)


@pytest.mark.parametrize("spread", [300.0, 5000.0])
def test_magnitudes(spread):
    head = Head.random(12, 63, 300, spread=spread)
    classes = random_classes(3, 300, 4)
    judge(head, classes, 4, class_lse(head.hidden.view(3, 4, 63), head.weight, classes, 4, tile=64))


def test_classes_sum_to_the_vocabulary():
    head = Head.random(12, 63, 300)
    result = class_lse(head.hidden.view(3, 4, 63), head.weight, random_classes(3, 300, 9), 9)
    torch.testing.assert_close(result.logsumexp(-1).flatten(), vocab_lse(head.hidden, head.weight))


def test_class_0_does_not_drown_the_others():
    classes = torch.tensor([[0, 1, 1, 2]], dtype=torch.uint8)
    bias = torch.tensor([500.0, 1.0, 2.0, 0.0])
    result = class_lse(torch.zeros(1, 1, 5), torch.zeros(4, 5), classes, 3, bias)
    torch.testing.assert_close(result[0, 0], torch.tensor([500.0, bias[1:3].logsumexp(0).item(), 0.0]))


def test_a_class_without_tokens_has_no_mass():
    classes = torch.zeros(1, 6, dtype=torch.uint8)
    result = class_lse(torch.zeros(1, 2, 5), torch.zeros(6, 5), classes, 3)
    assert result[..., 1:].isneginf().all()
    torch.testing.assert_close(result[..., 0], torch.full((1, 2), 6.0).log())


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([-INF] * 6, [-INF, -INF]),
        ([-INF] * 4 + [0.0, 0.0], [-INF, 0.693147180]),
        ([NAN] + [0.0] * 5, [NAN, 1.09861229]),
        ([0.0] * 5 + [NAN], [1.09861229, NAN]),
    ],
)
def test_policy_on_values_that_are_not_numbers(bias, expected):
    classes = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.uint8)
    result = class_lse(torch.zeros(1, 2, 5), torch.zeros(6, 5), classes, 2, torch.tensor(bias), tile=2)
    torch.testing.assert_close(result, torch.tensor([[expected] * 2]), rtol=1e-6, atol=0, equal_nan=True)


def test_never_holds_all_logits_nor_an_upcast_weight():
    from gatekern.ops.class_lse import _class_lse_tiled

    head = Head.random(32, 64, 4096, torch.bfloat16, softcap=30.0)
    classes = random_classes(4, 4096, 8)
    hidden, weight, *terms = head.operands
    with LargestTensor() as seen:
        _class_lse_tiled(hidden.view(4, 8, 64), weight, classes, 8, *terms, 1.0, 128)
    assert 0 < seen.elements <= 128 * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(4, 8)}, r"hidden must be \[M, N, H\]"),
        ({"classes": torch.zeros(3, 97, dtype=torch.uint8)}, r"classes must be uint8 \[M, V\] = \[2, 97\]"),
        ({"classes": torch.zeros(2, 97, dtype=torch.int64)}, "classes must be uint8"),
        ({"num_classes": 0}, "num_classes must be from 1 to 256"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"tile": 0}, "tile must be at least 1"),
        ({"weight": torch.ones(97, 7)}, "must share one H"),
    ],
)
def test_bad_operands(change, message):
    operands = {
        "hidden": torch.ones(2, 4, 8),
        "weight": torch.ones(97, 8),
        "classes": torch.zeros(2, 97, dtype=torch.uint8),
        "num_classes": 3,
    }
    with pytest.raises(InputError, match=message):
        class_lse(**{**operands, **change})


def test_a_backend_that_does_not_exist():
    with pytest.raises(BackendError, match="class_lse has no native form"):
        class_lse(torch.ones(1, 1, 8), torch.ones(9, 8), torch.zeros(1, 9, dtype=torch.uint8), 1, backend="native")


def test_opcheck():
    head = Head.random(4, 63, 97, bias_dtype=torch.float32, softcap=30.0, scale=0.5)
    hidden, weight, *terms = head.operands
    torch.library.opcheck(
        torch.ops.gatekern.class_lse.default, (hidden.view(2, 2, 63), weight, random_classes(2, 97, 3), 3, *terms)
    )
