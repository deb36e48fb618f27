"""Timing of several forms of one computation, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.gpu.recorder import Row, Setup, row_of

_FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50
_CLOCK_HZ = 2e9  # of the multiprocessors, at most
_LONGEST_DELAY_S = 0.02
_WARM_S = 0.1  # for the calls before the first round


def agreement(
    forms: Mapping[str, Callable[[], Tensor]], setup: Setup, tolerance: Mapping[str, float]
) -> dict[str, Row]:
    """Run every form once and compare it with the first that runs: nothing is timed that computes something else.

    Tolerances are relative to the largest value of the first form.

    Returns
    -------
    dict of str to Row
        ``first_s``: seconds of the call, with what it compiles. ``difference``: the largest, relative, with a verdict
        where it exceeds the form's tolerance. Or the verdict of a form that raised.
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
            difference = ((found - reference).abs().max() / reference.abs().max().clamp(min=1e-30)).item()
        except Exception as error:
            rows[name] = row_of(error)
        else:
            rows[name] = {"first_s": spent, "difference": difference}
            if not difference <= tolerance[name]:  # NaN fails too
                rows[name]["verdict"] = "fail"
    return rows


def compare(
    forms: Mapping[str, Callable[[], object]], setup: Setup, seconds: float, *, whole: bool = False
) -> dict[str, Row]:
    """Time forms that have run before in turn, in the opposite order in every other round.

    Parameters
    ----------
    forms : mapping of str to callable
    setup : Setup
    seconds : float
        Time for all forms together; sets the number of rounds, between 3 and 50.
    whole : bool
        What a caller waits for: wall time from call to result. Otherwise, on CUDA, what the device takes: time between
        events around the call, with the L2 cache overwritten before. The device is kept waiting so long that the host
        has launched everything by the time it begins; a form that itself waits for the device cannot get ahead.

    Returns
    -------
    dict of str to Row
        ``median_us``, ``p10_us``, ``p90_us``, ``rounds``. ``host_us``: median time until the call returns to Python, of
        up to three calls to an idle device. Or the verdict of a form that raised.
    """
    rows: dict[str, Row] = {}
    delays: dict[str, float] = {}
    estimate = 0.0
    for name, form in forms.items():
        calls: list[tuple[float, float]] = []
        try:
            while not calls or (len(calls) < 3 and sum(spent for _, spent in calls) < _WARM_S and not setup.tiny):
                calls.append(_call(form, setup))
        except Exception as error:
            rows[name] = row_of(error)
            continue
        host, spent = (statistics.median(one) for one in zip(*calls, strict=True))
        rows[name] = {"host_us": host * 1e6}
        delays[name] = min(1.5 * host + 50e-6, _LONGEST_DELAY_S)
        estimate += spent + delays[name]
    rounds = 1 if setup.tiny else min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(seconds / max(estimate, 1e-6))))
    cache = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=setup.device) if setup.cuda and not whole else None
    times: dict[str, list[float]] = {name: [] for name in delays}
    for at in range(rounds):
        for name in list(delays)[:: 1 if at % 2 == 0 else -1]:
            form = forms[name]
            spent = _call(form, setup)[1] if cache is None else _device_call(form, cache, delays[name])
            times[name].append(spent * 1e6)
    for name, found in times.items():
        cuts = statistics.quantiles(found, n=10, method="inclusive") if len(found) > 1 else found
        rows[name] |= {"median_us": statistics.median(found), "p10_us": cuts[0], "p90_us": cuts[-1], "rounds": rounds}
    return rows


def _call(form: Callable[[], object], setup: Setup) -> tuple[float, float]:
    """Seconds until a call to an idle device returns, and until its result is there."""
    setup.synchronize()
    begin = time.perf_counter()
    form()
    host = time.perf_counter() - begin
    setup.synchronize()
    return host, time.perf_counter() - begin


def _device_call(form: Callable[[], object], cache: Tensor, delay: float) -> float:
    """Seconds that the device takes for a call whose launches it finds ready."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    cache.zero_()
    torch.cuda._sleep(int(delay * _CLOCK_HZ))
    start.record()
    form()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
