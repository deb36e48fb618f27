"""Operands for the head operators and the judgement of their results, for tests and before a benchmark is timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gatekern.ops.label_scores import LabelScores, label_scores_reference
from gatekern.ops.vocab_lse import vocab_lse_reference

HeadOperands = tuple[Tensor, Tensor, Tensor | None, float | None, float]

_EPSILON = 1e-6


def assert_as_accurate(result: Tensor, reference: Tensor, truth: Tensor, magnitude: Tensor | float = 1.0) -> None:
    """Require ``|result - truth| <= |reference - truth| + 1e-6 * max(1, magnitude)``, element by element.

    The rule is that of flash-attention and Cut Cross-Entropy: a kernel may be as wrong as plain PyTorch on the same
    operands, plus a little. The little is that of float32 for every input dtype, because the operators promise float32
    accumulation; the usual allowance for bf16 (1e-2) could not tell that promise from a broken one.

    Parameters
    ----------
    result : Tensor, float32 [...]
        From the kernel.
    reference : Tensor, float32 [...]
        From plain PyTorch in float32.
    truth : Tensor, float64 [...]
        From plain PyTorch in float64 on the same operands.
    magnitude : Tensor or float
        Largest logit in absolute value, broadcast against `truth`; rounding errors grow with it.

    Raises
    ------
    AssertionError
        If the rule fails anywhere, or a NaN or an infinity is not where `truth` has it.

    Examples
    --------
    >>> truth = torch.tensor([1.0], dtype=torch.float64)
    >>> assert_as_accurate(truth.float(), truth.float(), truth)
    """
    assert result.dtype == torch.float32, result.dtype
    assert result.shape == truth.shape, (result.shape, truth.shape)
    finite = truth.isfinite()
    torch.testing.assert_close(result.double()[~finite], truth[~finite], rtol=0, atol=0, equal_nan=True)
    allowed = (reference.double() - truth).abs() + _EPSILON * torch.as_tensor(magnitude).double().clamp(min=1)
    excess = ((result.double() - truth).abs() - allowed)[finite]
    assert not excess.isnan().any(), "NaN where the truth is finite"
    assert excess.numel() == 0 or excess.max() <= 0, f"error exceeds the allowance by {excess.max():.3g}"


@dataclass
class Head:
    """Operands of one LM head, and the judgement of what an operator made of them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def random(
        cls,
        rows: int,
        width: int,
        vocab: int,
        dtype: torch.dtype = torch.float32,
        *,
        spread: float = 2.0,
        bias_dtype: torch.dtype | None = None,
        softcap: float | None = None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> Head:
        """Draw operands whose logits have the standard deviation `spread`."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(rows, width, generator=generator).to(dtype)
        weight = (torch.randn(vocab, width, generator=generator) * spread / width**0.5).to(dtype)
        bias = None if bias_dtype is None else torch.randn(vocab, generator=generator).to(bias_dtype)
        return cls(hidden, weight, bias, softcap, scale)

    @property
    def operands(self) -> HeadOperands:
        return self.hidden, self.weight, self.bias, self.softcap, self.scale

    @property
    def operands64(self) -> HeadOperands:
        bias = None if self.bias is None else self.bias.double()
        return self.hidden.double(), self.weight.double(), bias, self.softcap, self.scale

    def magnitude(self) -> Tensor:
        """Largest logit of each row in absolute value, before the soft-cap, float64 [N]."""
        hidden, weight, bias, _, scale = self.operands64
        logits = scale * (hidden @ weight.T + (0 if bias is None else bias))
        return logits.abs().amax(-1)

    def judge_label_scores(self, result: LabelScores, packed: tuple[Tensor, Tensor]) -> None:
        """Apply `assert_as_accurate` to logits and score."""

        def reference(operands: HeadOperands) -> LabelScores:
            hidden, weight, bias, softcap, scale = operands
            return label_scores_reference(hidden, weight, *packed, bias, softcap, scale)

        plain, truth = reference(self.operands), reference(self.operands64)
        magnitude = self.magnitude()
        assert_as_accurate(result.logits, plain.logits, truth.logits, magnitude[:, None])
        assert_as_accurate(result.score, plain.score, truth.score, magnitude)

    def judge_vocab_lse(self, result: Tensor) -> None:
        """Apply `assert_as_accurate` to a log-sum-exp."""
        plain, truth = vocab_lse_reference(*self.operands), vocab_lse_reference(*self.operands64)
        assert_as_accurate(result, plain, truth, self.magnitude())
