"""Bits of one prompt's hidden state, alone and in company: what depends on the batch, and what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import backbones
from benchmarks.gpu.backbones import Shape, fields_of
from benchmarks.gpu.judge import forms, name_of
from benchmarks.gpu.recorder import NotHereError, Recorder, Results, Row, Setup
from gatekern.engine.backbone import Backbone
from gatekern.engine.work import Work
from gatekern.layout import IntArray

VOCAB, TARGET = 1000, 500  # the target's first token lies between those of strangers before and behind it
SHAPE = Shape("llama", "LlamaConfig", 4, 4, fields_of(VOCAB, 1024, 2816, 16, 4, 64, tie_word_embeddings=False))
TINY = Shape("llama", "LlamaConfig", 1, 1, fields_of(VOCAB, 32, 64, 4, 2, 16, tie_word_embeddings=False))


def invariance(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Every attention form that runs, as usual and deterministic, in float32 and bf16, eager."""
    choices: dict[str, tuple[dict[str, Any], str | None]] = {}
    for backend, reason in forms("prefix_attention", setup).items():
        choices[backend] = {"attention": backend, "deterministic": False}, reason
        choices[f"{backend}, deterministic"] = {"attention": backend, "deterministic": True}, reason
    for dtype in (torch.float32, torch.bfloat16):
        model = backbones.build((TINY if setup.tiny else SHAPE).config(), dtype, setup.device)
        _spread(model)
        for form, (options, reason) in choices.items():
            what = {"form": form, "dtype": name_of(dtype)}

            def measure(
                model: Any = model, options: dict[str, Any] = options, reason: str | None = reason, what: Row = what
            ) -> Row:
                if reason is not None:
                    raise NotHereError(reason)
                for case, row in _cases(model, options, setup).items():
                    recorder.add(**what, case=case, **row)
                return {}

            recorder.case(measure, **what, case="all")


def _cases(model: Any, options: dict[str, Any], setup: Setup) -> dict[str, Row]:
    """By case: whether bits are those of the prompt alone, and for the last two of the same batch."""
    whole = backbones.wrap(model, **options)
    cut = backbones.wrap(model, max_tokens=64 if setup.tiny else 512, **options)
    rows: dict[str, Row] = {}
    proved = False
    if options["deterministic"]:
        found = whole.prove_invariance(lambda hidden: hidden[:, 0])
        proved = found.verified
        rows["the backbone's own test"] = {"equal": proved, "promised": False, "detail": found.detail}
    target, batches = _batches(setup)

    def row(backbone: Backbone, batch: list[IntArray]) -> Tensor:
        at = next(index for index, prompt in enumerate(batch) if prompt is target)
        return backbone.hidden_rows(batch, Work())[at, 0]

    alone = row(whole, [target])
    for case, batch in batches.items():
        rows[f"{case}, against alone"] = _compared(row(whole, batch), alone, proved)
    among = batches["between strangers"]
    # Another budget is another backbone, which may pad its forwards to other sizes: nothing is promised.
    for case, batch in (("alone", [target]), ("between strangers", among)):
        rows[f"{case}, in small forwards, against alone"] = _compared(row(cut, batch), alone, False)
    order, middle = np.random.default_rng(1).permutation(len(among)), row(whole, among)
    rows["the same batch shuffled"] = _compared(row(whole, [among[at] for at in order]), middle, True)
    rows["the same call again"] = _compared(row(whole, among), middle, True)
    return rows


def _batches(setup: Setup) -> tuple[IntArray, dict[str, list[IntArray]]]:
    """A prompt and the company it is in. Streams are in the order of ids: first tokens say where a prompt stands."""
    scale, strangers = (20, 8) if setup.tiny else (200, 64)
    rng = np.random.default_rng(0)

    def prompts(count: int, low: int, high: int, length: int) -> list[IntArray]:
        """Prompts of unequal length whose first token is in ``low .. high``."""
        sizes = rng.integers(length // 2, length * 3 // 2, count)
        return [np.append(rng.integers(low, high), rng.integers(0, VOCAB, size)) for size in sizes]

    context = np.append(TARGET, rng.integers(0, VOCAB, scale))
    target = np.concatenate([context, rng.integers(0, VOCAB, scale // 6)])
    before, behind = prompts(strangers, 0, TARGET, scale), prompts(strangers, TARGET + 1, VOCAB, scale)
    siblings = [np.concatenate([context, fact]) for fact in prompts(strangers, 0, VOCAB, scale // 6)]
    half = strangers // 2
    return target, {
        "first of strangers": [target, *behind],
        "between strangers": [*before[:half], target, *behind[half:]],
        "last of strangers": [*before, target],
        "among facts of its own context": [target, *siblings],
        "beside a context ten times as long": [target, *prompts(1, TARGET + 1, VOCAB, 10 * scale)],
    }


def _compared(found: Tensor, expected: Tensor, promised: bool) -> Row:
    equal = torch.equal(found, expected)
    return {
        "equal": equal,
        "difference": (found.double() - expected.double()).abs().max().item(),
        "promised": promised,
        "verdict": "fail" if promised and not equal else "pass" if promised else None,
    }


@torch.no_grad()
def _spread(model: Any) -> None:
    """Larger weights than a fresh model has: its attention is nearly uniform, and most errors stay out of sight."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
