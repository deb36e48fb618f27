"""What people do instead, in plain transformers, on the same prompts: scores and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

import gatekern as gk
from benchmarks.latency.workloads import Pair

Peer = Callable[[gk.Verifier, Sequence[Pair]], np.ndarray]


def _scores(verifier: gk.Verifier, logits: Tensor) -> list[float]:
    yes, no = (logits.float()[:, list(ids)].logsumexp(-1) for ids in (verifier.labels.yes, verifier.labels.no))
    return torch.sigmoid(yes - no).tolist()


@torch.no_grad()
def one_by_one(verifier: gk.Verifier, pairs: Sequence[Pair]) -> np.ndarray:
    """One forward per fact; logits of the last position only."""
    scores: list[float] = []
    for pair in pairs:
        ids = torch.tensor([verifier.encode(*pair)])
        scores += _scores(verifier, verifier.model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1])
    return np.array(scores)


@torch.no_grad()
def padded(verifier: gk.Verifier, pairs: Sequence[Pair], batch: int = 32) -> np.ndarray:
    """Left-padded batches of 32, position ids from the mask."""
    scores: list[float] = []
    for at in range(0, len(pairs), batch):
        prompts = [verifier.encode(*pair) for pair in pairs[at : at + batch]]
        length = max(map(len, prompts))
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        out = verifier.model(
            input_ids=torch.tensor([[0] * (length - len(p)) + p for p in prompts]),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            logits_to_keep=1,
            use_cache=False,
        )
        scores += _scores(verifier, out.logits[:, -1])
    return np.array(scores)


@torch.no_grad()
def prefix_cache(verifier: gk.Verifier, pairs: Sequence[Pair], batch: int = 16) -> np.ndarray:
    """Context prefilled once into a `DynamicCache`, repeated for batches of right-padded suffixes."""
    scores: list[float] = []
    for _, group in groupby(pairs, key=lambda pair: pair[0]):
        prompts = [verifier.encode(*pair) for pair in group]
        shared = min(_common(prompts[0], prompt) for prompt in prompts)
        shared = min(shared, min(map(len, prompts)) - 1)
        cache = DynamicCache(config=verifier.model.config)
        verifier.model(input_ids=torch.tensor([prompts[0][:shared]]), cache=cache, logits_to_keep=1)
        for at in range(0, len(prompts), batch):
            suffixes = [prompt[shared:] for prompt in prompts[at : at + batch]]
            length = max(map(len, suffixes))
            branch = copy.deepcopy(cache)
            branch.batch_repeat_interleave(len(suffixes))
            hidden = verifier.model.base_model(
                input_ids=torch.tensor([suffix + [0] * (length - len(suffix)) for suffix in suffixes]),
                position_ids=torch.arange(shared, shared + length).expand(len(suffixes), -1),
                cache=branch,
            ).last_hidden_state
            last = hidden[range(len(suffixes)), [len(suffix) - 1 for suffix in suffixes]]
            scores += _scores(verifier, verifier.model.lm_head(last))
    return np.array(scores)


def _common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


PEERS: dict[str, Peer] = {"one by one": one_by_one, "padded 32": padded, "prefix cache": prefix_cache}
