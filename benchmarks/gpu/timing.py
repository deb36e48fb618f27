"""Timing of several forms of one computation, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.gpu.recorder import Row, Setup, row_of

_FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU
_MOST_REPETITIONS = 50
_LEAST_REPETITIONS = 3


def agreement(forms: Mapping[str, Callable[[], Tensor]], setup: Setup, tolerance: float) -> dict[str, Row]:
    """Run every form once and compare it with the first that runs: nothing is timed that computes something else.

    Returns
    -------
    dict of str to Row
        ``first_s``: seconds of the call, with what it compiles. ``difference``: the largest, with a verdict where it
        exceeds `tolerance`. Or the verdict of a form that raised.
    """
    rows: dict[str, Row] = {}
    reference: Tensor | None = None
    for name, form in forms.items():
        begin = time.perf_counter()
        try:
            found = form().float()
            setup.synchronize()
            spent = time.perf_counter() - begin
            reference = found if reference is None else reference
            difference = (found - reference).abs().max().item()
        except Exception as error:
            rows[name] = row_of(error)
        else:
            rows[name] = {"first_s": spent, "difference": difference}
            if not difference <= tolerance:  # NaN fails too
                rows[name]["verdict"] = "fail"
    return rows


def compare(
    forms: Mapping[str, Callable[[], object]],
    setup: Setup,
    seconds: float,
    *,
    warm: bool = False,
    flush: bool = True,
) -> dict[str, Row]:
    """Time forms in turn, in the opposite order in every other round.

    Parameters
    ----------
    forms : mapping of str to callable
        One that raises is left out.
    setup : Setup
    seconds : float
        Time for all forms together; sets the number of rounds, between 3 and 50.
    warm : bool
        Every form has run before; otherwise it is called once more, so that nothing is compiled while it is timed.
    flush : bool
        Overwrite the L2 cache before every call (CUDA only).

    Returns
    -------
    dict of str to Row
        ``median_us``, ``p10_us``, ``p90_us``: on CUDA between events around the call, elsewhere wall time.
        ``host_us``: median time until the call returns to Python; where it is about the median, launches limit.
        ``rounds``. Or the verdict of a form that raised.
    """
    rows: dict[str, Row] = {}
    running: dict[str, Callable[[], object]] = {}
    estimate = 0.0
    for name, form in forms.items():
        try:
            if not warm:
                form()
                setup.synchronize()
            begin = time.perf_counter()
            form()
            setup.synchronize()
        except Exception as error:
            rows[name] = row_of(error)
            continue
        estimate += time.perf_counter() - begin
        running[name] = form
    rounds = min(_MOST_REPETITIONS, max(_LEAST_REPETITIONS, int(seconds / max(estimate, 1e-6))))
    times = _rounds(running, setup, 1 if setup.tiny else rounds, flush)
    for name in running:
        device_us, host_us = times[name]
        low, high = _deciles(device_us)
        rows[name] = {
            "median_us": statistics.median(device_us),
            "p10_us": low,
            "p90_us": high,
            "host_us": statistics.median(host_us),
            "rounds": len(device_us),
        }
    return {name: rows[name] for name in forms}


def rate(row: Row, amount: float, unit: str) -> Row:
    """Add ``per_s``, an amount of bytes or FLOP by the median time, to a row of `compare` that has one."""
    return row | {"per_s": amount / row["median_us"] * 1e6, "unit": unit} if "median_us" in row else row


def _rounds(
    forms: Mapping[str, Callable[[], object]], setup: Setup, rounds: int, flush: bool
) -> dict[str, tuple[list[float], list[float]]]:
    """Microseconds on the device and on the host, by form."""
    clock = _cuda_clock if setup.cuda else _wall_clock
    cache = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=setup.device) if setup.cuda and flush else None
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in forms}
    for at in range(rounds):
        order = list(forms) if at % 2 == 0 else list(forms)[::-1]
        for name in order:
            device_us, host_us = clock(forms[name], cache)
            times[name][0].append(device_us)
            times[name][1].append(host_us)
    return times


def _cuda_clock(form: Callable[[], object], cache: Tensor | None) -> tuple[float, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if cache is not None:
        cache.zero_()  # also keeps the device busy while the call is enqueued
    start.record()
    begin = time.perf_counter()
    form()
    host = time.perf_counter() - begin
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3, host * 1e6


def _wall_clock(form: Callable[[], object], cache: Tensor | None) -> tuple[float, float]:
    begin = time.perf_counter()
    form()
    spent = (time.perf_counter() - begin) * 1e6
    return spent, spent


def _deciles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]
