"""What a section works with: the device and sizes to use, and where its rows go."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gatekern.errors import BackendError
from gatekern.ops import dispatch

Row = dict[str, Any]  # plain Python values only: rows become JSON
Results = dict[str, dict[str, Any]]  # of the sections so far, by name


class NotHereError(Exception):
    """A case cannot run on this machine; the message is the true reason."""


@dataclass(frozen=True)
class Setup:
    """Where to run, and whether with the sizes of a smoke test; without a size a GPU takes the full ones."""

    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, device: str, size: str | None) -> Setup:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if name == "cuda":
            torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("highest")  # no TF32: float32 means float32 in every figure
        torch.manual_seed(0)
        return cls(torch.device(name), (size or ("full" if name == "cuda" else "tiny")) == "tiny")

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device; raises what a kernel did wrong."""
        if self.cuda:
            torch.cuda.synchronize()


def row_of(error: Exception) -> Row:
    """What a case that raised becomes: a reason where it cannot run here, else an error with its traceback."""
    refused = isinstance(error, BackendError) and " cannot run on " in str(error)  # the dispatcher's words
    if refused or isinstance(error, NotHereError):
        return {"verdict": f"skipped: {error}"}
    if isinstance(error, torch.OutOfMemoryError):
        return {"verdict": "skipped: out of memory"}
    return {"verdict": "error", "traceback": "".join(traceback.format_exception(error))}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Recorder:
    """Sends the rows of a section as soon as they are known, and keeps its time.

    Parameters
    ----------
    send : callable
        Receives ``("case", (number, what))`` as a case begins, and ``("row", row)``.
    setup : Setup
    end : float
        `time.monotonic` at which the section's time is up. Later cases are recorded as skipped.
    first : int
        Cases before this one have run.
    share : tuple of int (at, count)
        Of every `count` cases the one with the number `at` is run here.
    """

    def __init__(
        self, send: Callable[[tuple[str, Any]], None], setup: Setup, end: float, first: int, share: tuple[int, int]
    ) -> None:
        self._send, self._setup, self._end, self._first, self._share = send, setup, end, first, share
        self._number = -1

    def left(self) -> float:
        return self._end - time.monotonic()

    def add(self, **row: Any) -> None:
        """Record a row. After an error, see whether the device still answers: a fault in a kernel ends the process."""
        self._send(("row", row))
        if row.get("verdict") == "error":
            self._setup.synchronize()

    def case(self, measure: Callable[[], Iterable[Row]], **what: Any) -> None:
        """Run one case and record ``what`` it is with each row that it finds."""
        self._number += 1
        at, count = self._share
        if self._number < self._first or self._number % count != at:
            return
        self._send(("case", (self._number, what)))
        if self.left() <= 0:
            self.add(**what, verdict="skipped: the section's time was spent")
            return
        # One kernel that cannot be built takes its operator's Triton form out for good: here each case is asked anew.
        dispatch._broken.clear()
        for row in _isolated(measure):
            self.add(**{**what, **row})


def _isolated(measure: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    try:
        yield from measure()
    except Exception as error:  # whatever it is, it is this case's alone
        yield row_of(error)
