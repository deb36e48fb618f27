"""Checks of option values."""

from __future__ import annotations

import math
from numbers import Integral, Real

from gatekern.errors import InputError

LOWEST_TEMPERATURE = 0.01  # below, logits over it overflow; `sample` takes 0 for the limit


def check_whole(name: str, value: object, lowest: int) -> None:
    """Raise `InputError` unless `value` is a whole number from `lowest` on."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        raise InputError(f"{name} must be a whole number from {lowest} on, got {value!r}")


def check_real(name: str, value: object, lowest: float, highest: float) -> None:
    """Raise `InputError` unless `value` is a number from `lowest` to `highest`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not lowest <= float(value) <= highest:  # type: ignore[arg-type]
        until = f"to {highest:g}" if math.isfinite(highest) else "on, and finite"
        raise InputError(f"{name} must be a number from {lowest:g} {until}, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `InputError` unless `value` is one of `choices`."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise InputError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
