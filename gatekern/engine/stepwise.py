"""The exact slower paths, for models whose state cannot be packed.

`BranchedPath` computes shared tokens once and copies the model's cache (keys, values, recurrent and convolution
states) for every branch. `FullPath` computes every prompt whole. Both run the model with its own attention.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gatekern.engine.running import running
from gatekern.engine.work import Work
from gatekern.layout import IntArray
from gatekern.planning import NO_TRIE, PrefixTree, TokenTrie, build_prefix_tree

_MAX_BRANCHES = 64  # cache copies held at once
_PADDING = 1.25  # prompts of a batch are at most this much longer than its shortest


class _Stepwise(ABC):
    """What both paths do with a trie and with a decode: every continuation is one more prompt."""

    @abstractmethod
    def last_rows(self, prompts: Sequence[IntArray], work: Work) -> Tensor:
        """Final hidden state at the last token of each prompt, [num_prompts, hidden_size]."""

    def hidden_rows(self, prompts: Sequence[IntArray], work: Work, trie: TokenTrie = NO_TRIE) -> Tensor:
        """Final hidden states at the end of each prompt and at each node, [num_prompts, 1 + num_nodes, hidden_size]."""
        paths = trie.paths()
        every = [np.concatenate([prompt, path]) for prompt in prompts for path in paths]
        return self.last_rows(every, work).view(len(prompts), len(paths), -1)

    def continuations(self, prompts: Sequence[IntArray], work: Work) -> Iterator[RepeatedContinuation]:
        """The same prompts, ready to be continued."""
        yield RepeatedContinuation(self, prompts, work)


class RepeatedContinuation:
    """Prompts that are read again with every further token, because their state cannot be kept for branches."""

    def __init__(self, path: _Stepwise, prompts: Sequence[IntArray], work: Work) -> None:
        self.prompts = np.arange(len(prompts))
        self._start = (path, list(prompts), path.last_rows(prompts, work), work)

    def start(self) -> RepeatedDecode:
        """A decode from the prompts' ends."""
        return RepeatedDecode(*self._start)


class RepeatedDecode:
    """A decode of some prompts; see `PackedDecode`."""

    def __init__(self, path: _Stepwise, texts: list[IntArray], hidden: Tensor, work: Work) -> None:
        self.hidden = hidden
        self._path = path
        self._texts = texts
        self._work = work

    def extend(self, parents: IntArray, tokens: IntArray) -> None:
        """Read one more token below some rows of `hidden`, and leave the new rows there."""
        self._texts = [np.append(self._texts[row], token) for row, token in zip(parents, tokens, strict=True)]
        self.hidden = self._path.last_rows(self._texts, self._work)


class FullPath(_Stepwise):
    """Every prompt whole, batches padded on the right (later tokens cannot change a causal model's earlier ones)."""

    name = "full"

    def __init__(self, decoder: nn.Module, device: torch.device, max_tokens: int, *, alone: bool = False) -> None:
        """`alone`: one prompt a forward, for models whose angles depend on the longest position of the call."""
        self.decoder = decoder
        self.device = device
        self.max_tokens = max_tokens
        self.alone = alone

    def last_rows(self, prompts: Sequence[IntArray], work: Work) -> Tensor:
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        hidden: list[Tensor | None] = [None] * len(prompts)
        while order:
            count = 1
            shortest = len(prompts[order[0]])
            while not self.alone and count < len(order):
                length = len(prompts[order[count]])
                if (count + 1) * length > self.max_tokens or length > _PADDING * shortest:
                    break
                count += 1
            batch, order = order[:count], order[count:]
            ids, lengths = _pad([prompts[at] for at in batch])
            with work.stage("forward"), running(self.decoder, self.device):
                if self.alone:  # a short call makes dynamic RoPE forget the longest prompt it has seen
                    self.decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
                out = self.decoder(
                    input_ids=ids.to(self.device),
                    attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long().to(self.device),
                    use_cache=False,
                ).last_hidden_state
                for row, at in enumerate(batch):
                    hidden[at] = out[row, int(lengths[row]) - 1].clone()
            work.count(ids.numel())
        return torch.stack([row for row in hidden if row is not None])


class BranchedPath(_Stepwise):
    """Walk the prefix tree; every inner segment extends a copy of its parent's cache, leaves run as one batch."""

    name = "branched"

    def __init__(self, decoder: nn.Module, device: torch.device, max_tokens: int) -> None:
        self.decoder = decoder
        self.device = device
        self.max_tokens = max_tokens
        # The argument and the output field, by version of transformers and by family.
        names = inspect.signature(decoder.forward).parameters
        self.cache_argument = next((name for name in ("cache", "cache_params") if name in names), "past_key_values")

    def last_rows(self, prompts: Sequence[IntArray], work: Work) -> Tensor:
        with work.stage("plan"):  # a branch costs a copy of the cache
            tree = build_prefix_tree(prompts, max_segment=self.max_tokens, min_saved=32)
        ends: dict[int, Tensor] = {}  # last hidden state of each segment
        with work.stage("forward"), running(self.decoder, self.device):
            self._walk(tree, ends, work)
        last_segment = np.searchsorted(tree.offsets, tree.rows[:, 0], side="right") - 1
        return torch.stack([ends[int(segment)] for segment in last_segment])

    def _walk(self, tree: PrefixTree, ends: dict[int, Tensor], work: Work) -> None:
        """Depth first: the leaves below a segment in batches, then each inner child on its own."""
        todo: list[tuple[int, Any]] = [(-1, None)]  # a segment, and the cache of the path above it
        while todo:
            segment, cache = todo.pop()
            if segment >= 0:
                cache = self._run(tree, [segment], cache, ends, work)
            children = np.nonzero(tree.parent == segment)[0].tolist()
            leaves = [child for child in children if tree.subtree_end[child] == child + 1]
            length = max((int(tree.offsets[leaf + 1] - tree.offsets[leaf]) for leaf in leaves), default=1)
            step = max(1, min(_MAX_BRANCHES, self.max_tokens // length))
            for at in range(0, len(leaves), step):
                self._run(tree, leaves[at : at + step], cache, ends, work)
            todo.extend((child, cache) for child in reversed(children) if tree.subtree_end[child] > child + 1)

    def _run(self, tree: PrefixTree, segments: list[int], cache: Any, ends: dict[int, Tensor], work: Work) -> Any:
        """Run sibling segments on copies of `cache`; returns the filled cache."""
        ids, lengths = _pad([tree.tokens[tree.offsets[s] : tree.offsets[s + 1]] for s in segments])
        start = int(tree.positions[tree.offsets[segments[0]]])
        positions = start + torch.arange(ids.shape[1]).expand_as(ids)
        arguments: dict[str, Any] = {}
        if cache is not None:
            branches = copy.deepcopy(cache)
            branches.reorder_cache(torch.zeros(len(segments), dtype=torch.long, device=self.device))
            arguments[self.cache_argument] = branches
        out = self.decoder(
            input_ids=ids.to(self.device), position_ids=positions.to(self.device), use_cache=True, **arguments
        )
        for row, segment in enumerate(segments):
            ends[segment] = out.last_hidden_state[row, int(lengths[row]) - 1].clone()
        work.count(ids.numel())
        return getattr(out, self.cache_argument)


def _pad(prompts: Sequence[IntArray]) -> tuple[Tensor, Tensor]:
    """Ids padded on the right with 0, int64 [batch, longest], and lengths, int64 [batch]."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.from_numpy(np.asarray(prompt, dtype=np.int64))
    return ids, lengths
