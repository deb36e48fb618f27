"""Operators timed against what a user would write, as percent of what the machine's ceilings allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.gpu.judge import gate, why_not_timed
from benchmarks.gpu.machine import Ceilings
from benchmarks.gpu.recorder import Recorder, Results, Row, Setup
from benchmarks.gpu.tasks import Task, tasks
from benchmarks.gpu.timing import agreement, compare

_SECONDS = 0.4  # for the timed rounds of all forms of a task together


def operators(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """One row for every task and form; bytes and FLOP are the least that the task needs, whatever a form does."""
    limits = Ceilings.of(earlier)
    for op, case, build in tasks(setup):

        def measure(build: Callable[[], Task] = build, op: str = op, case: str = case) -> Row:
            for form, row in _measure(build(), setup, min(_SECONDS, recorder.left()), earlier, limits).items():
                recorder.add(op=op, case=case, form=form, **row)
            return {}

        recorder.case(measure, op=op, case=case, form="all")


def _measure(task: Task, setup: Setup, seconds: float, earlier: Results, limits: Ceilings) -> dict[str, Row]:
    """By form: agreement first, then times of those that agree."""
    gates = {name: why_not_timed(earlier, gate(task.op, name, task.dtype, task.dim)) for name in task.ours}
    rows: dict[str, Row] = {name: {"verdict": reason} for name, reason in gates.items() if reason is not None}
    forms: dict[str, Callable[[], Any]] = {
        name: form for name, form in {**task.ours, **task.peers}.items() if name not in rows
    }

    def comparable(name: str) -> Callable[[], Tensor]:
        return lambda: task.compared(forms[name]()) if name in task.ours else forms[name]()

    rows |= agreement({name: comparable(name) for name in forms}, setup, task.tolerance)
    agreeing = {name: form for name, form in forms.items() if "verdict" not in rows[name]}
    floor = limits.floor_us(task.bytes, task.flops, task.dtype)
    for name, timed in compare(agreeing, setup, seconds, warm=True).items():
        rows[name] |= timed | {"MB": task.bytes / 1e6, "GFLOP": task.flops / 1e9}
        if floor is not None and "median_us" in timed:
            rows[name] |= {"floor_us": floor, "percent_of_floor": 100 * floor / timed["median_us"]}
    return {name: rows[name] for name in [*task.ours, *task.peers]}
