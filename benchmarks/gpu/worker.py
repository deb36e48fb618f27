"""Sections in processes of their own: a hang, a crash or a lost CUDA context costs the case in which it happens."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CASE_S = 75.0  # without a word from a case, start of the process and compilation included: it hangs
GRACE_S = 40.0  # beyond a section's budget, for the case that runs when time is up


@dataclass(frozen=True)
class Section:
    """``module:function`` with the arguments (setup, recorder, earlier results), and its budget: no case begins later.

    On CUDA so many `processes` share the cases; elsewhere one takes all.
    """

    target: str
    seconds: float
    processes: int = 1


def serve(pipe: Connection, device: str, size: str | None) -> None:
    """Run what is asked for, until None is; send ``("case", (number, what))``, ``("row", row)``, ``("end", error)``."""
    while (request := pipe.recv()) is not None:
        begin, error = time.monotonic(), None
        target, seconds, first, share, earlier = request
        try:
            # Imported here, so that a broken installation is reported as any other failure is.
            import torch

            from benchmarks.gpu.recorder import Recorder, Setup

            setup = Setup.of(device, size)
            module, function = target.split(":")
            recorder = Recorder(pipe.send, setup, begin + seconds, first, share)
            getattr(importlib.import_module(module), function)(setup, recorder, earlier)
            gc.collect()
            if setup.cuda:
                torch.cuda.empty_cache()
        except Exception:
            error = traceback.format_exc()
        pipe.send(("end", error))


class Workers:
    """The processes, seen from outside. The first serves one section after the other, until one fails in it."""

    def __init__(self, device: str, size: str | None) -> None:
        self._options = device, size
        self._workers = [_Worker(device, size)]

    def run(self, section: Section, left: float, earlier: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Run one section in at most `left` seconds.

        Returns
        -------
        dict
            ``rows``, the ``seconds`` it took, and ``error``: tracebacks or reasons, None when all went well.
        """
        begin = time.monotonic()
        cuda = any(row.get("value") == "cuda" for row in earlier.get("environment", {}).get("rows", []))
        count = section.processes if cuda else 1
        self._workers += [_Worker(*self._options) for _ in range(count - len(self._workers))]
        end, limit = begin + min(section.seconds, left), begin + min(section.seconds + GRACE_S, left)
        rows: list[dict[str, Any]] = []
        with ThreadPoolExecutor(count) as pool:  # a thread for each process, to wait for it
            parts = [
                pool.submit(worker.run, section.target, (at, count), end, limit, earlier, rows)
                for at, worker in enumerate(self._workers[:count])
            ]
            errors = [error for part in parts for error in part.result()]
        if count > 1:
            rows.sort(key=lambda row: tuple(str(row.get(key)) for key in ("op", "dtype", "case")))
        for worker in self._workers[1:]:  # what is timed next has the device to itself
            worker.stop()
        return {"rows": rows, "seconds": round(time.monotonic() - begin, 1), "error": "\n".join(errors) or None}

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Worker:
    """One process, started when it is needed."""

    def __init__(self, device: str, size: str | None) -> None:
        self._options = device, size
        self._process: Any = None
        self._pipe: Any = None

    def run(
        self,
        target: str,
        share: tuple[int, int],
        end: float,
        limit: float,
        earlier: dict[str, dict[str, Any]],
        rows: list[dict[str, Any]],
    ) -> list[str]:
        """Collect the rows of a share of a section, and return what went wrong.

        After a failure a new process goes on behind the case in which it happened, until `end`; `limit` stops any.
        """
        errors: list[str] = []
        first = 0
        while True:
            number, what = -1, {}
            self._start()
            with suppress(OSError):  # it died since: that is read from the pipe
                self._pipe.send((target, end - time.monotonic(), first, share, earlier))
            while (message := self._next(limit))[0] in ("case", "row"):
                if message[0] == "row":
                    rows.append(message[1])
                else:
                    number, what = message[1]
            kind, error = message
            if error is None:
                return errors
            errors.append(error)
            self._kill()
            if kind == "lost" and what:
                rows.append({**what, "verdict": "error", "traceback": error})
            if number < first or time.monotonic() >= end:  # it got no further
                return errors
            first = number + 1

    def _next(self, limit: float) -> tuple[str, Any]:
        """The next message, ``("lost", reason)`` where none comes any more."""
        left = limit - time.monotonic()
        try:
            if self._pipe.poll(max(0.0, min(CASE_S, left))):
                message: tuple[str, Any] = self._pipe.recv()
                return message
        except (EOFError, OSError):
            self._process.join(10)
            return "lost", f"the process died with exit code {self._process.exitcode}"
        return "lost", f"no word for {CASE_S:.0f} s" if left > CASE_S else "stopped: its time and some grace were spent"

    def _start(self) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")  # a fork would inherit a CUDA state that it cannot use
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, *self._options))
            self._process.start()
            theirs.close()  # so that a dead process reads as the end of the pipe

    def stop(self) -> None:
        """End it when it is idle."""
        if self._process is not None:
            with suppress(OSError):  # it may be gone
                self._pipe.send(None)
                self._process.join(5)
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join(10)  # a process that waits for a device that hangs may not even die
        self._pipe.close()
        self._process = None
