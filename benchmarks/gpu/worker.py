"""Sections in a process of their own: a hang, a crash or a lost CUDA context costs the section in which it happens."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

GRACE_S = 45.0  # beyond a section's budget: imports, the start of CUDA, and the case that is running when time is up


def serve(pipe: Connection, device: str, size: str | None) -> None:
    """Run the sections that are asked for, until none is.

    ``(target, seconds, earlier)`` comes in, None at the end; ``("row", row)`` go out, then ``("end", error or None)``.
    """
    while (request := pipe.recv()) is not None:
        target, seconds, earlier = request
        error = None
        try:
            _run(pipe, device, size, target, seconds, earlier)
        except Exception:
            error = traceback.format_exc()
        pipe.send(("end", error))


def _run(pipe: Connection, device: str, size: str | None, target: str, seconds: float, earlier: dict[str, Any]) -> None:
    # Imported here, so that a broken installation is reported as any other failure is.
    import torch

    from benchmarks.gpu.recorder import Recorder, Setup

    setup = Setup.of(device, size)
    module, function = target.split(":")
    recorder = Recorder(lambda row: pipe.send(("row", row)), seconds, setup)
    getattr(importlib.import_module(module), function)(setup, recorder, earlier)
    gc.collect()
    if setup.cuda:
        torch.cuda.empty_cache()


class Worker:
    """The process, seen from outside; a new one is started when the last one failed."""

    def __init__(self, device: str, size: str | None) -> None:
        self._options = device, size
        self._context = multiprocessing.get_context("spawn")  # a fork would inherit a CUDA state that it cannot use
        self._process: Any = None
        self._pipe: Any = None

    def run(self, target: str, seconds: float, limit: float, earlier: dict[str, Any]) -> dict[str, Any]:
        """Run one section; it is told `seconds` and stopped after `limit`.

        Returns
        -------
        dict
            ``rows``, the ``seconds`` it took, and ``error``: a traceback or a reason, None when all went well.
        """
        if self._process is None:
            self._start()
        begin = time.monotonic()
        rows: list[dict[str, Any]] = []
        self._pipe.send((target, seconds, earlier))
        while True:
            try:
                if not self._pipe.poll(max(0.0, begin + limit - time.monotonic())):
                    error = f"stopped after {limit:.0f} s"
                    break
                kind, value = self._pipe.recv()
            except (EOFError, ConnectionError):
                self._process.join(10)
                error = f"the process died with exit code {self._process.exitcode}"
                break
            if kind == "end":
                error = value
                break
            rows.append(value)
        if error is not None:
            self._kill()
        return {"rows": rows, "seconds": round(time.monotonic() - begin, 1), "error": error}

    def stop(self) -> None:
        """End the process when it is idle."""
        if self._process is not None:
            with suppress(OSError):  # it may be gone
                self._pipe.send(None)
                self._process.join(5)
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(theirs, *self._options))
        self._process.start()
        theirs.close()  # so that a dead process reads as the end of the pipe
