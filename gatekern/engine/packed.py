"""The fast path: every prompt of a call in one packed stream, shared tokens computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gatekern.engine.attention import ForwardState, KeyValue, packed_attention
from gatekern.engine.running import running
from gatekern.engine.work import Work
from gatekern.errors import BackendError, UnsupportedModelError
from gatekern.layout import IntArray, Range, SegmentLayout
from gatekern.planning import NO_TRIE, PackedForward, TokenTrie, build_prefix_tree, pack

KeyValues = dict[int, KeyValue]  # by layer, [num_keys, num_kv_heads, head_dim]


class PackedPath:
    """Hidden states at the end of each prompt, by packed forwards of at most `max_tokens` tokens."""

    name = "packed"

    def __init__(self, decoder: nn.Module, device: torch.device, max_tokens: int) -> None:
        self.decoder = decoder
        self.device = device
        self.max_tokens = max_tokens
        self.layers: set[int] = set()  # attention layers of the model, learned from the first forward

    def hidden_rows(self, prompts: Sequence[IntArray], work: Work, trie: TokenTrie = NO_TRIE) -> Tensor:
        """Final hidden states at the last token of each prompt and at each node below it.

        Returns
        -------
        Tensor [num_prompts, 1 + num_nodes, hidden_size]
        """
        hidden = None
        for forward, stream, _ in self._forwards(prompts, trie, work, decode=False):
            if hidden is None:
                hidden = stream.new_empty(len(prompts) * (1 + len(trie)), stream.shape[-1])
            hidden[_on(stream, forward.reads)] = stream[_on(stream, forward.read_rows)]
        assert hidden is not None  # there is at least one prompt, hence one forward
        return hidden.view(len(prompts), 1 + len(trie), -1)

    def continuations(self, prompts: Sequence[IntArray], work: Work) -> Iterator[PackedContinuation]:
        """The same prompts, ready to be continued: those that end in one forward at a time."""
        for forward, stream, keys in self._forwards(prompts, NO_TRIE, work, decode=True):
            if len(forward.reads):
                hidden = stream[_on(stream, forward.read_rows)]
                yield PackedContinuation(self, forward, hidden, keys, work)

    def _forwards(
        self, prompts: Sequence[IntArray], trie: TokenTrie, work: Work, *, decode: bool
    ) -> Iterator[tuple[PackedForward, Tensor, KeyValues]]:
        """Every forward with its stream of hidden states and, in a decode, keys and values of its whole key axis."""
        max_tokens = max(self.max_tokens, len(trie))
        with work.stage("plan"):
            tree = build_prefix_tree(prompts, trie=trie, max_segment=max_tokens)
            forwards = pack(tree, max_tokens)
        borrowed: KeyValues = {}
        while True:
            with work.stage("plan"):  # one at a time: a layout keeps masks that the next forward need not carry
                forward = next(forwards, None)
            if forward is None:
                return
            kept = [(begin, end) for _, begin, end in forward.kept]
            stream, keys = self.run(
                forward.tokens, forward.layout, borrowed, [(0, forward.layout.num_keys)] if decode else kept, work
            )
            yield forward, stream, keys
            borrowed = _take(keys, kept) if decode else keys

    def run(
        self, tokens: IntArray, layout: SegmentLayout, borrowed: KeyValues, keep: Sequence[Range], work: Work
    ) -> tuple[Tensor, KeyValues]:
        """One forward: hidden states [num_rows, hidden_size], and the keys and values of the ranges `keep`."""
        state = ForwardState(layout=layout, borrowed=borrowed, keep=tuple(keep))
        with work.stage("forward"), running(self.decoder, self.device), packed_attention(self.decoder, state):
            stream: Tensor = self.decoder(
                input_ids=torch.from_numpy(tokens)[None].to(self.device),
                position_ids=torch.from_numpy(layout.row_positions)[None].to(self.device),
                use_cache=False,
            ).last_hidden_state[0]
        if not state.layers_run:
            raise UnsupportedModelError(f"{type(self.decoder).__name__} never called the registered attention function")
        if state.layers_run != (self.layers or state.layers_run):
            raise BackendError("some layers ran with another attention: something changed the model during the call")
        self.layers = state.layers_run
        work.count(len(tokens))
        return stream, state.kept


class PackedContinuation:
    """Prompts whose keys and values are held, so that a further token costs only itself.

    Attributes
    ----------
    prompts : int64 [num_prompts]
        Which prompts of the call these are.
    """

    def __init__(self, path: PackedPath, forward: PackedForward, hidden: Tensor, keys: KeyValues, work: Work) -> None:
        self.prompts = forward.reads
        self._start = (path, forward.layout, forward.read_rows, hidden, keys, work)

    def start(self) -> PackedDecode:
        """A decode from the prompts' ends; any number of them, one after the other."""
        return PackedDecode(*self._start)


class PackedDecode:
    """A decode of some prompts, step by step.

    Attributes
    ----------
    hidden : Tensor [num_rows, hidden_size]
        Final hidden states of the last step's rows; at first those at the ends of the prompts.
    """

    def __init__(
        self, path: PackedPath, layout: SegmentLayout, rows: IntArray, hidden: Tensor, keys: KeyValues, work: Work
    ) -> None:
        self.hidden = hidden
        self._path = path
        self._layout = layout
        self._rows = rows  # of the layout, for each row of `hidden`
        self._keys = keys
        self._work = work

    def extend(self, parents: IntArray, tokens: IntArray) -> None:
        """Read one more token below some rows of `hidden`, and leave the new rows there.

        Parameters
        ----------
        parents : int64 [num_new]
            Ascending; repeated where a row branches.
        tokens : int64 [num_new]
        """
        parents = self._rows[parents]
        budget = self._path.max_tokens
        streams, added = [], []
        with self._work.stage("plan"):
            layout = self._layout.extended(parents)
        for begin in range(0, len(tokens), budget):
            part = slice(begin, begin + budget)
            one = layout if len(tokens) <= budget else self._layout.extended(parents[part])
            new = [(one.num_keys - one.num_rows, one.num_keys)]
            stream, keys = self._path.run(tokens[part], one, self._keys, new, self._work)
            streams.append(stream)
            added.append(keys)
        self._keys = {
            layer: (
                torch.cat([key, *(keys[layer][0] for keys in added)]),
                torch.cat([value, *(keys[layer][1] for keys in added)]),
            )
            for layer, (key, value) in self._keys.items()
        }
        self._layout = layout
        self._rows = np.arange(len(tokens))
        self.hidden = torch.cat(streams)


def _take(keys: KeyValues, ranges: Sequence[Range]) -> KeyValues:
    """Keys and values of some ranges of the key axis, one after the other."""
    if not ranges:
        return {}
    return {
        layer: (torch.cat([key[a:b] for a, b in ranges]), torch.cat([value[a:b] for a, b in ranges]))
        for layer, (key, value) in keys.items()
    }


def _on(stream: Tensor, index: IntArray) -> Tensor:
    return torch.from_numpy(index).to(stream.device)
