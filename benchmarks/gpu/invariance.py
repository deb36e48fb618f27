"""Bits of one prompt's hidden state, alone and in company: what depends on the batch, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.recorder import Recorder, Results, Row, Setup, name_of
from benchmarks.gpu.shapes import Shape
from gatekern.engine.backbone import Backbone
from gatekern.engine.work import Work
from gatekern.layout import IntArray
from gatekern.ops import dispatch

VOCAB, TARGET = 1000, 500  # the target's first token lies between those of strangers before and behind it
SHAPE = Shape("llama", "LlamaConfig", 4, 4, VOCAB, 1024, 2816, 16, 4, 64)
TINY = Shape("llama", "LlamaConfig", 1, 1, VOCAB, 32, 64, 4, 2, 16)


def invariance(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Every attention form that runs, deterministic and as usual, in float32 and bf16, eager."""
    for deterministic in (True, False):
        for dtype in (torch.bfloat16, torch.float32):
            for backend in dispatch.FORMS["prefix_attention"]:
                form = f"{backend}, deterministic" if deterministic else backend
                measure = partial(_measure, dtype, {"attention": backend, "deterministic": deterministic}, setup)
                recorder.case(measure, form=form, dtype=name_of(dtype))


def _measure(dtype: torch.dtype, options: dict[str, Any], setup: Setup) -> Iterator[Row]:
    """By case: whether bits are those of the prompt alone, and for the last two of the same batch."""
    dispatch.select("prefix_attention", options["attention"], setup.device)  # before a model is built in vain
    backbone = Backbone(_model(dtype, setup), **options)
    proved = False
    if options["deterministic"]:
        found = backbone.prove_invariance(lambda hidden: hidden[:, 0])
        proved = found.verified
        yield {"case": "the backbone's own test", "equal": proved, "promised": False, "detail": found.detail}
    target, batches = _batches(setup)

    def row(batch: list[IntArray]) -> Tensor:
        at = next(index for index, prompt in enumerate(batch) if prompt is target)
        return backbone.hidden_rows(batch, Work())[at, 0]

    alone = row([target])
    for case, batch in batches.items():
        yield _compared(f"{case}, against alone", row(batch), alone, proved)
    among = batches["between strangers"]
    order, middle = np.random.default_rng(1).permutation(len(among)), row(among)
    yield _compared("the same batch shuffled", row([among[at] for at in order]), middle, True)
    yield _compared("the same call again", row(among), middle, True)


@torch.no_grad()
def _model(dtype: torch.dtype, setup: Setup) -> PreTrainedModel:
    """With larger weights than a fresh model, whose attention is nearly uniform, so that most errors stay unseen."""
    model = (TINY if setup.tiny else SHAPE).build(dtype, setup.device)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model


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


def _compared(case: str, found: Tensor, expected: Tensor, promised: bool) -> Row:
    equal = torch.equal(found, expected)
    difference = (found.double() - expected.double()).abs().max().item()
    verdict = {True: "pass", False: "fail"}[equal] if promised else None
    return {"case": case, "equal": equal, "difference": difference, "promised": promised, "verdict": verdict}
