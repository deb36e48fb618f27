"""The tiled PyTorch form; the Triton form is tested in `triton_interpret` and `triton_aot`."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gatekern.errors import BackendError, InputError
from gatekern.ops import vocab_lse
from tests.head_operands import Head

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "tile"), [(1, 8192), (5, 2), (97, 97), (97, 96), (1000, 128)])
@pytest.mark.parametrize("width", [1, 63, 577])
def test_shapes_and_tiles(dtype, width, vocab, tile):
    for rows in (0, 1, 3, 17):
        head = Head.random(rows, width, vocab, dtype)
        result = vocab_lse(head.hidden, head.weight, tile=tile)
        assert result.shape == (rows,)
        head.judge_vocab_lse(result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("softcap", [None, 3.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, 0.0625, -1.5])
def test_head_variants(dtype, bias_dtype, softcap, scale):
    head = Head.random(17, 63, 300, dtype, spread=10.0, bias_dtype=bias_dtype, softcap=softcap, scale=scale)
    head.judge_vocab_lse(vocab_lse(*head.operands, tile=64))


@pytest.mark.parametrize("spread", [300.0, 5000.0])
def test_magnitudes(spread):
    head = Head.random(17, 63, 300, spread=spread)
    head.judge_vocab_lse(vocab_lse(*head.operands, tile=64))


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([-INF] * 6, -INF),
        ([-INF] * 4 + [0.0, 0.0], 0.693147180),  # whole tiles at -inf before the first number
        ([0.0, 0.0] + [-INF] * 4, 0.693147180),
        ([NAN] + [0.0] * 5, NAN),
        ([0.0] * 5 + [NAN], NAN),
        ([0.0] * 5 + [INF], INF),
        ([INF] + [0.0] * 5, INF),
    ],
)
def test_policy_on_values_that_are_not_numbers(bias, expected):
    result = vocab_lse(torch.zeros(2, 5), torch.zeros(6, 5), torch.tensor(bias), tile=2)
    torch.testing.assert_close(result, torch.tensor([expected] * 2), rtol=1e-6, atol=0, equal_nan=True)


def test_strided_operands():
    head = Head.random(17, 63, 300)
    wide = torch.full((300, 80), NAN)
    wide[:, 5:68] = head.weight
    head.judge_vocab_lse(vocab_lse(head.hidden.T.contiguous().T, wide[:, 5:68], tile=64))


class LargestTensor(TorchDispatchMode):
    """Record the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.elements = max(self.elements, result.numel())
        return result


def test_never_holds_all_logits_nor_an_upcast_weight():
    from gatekern.ops.vocab_lse import _vocab_lse_tiled

    head = Head.random(32, 64, 4096, torch.bfloat16, softcap=30.0)
    with LargestTensor() as seen:
        _vocab_lse_tiled(*head.operands, 128)
    assert 0 < seen.elements <= 128 * 64


@pytest.mark.parametrize("tile", [0, -1])
def test_bad_tile(tile):
    head = Head.random(3, 7, 97)
    with pytest.raises(InputError, match="tile must be at least 1"):
        vocab_lse(*head.operands, tile=tile)


def test_bad_operands_and_backend():
    ones = torch.ones(3, 7)
    with pytest.raises(InputError, match="must share one H"):
        vocab_lse(ones, ones[:, :6])
    with pytest.raises(BackendError, match="vocab_lse has no native form"):
        vocab_lse(ones, ones, backend="native")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    head = Head.random(5, 63, 97, dtype, bias_dtype=torch.float32, softcap=30.0, scale=0.5)
    torch.library.opcheck(torch.ops.gatekern.vocab_lse.default, head.operands)


def test_compiles_without_a_graph_break():
    head = Head.random(17, 63, 97)

    def caller(hidden):
        return vocab_lse(hidden.relu(), head.weight, tile=32) * 2

    compiled = torch.compile(caller, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(head.hidden), caller(head.hidden))
