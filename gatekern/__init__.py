"""Verification kernels for the memory of LLM agents: score many facts against their source in one packed forward.

Public names are imported on first use, so that ``import gatekern`` costs milliseconds and needs neither torch nor a
compiler, Triton or a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gatekern.errors import (
        BackendError,
        GatekernError,
        InputError,
        LabelError,
        NumericError,
        TemplateError,
        UnsupportedModelError,
    )
    from gatekern.labels import LabelSet
    from gatekern.ops.score_grammar import ParseStatus
    from gatekern.prompts import PromptTemplate
    from gatekern.replies import ReplyScores, parse_scores
    from gatekern.results import ScoreBatch, Status, Usage
    from gatekern.verifier import Verifier, score_batch

_HOME = {
    "errors": (
        "BackendError",
        "GatekernError",
        "InputError",
        "LabelError",
        "NumericError",
        "TemplateError",
        "UnsupportedModelError",
    ),
    "labels": ("LabelSet",),
    "ops.score_grammar": ("ParseStatus",),
    "prompts": ("PromptTemplate",),
    "replies": ("ReplyScores", "parse_scores"),
    "results": ("ScoreBatch", "Status", "Usage"),
    "verifier": ("Verifier", "score_batch"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BackendError",
    "GatekernError",
    "InputError",
    "LabelError",
    "LabelSet",
    "NumericError",
    "ParseStatus",
    "PromptTemplate",
    "ReplyScores",
    "ScoreBatch",
    "Status",
    "TemplateError",
    "UnsupportedModelError",
    "Usage",
    "Verifier",
    "__version__",
    "parse_scores",
    "score_batch",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"gatekern.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'gatekern' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
