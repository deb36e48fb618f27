# ruff: noqa: N803
# mypy: ignore-errors
"""Device functions that the kernels share.

Parameters in capitals are constexpr, as everywhere in Triton; mypy cannot read its language.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    # Triton has no tanh that the interpreter also runs. Near 0 the exponential form cancels, so a series takes over:
    # below 0.25 its first dropped term is under 1e-8 of the result.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = 1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0, -far, far))


@triton.jit
def finish_logits(
    dots: tl.tensor, bias: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    z = scale * (dots + bias)
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def finite_shift(maximum: tl.tensor) -> tl.tensor:
    # exp(-inf - -inf) is NaN: shift by 0 when the maximum is infinite.
    return tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)


@triton.jit
def log_sum_exp(z: tl.tensor) -> tl.tensor:
    """Guarded log-sum-exp over the last axis of a [rows, columns] tile."""
    shift = finite_shift(tl.max(z, axis=1))
    return shift + tl.log(tl.sum(tl.exp(z - shift[:, None]), axis=1))
