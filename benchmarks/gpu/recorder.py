"""What a section works with: the device and sizes to use, and where its rows go."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gatekern.errors import BackendError

Row = dict[str, Any]  # plain Python values only: rows become JSON
Results = dict[str, dict[str, Any]]  # of the sections so far, by name


class NotHereError(Exception):
    """A case cannot run on this machine; the message is the true reason."""


@dataclass(frozen=True)
class Setup:
    """Where to run, and whether with the sizes of a smoke test."""

    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, device: str, size: str | None) -> Setup:
        """Resolve ``"auto"``; without a size a GPU takes the full one and a CPU the tiny one."""
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if name == "cuda":
            torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("highest")  # no TF32: float32 means float32 in every figure
        return cls(torch.device(name), (size or ("full" if name == "cuda" else "tiny")) == "tiny")

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device; raises what a kernel did wrong."""
        if self.cuda:
            torch.cuda.synchronize()


def row_of(error: Exception) -> Row:
    """What a case that raised becomes: a reason where it cannot run here, else an error with its traceback.

    A `BackendError` with a cause is no choice of the dispatcher: a kernel could not be built.
    """
    if isinstance(error, (BackendError, NotHereError)) and error.__cause__ is None:
        return {"verdict": f"skipped: {error}"}
    if isinstance(error, torch.OutOfMemoryError):
        return {"verdict": "skipped: out of memory"}
    return {"verdict": "error", "traceback": "".join(traceback.format_exception(error))}


class Recorder:
    """Takes the rows of a section, and keeps its time.

    Parameters
    ----------
    send : callable
        Receives every row as soon as it is known, so that what is stopped later keeps it.
    seconds : float
        What the section may take. Cases that have not begun by then are recorded as skipped.
    setup : Setup
    """

    def __init__(self, send: Callable[[Row], None], seconds: float, setup: Setup) -> None:
        self._send = send
        self._end = time.monotonic() + seconds
        self._setup = setup

    def left(self) -> float:
        """Seconds that remain."""
        return self._end - time.monotonic()

    def add(self, **row: Any) -> None:
        """Record a row; after an error, see whether the device still answers.

        A fault inside a kernel makes every later call fail. Then this raises and ends the section: the next one gets a
        process of its own.
        """
        self._send(row)
        if row.get("verdict") == "error":
            self._setup.synchronize()

    def case(self, measure: Callable[[], Row], **what: Any) -> None:
        """Run one case in isolation and record ``what`` it is with what it measured.

        A case that has recorded its rows itself measures nothing.
        """
        if self.left() <= 0:
            found: Row = {"verdict": "skipped: the section's time was spent"}
        else:
            try:
                found = measure()
            except Exception as error:  # whatever it is, it is this case's alone
                found = row_of(error)
        if found:
            self.add(**what, **found)
