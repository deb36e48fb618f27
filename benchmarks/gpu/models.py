"""Whole models: packed forwards, eager and compiled, against one prompt a fact in padded batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.gpu import shapes
from benchmarks.gpu.attention import Workload
from benchmarks.gpu.machine import Ceilings
from benchmarks.gpu.parity import LABELS
from benchmarks.gpu.recorder import NotHereError, Recorder, Results, Row, Setup, row_of
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import agreement, compare
from gatekern.engine.backbone import Backbone
from gatekern.engine.head import text_config, text_parts
from gatekern.engine.work import Work
from gatekern.layout import IntArray
from gatekern.ops import label_scores
from gatekern.ops.label_scores import pack_groups
from gatekern.planning import build_prefix_tree

COMPILED = (shapes.QWEN_05B, shapes.QWEN_8B, shapes.LLAMA_1B)
#: Packed forms, by what a backbone is asked for.
FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, pruned": {"pruned": True},
    "packed, flash": {"attention": "flash"},
    "packed, compiled": {"compiled": True},
}
NAIVE_TOKENS = 16_384  # of a padded batch: enough to fill a GPU
TOLERANCE = 0.1  # of a score in bf16, where any two orders of summation differ; the tests bound both against float32
_SECONDS = 3.0  # for the timed rounds of all forms of a model together


def models(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Every shape, eager, against naive batches."""
    for shape in (shapes.TINY,) if setup.tiny else shapes.ALL:
        pruned = ("packed, pruned",) if shape.whole else ()
        _record(shape, ("naive", "packed", *pruned, "packed, flash"), setup, recorder, earlier)


def compiled(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Some shapes once more: eager and compiled in turn. Apart from the rest, because compiling takes its time."""
    for shape in (shapes.TINY,) if setup.tiny else COMPILED:
        _record(shape, ("packed", "packed, compiled"), setup, recorder, earlier)
        torch._dynamo.reset()  # compiled code holds its model


def _record(shape: Shape, names: Sequence[str], setup: Setup, recorder: Recorder, earlier: Results) -> None:
    measure = partial(_measure, shape, names, setup, recorder, earlier)
    recorder.case(measure, model=shape.name, layers=f"{shape.measured} of {shape.layers}")
    gc.collect()


def _measure(shape: Shape, names: Sequence[str], setup: Setup, recorder: Recorder, earlier: Results) -> Iterator[Row]:
    """Agreement of the scores, then times and peak memory, by form."""
    model = shape.build(torch.bfloat16, setup.device)
    vocab = text_config(model.config).vocab_size
    workload = Workload(shape.contexts, 24, 3, 8) if setup.tiny else Workload(shape.contexts, 1000, 20, 60)
    prompts = workload.prompts(vocab, jitter=workload.own // 4)
    positions = build_prefix_tree(prompts).positions
    longest = max(map(len, prompts))
    count = max(1, min(len(prompts), NAIVE_TOKENS // longest, len(positions) // longest))
    some = np.linspace(0, len(prompts) - 1, count).astype(np.int64)  # one naive batch, spread over all contexts

    rows: dict[str, Row] = {name: {} for name in names}
    forms: dict[str, Callable[[], Tensor]] = {}
    work: dict[str, Work] = {}
    for name in names:
        try:
            if name == "naive":
                forms[name] = _naive(model, [prompts[at] for at in some], setup)
            else:
                forms[name], rows[name] = _packed(name, model, prompts, vocab, work, setup)
        except Exception as error:  # whatever it is, it is this form's alone
            rows[name] = row_of(error)
    found = {name: form if name == "naive" else lambda form=form: form()[some] for name, form in forms.items()}
    for name, row in agreement(found, setup, dict.fromkeys(found, TOLERANCE)).items():
        rows[name] |= row
    agreeing = {name: form for name, form in forms.items() if "verdict" not in rows[name]}
    for name, row in compare(agreeing, setup, min(_SECONDS, recorder.left()), whole=True).items():
        rows[name] |= row | _peak(agreeing[name], setup)

    read = np.array([len(prompt) - 1 for prompt in prompts]) if shape.whole else positions
    floor = Ceilings.of(earlier).floor_s(0, shapes.least_flops(model, positions, read))
    for name, row in rows.items():
        if "median_us" in row:
            seconds, facts = row["median_us"] / 1e6, len(some) if name == "naive" else len(prompts)
            row |= {"workload": str(workload), "facts_per_s": facts / seconds, "ms": seconds * 1e3}
            if "median_us" in rows.get("naive", {}):
                row["ratio"] = row["facts_per_s"] / (len(some) / rows["naive"]["median_us"] * 1e6)
            if name == "naive":
                row["tokens"] = sum(len(prompts[at]) for at in some)
            else:
                spent = work[name]
                row |= {"tokens": spent.computed_tokens, "forwards": spent.forwards}
                row["plan_ms"] = spent.seconds["plan"] * 1e3
                row |= {"floor_ms": floor * 1e3, "percent_of_floor": 100 * floor / seconds} if floor else {}
        yield {"form": name, **row}


def _packed(
    name: str, model: PreTrainedModel, prompts: list[IntArray], vocab: int, work: dict[str, Work], setup: Setup
) -> tuple[Callable[[], Tensor], Row]:
    """Scores of all facts through gatekern, and what it took and chose when it wrapped the model."""
    if FORMS[name].get("compiled") and not setup.cuda:
        raise NotHereError("compiling for a CPU takes longer than everything else here; the tests do it")
    begin = time.perf_counter()
    backbone = Backbone(model, **FORMS[name])
    about = {"wrap_s": time.perf_counter() - begin, "path": backbone.path, "attention": backbone.attention}
    assert backbone.path == "packed", f"the load-time proof refused the packed path; {backbone.path} is left"
    head, groups = backbone.head, pack_groups(LABELS, vocab, setup.device)

    def run() -> Tensor:
        work[name] = Work()
        hidden = backbone.hidden_rows(prompts, work[name])[:, 0]
        return label_scores(hidden, head.weight, groups, head.bias, head.softcap, head.scale).score

    return run, about


def _naive(model: PreTrainedModel, prompts: list[IntArray], setup: Setup) -> Callable[[], Tensor]:
    """Whole prompts, padded on the right, no mask beside the causal one, logits of each last position only."""
    headed, decoder = text_parts(model)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = pad_sequence([torch.from_numpy(prompt) for prompt in prompts], batch_first=True)
    ids, last, rows = (x.to(setup.device) for x in (ids, lengths - 1, torch.arange(len(prompts))))
    groups = [torch.tensor(group, device=setup.device) for group in LABELS]
    cap = getattr(text_config(model.config), "final_logit_softcapping", None)

    @torch.no_grad()
    def run() -> Tensor:
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[rows, last]
        logits = headed.get_output_embeddings()(hidden).float()
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        yes, no = (logits.log_softmax(-1)[:, group].logsumexp(-1) for group in groups)
        return torch.sigmoid(yes - no)

    return run


def _peak(form: Callable[[], object], setup: Setup) -> Row:
    """GiB that a call allocates beyond what is held before it."""
    if not setup.cuda:
        return {}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    form()
    setup.synchronize()
    return {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}
