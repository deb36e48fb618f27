"""What every forward of a model runs in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@contextmanager
def running(decoder: nn.Module, device: torch.device) -> Iterator[None]:
    """One forward at a time for everything that wraps this decoder, without autograd and autocast.

    The lock is the decoder's, not a verifier's: a packed forward switches the model's attention while it runs. Scores
    are computed in the dtype of the weights, wherever the caller is.
    """
    with _locks_guard:
        lock = _locks.setdefault(decoder, threading.RLock())
    with lock, torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
