"""The ways to score a fact: each turns prompts into evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from gatekern.errors import InputError
from gatekern.modes.adaptive import AdaptiveOptions
from gatekern.modes.exact import ExactOptions
from gatekern.modes.sample import SampleOptions

Mode = Literal["logprob", "exact", "sample", "adaptive"]
Task = Literal["verify", "rate"]

#: Questions that each mode puts to the model, in order.
TASKS: dict[str, tuple[Task, ...]] = {
    "logprob": ("verify",),
    "exact": ("rate",),
    "sample": ("rate",),
    "adaptive": ("verify", "rate"),
}


@dataclass(frozen=True)
class LogprobOptions:
    """``mode="logprob"`` has no options."""


Options = LogprobOptions | ExactOptions | SampleOptions | AdaptiveOptions
_OPTIONS: dict[str, type[Options]] = {
    "logprob": LogprobOptions,
    "exact": ExactOptions,
    "sample": SampleOptions,
    "adaptive": AdaptiveOptions,
}


def check_mode(mode: str) -> None:
    """Raise `InputError` unless `mode` is one."""
    if not isinstance(mode, str) or mode not in TASKS:
        raise InputError(f"mode={mode!r} is not one of {', '.join(TASKS)}")


def mode_options(mode: str, options: Mapping[str, Any]) -> Options:
    """The checked options of a mode.

    Raises
    ------
    InputError
        Unknown mode, an option that is not the mode's, one that is missing, or a value out of range.

    Examples
    --------
    >>> mode_options("exact", {"law": "masked"})
    ExactOptions(law='masked', temperature=1.0)
    """
    check_mode(mode)
    known = fields(_OPTIONS[mode])
    names = ", ".join(field.name for field in known) or "none"
    for name in options:
        if name not in {field.name for field in known}:
            raise InputError(f"{name!r} is not an option of mode={mode!r}, which takes: {names}")
    for field in known:
        if field.default is MISSING and field.name not in options:
            raise InputError(f"mode={mode!r} needs {field.name}")
    return _OPTIONS[mode](**options)
