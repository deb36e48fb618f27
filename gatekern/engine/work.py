"""What a call cost: tokens, forwards and seconds per stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Work:
    """Counters of one `score_batch` call, filled in as it runs."""

    computed_tokens: int = 0
    forwards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, tokens: int) -> None:
        """One forward over `tokens` tokens (padding included)."""
        self.computed_tokens += tokens
        self.forwards += 1

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to stage `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
