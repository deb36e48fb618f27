"""Every error that gatekern raises on purpose.

All derive from `GatekernError`, and each message says which item is wrong and what to do about it.
"""

from __future__ import annotations


class GatekernError(Exception):
    """Base class: catch this to catch everything that gatekern raises on purpose."""


class ItemError(GatekernError):
    """An error that may be about one item of a batch.

    Attributes
    ----------
    index : int or None
        Position of the offending item in the caller's batch, None when the error is not about one item.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class InputError(ItemError, ValueError):
    """An argument or one item of a batch cannot be used."""


class TemplateError(InputError):
    """A prompt template, or the tokenizer's chat template, cannot carry a context and a fact."""


class LabelError(InputError):
    """The labels cannot be read at the answer position (several tokens, shared token, out of range)."""


class UnsupportedModelError(GatekernError):
    """The model cannot be scored exactly; the message names the architecture and the reason."""


class BackendError(GatekernError, RuntimeError):
    """An explicitly requested backend cannot run here; the message carries the true cause."""


class NumericError(ItemError, ArithmeticError):
    """The model produced logits that are not finite."""
