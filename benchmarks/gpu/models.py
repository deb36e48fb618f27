"""Whole models: packed forwards, eager and compiled, against one prompt a fact in padded batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import backbones
from benchmarks.gpu.backbones import Shape
from benchmarks.gpu.heads import GROUPS
from benchmarks.gpu.machine import Ceilings
from benchmarks.gpu.prompts import Workload
from benchmarks.gpu.recorder import NotHereError, Recorder, Results, Row, Setup, row_of
from benchmarks.gpu.timing import agreement, compare
from gatekern.engine.backbone import Backbone
from gatekern.engine.head import text_parts
from gatekern.engine.work import Work
from gatekern.layout import IntArray
from gatekern.ops import label_scores
from gatekern.ops.label_scores import pack_groups
from gatekern.planning import build_prefix_tree

SHAPES = (
    backbones.QWEN_05B,
    backbones.LLAMA_1B,
    backbones.QWEN_8B,
    backbones.SMOLLM2,
    backbones.QWEN_32B,
    backbones.LLAMA_70B,
    backbones.GEMMA_31B,
    backbones.SCOUT,
)
COMPILED = (backbones.QWEN_05B, backbones.QWEN_8B, backbones.LLAMA_1B)
#: Packed forms, by what a backbone is asked for.
FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, flash": {"attention": "flash"},
    "packed, compiled": {"compiled": True},
}
NAIVE_TOKENS = 16_384  # of a padded batch: enough to fill a GPU
TOLERANCE = 0.1  # of a score in bf16, where any two orders of summation differ; the tests bound both against float32
_SECONDS = 3.0  # for the timed rounds of all forms of a model together


def models(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Every shape, eager, against naive batches."""
    for shape in (backbones.TINY,) if setup.tiny else SHAPES:
        _record(shape, ("packed", "packed, flash", "naive"), setup, recorder, earlier)


def compiled(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Some shapes once more: eager and compiled in turn. Apart from the rest, because compiling takes its time."""
    for shape in (backbones.TINY,) if setup.tiny else COMPILED:
        _record(shape, ("packed", "packed, compiled"), setup, recorder, earlier)
        torch._dynamo.reset()  # compiled code holds its model


def _record(shape: Shape, forms: Sequence[str], setup: Setup, recorder: Recorder, earlier: Results) -> None:
    what = {"model": shape.name, "layers": f"{shape.measured} of {shape.layers}"}

    def measure() -> Row:
        for form, row in Measurement(shape, setup).rows(forms, min(_SECONDS, recorder.left()), earlier).items():
            recorder.add(**what, form=form, **row)
        return {}

    recorder.case(measure, **what, form="all")
    gc.collect()


class Measurement:
    """One model with its prompts."""

    def __init__(self, shape: Shape, setup: Setup) -> None:
        self.shape, self.setup = shape, setup
        work = Workload(shape.contexts, 24, 3, 8) if setup.tiny else Workload(shape.contexts, 1000, 20, 60)
        self.workload = work
        self.model = backbones.build(shape.config(), torch.bfloat16, setup.device)
        self.config = self.model.config.get_text_config(decoder=True)
        self.prompts = work.prompts(self.config.vocab_size, jitter=work.own // 4)
        self.tree = build_prefix_tree(self.prompts)
        self.groups = pack_groups(GROUPS, self.config.vocab_size, setup.device)
        self.some = self._batch()

    def rows(self, names: Sequence[str], seconds: float, earlier: Results) -> dict[str, Row]:
        """Agreement of the scores, then times and peak memory, by form."""
        rows: dict[str, Row] = {}
        forms: dict[str, Callable[[], Tensor]] = {}
        work: dict[str, Work] = {}
        about: dict[str, Row] = {}
        for name in names:
            try:
                if name == "naive":
                    forms[name], about[name] = self._naive(), {}
                else:
                    forms[name], about[name] = self._packed(name, work)
            except Exception as error:
                rows[name] = row_of(error)
        compared = {name: self._of_batch(name, form) for name, form in forms.items()}
        for name, row in agreement(compared, self.setup, TOLERANCE).items():
            rows[name] = about[name] | row
        agreeing = {name: form for name, form in forms.items() if "verdict" not in rows[name]}
        for name, timed in compare(agreeing, self.setup, seconds, warm=True, flush=False).items():
            rows[name] |= timed | self._peak(agreeing[name])
        for name in agreeing:
            if "median_us" in rows[name]:
                rows[name] |= self._figures(name, rows, work.get(name), earlier)
        return {name: rows[name] for name in names}

    def _packed(self, name: str, work: dict[str, Work]) -> tuple[Callable[[], Tensor], Row]:
        """Scores of all facts through gatekern, and what it took and chose when it wrapped the model."""
        options = FORMS[name]
        if options.get("compiled") and not self.setup.cuda:
            raise NotHereError("compiling for a CPU takes longer than everything else here; the tests do it")
        begin = time.perf_counter()
        backbone: Backbone = backbones.wrap(self.model, **options)
        about = {"wrap_s": time.perf_counter() - begin, "path": backbone.path, "attention": backbone.attention}
        head = backbone.head

        def run() -> Tensor:
            work[name] = Work()
            hidden = backbone.hidden_rows(self.prompts, work[name])[:, 0]
            return label_scores(hidden, head.weight, self.groups, head.bias, head.softcap, head.scale).score

        return run, about

    def _naive(self) -> Callable[[], Tensor]:
        """Whole prompts, padded on the right, no mask beside the causal one, logits of each last position only."""
        headed, decoder = text_parts(self.model)
        lengths = torch.tensor([len(self.prompts[at]) for at in self.some])
        ids = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
        for row, at in enumerate(self.some):
            ids[row, : lengths[row]] = torch.from_numpy(self.prompts[at])
        ids, last = ids.to(self.setup.device), (lengths - 1).to(self.setup.device)
        rows = torch.arange(len(lengths), device=self.setup.device)
        groups = [torch.tensor(group, device=self.setup.device) for group in GROUPS]
        cap = getattr(self.config, "final_logit_softcapping", None)

        @torch.no_grad()
        def run() -> Tensor:
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[rows, last]
            logits = headed.get_output_embeddings()(hidden).float()
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            yes, no = (logits.log_softmax(-1)[:, group].logsumexp(-1) for group in groups)
            return torch.sigmoid(yes - no)

        return run

    def _of_batch(self, name: str, form: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Scores of the facts that the naive batch has too."""
        return form if name == "naive" else lambda: form()[self.some]

    def _batch(self) -> IntArray:
        """Facts of one naive batch, spread over all contexts."""
        longest = max(map(len, self.prompts))
        count = max(1, min(len(self.prompts), NAIVE_TOKENS // longest, len(self.tree.tokens) // longest))
        return np.linspace(0, len(self.prompts) - 1, count).astype(np.int64)

    def _peak(self, form: Callable[[], Tensor]) -> Row:
        """GiB that a call allocates beyond what is held before it."""
        if not self.setup.cuda:
            return {}
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        form()
        self.setup.synchronize()
        return {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}

    def _figures(self, name: str, rows: dict[str, Row], work: Work | None, earlier: Results) -> Row:
        """Facts per second, and time against floor and prediction."""
        seconds = rows[name]["median_us"] / 1e6
        facts = len(self.some) if name == "naive" else len(self.prompts)
        row: Row = {
            "workload": str(self.workload),
            "facts_per_s": facts / seconds,
            "extrapolated": facts / seconds * self.shape.measured / self.shape.layers,
            "ms": seconds * 1e3,
            "tokens": sum(len(self.prompts[at]) for at in self.some),
        }
        naive = rows.get("naive", {}).get("median_us")
        if naive is not None:
            row["ratio"] = row["facts_per_s"] / (len(self.some) / naive * 1e6)
        if work is None:
            return row
        linear, attention = backbones.linear_parameters(self.model), backbones.attention_flops(self.model, self.tree)
        row |= {"tokens": work.computed_tokens, "forwards": work.forwards, "plan_ms": work.seconds["plan"] * 1e3}
        peak = Ceilings.of(earlier).flops.get("bfloat16")
        if peak is not None:
            floor = (2 * linear * work.computed_tokens + attention) / peak
            row |= {"floor_ms": floor * 1e3, "percent_of_floor": 100 * floor / seconds}
        if self.setup.cuda:
            fused = name.endswith("compiled")
            predicted = backbones.predicted_seconds(
                self.model, work.computed_tokens, linear, attention, work.forwards, compiled=fused
            )
            row["predicted_ms"] = None if predicted is None else predicted * 1e3
        return row
