"""The fast path: every prompt of a call in one packed stream, shared tokens computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gatekern.engine.attention import ForwardState, KeyValue, Layer, packed_attention
from gatekern.engine.compiling import CompiledLayers, compiled_layers, in_place_of
from gatekern.engine.pruning import last_layer, pruned
from gatekern.engine.running import running
from gatekern.engine.work import Work
from gatekern.errors import BackendError, UnsupportedModelError
from gatekern.layout import IntArray, Range, SegmentLayout
from gatekern.planning import NO_TRIE, PackedForward, TokenTrie, build_prefix_tree, pack

KeyValues = dict[int, KeyValue]  # by layer, [num_keys, num_kv_heads, head_dim]


@dataclass(frozen=True)
class Execution:
    """How packed forwards are run.

    Attributes
    ----------
    attention : str
        Backend of `gatekern.ops.prefix_attention`.
    invariant : bool
        Attention that adds in the same order in every batch.
    token_buckets : tuple of int
        Forwards are padded to the smallest of these that holds them; none: not padded.
    compiled : bool
        Decoder layers run as `torch.compile` made them.
    pruned : bool
        The last layer runs on the rows that are read only.
    """

    attention: str = "auto"
    invariant: bool = False
    token_buckets: tuple[int, ...] = ()
    compiled: bool = False
    pruned: bool = False

    def bucket(self, num_rows: int) -> int:
        """To how many rows these are padded."""
        return next((size for size in self.token_buckets if size >= num_rows), num_rows)


class PackedPath:
    """Hidden states at the end of each prompt, by packed forwards of at most `max_tokens` tokens."""

    name = "packed"

    def __init__(self, decoder: nn.Module, device: torch.device, max_tokens: int, execution: Execution) -> None:
        self.decoder = decoder
        self.device = device
        self.max_tokens = max_tokens
        self.execution = execution
        self.layers: list[Layer] = []  # attention layers of the model, learned from the first forward
        self._pruned = last_layer(decoder) if execution.pruned else None
        self._compiled = compiled_layers(decoder, but=self._pruned) if execution.compiled else {}

    def hidden_rows(self, prompts: Sequence[IntArray], work: Work, trie: TokenTrie = NO_TRIE) -> Tensor:
        """Final hidden states at the last token of each prompt and at each node below it.

        Returns
        -------
        Tensor [num_prompts, 1 + num_nodes, hidden_size]
        """
        hidden = None
        for forward, read, _ in self._forwards(prompts, trie, work, decode=False):
            if hidden is None:
                hidden = read.new_empty(len(prompts) * (1 + len(trie)), read.shape[-1])
            hidden[torch.from_numpy(forward.reads).to(read.device)] = read
        assert hidden is not None  # there is at least one prompt, hence one forward
        return hidden.view(len(prompts), 1 + len(trie), -1)

    def continuations(self, prompts: Sequence[IntArray], work: Work) -> Iterator[PackedContinuation]:
        """The same prompts, ready to be continued: those that end in one forward at a time."""
        for forward, read, keys in self._forwards(prompts, NO_TRIE, work, decode=True):
            if len(forward.reads):
                yield PackedContinuation(self, forward, read, keys, work)

    def _forwards(
        self, prompts: Sequence[IntArray], trie: TokenTrie, work: Work, *, decode: bool
    ) -> Iterator[tuple[PackedForward, Tensor, KeyValues]]:
        """Every forward with the hidden states that it reads and, in a decode, keys and values of all its keys."""
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
            keep = [(0, forward.layout.num_keys)] if decode else kept
            read, keys = self.run(forward.tokens, forward.layout, borrowed, keep, forward.read_rows, work)
            yield forward, read, keys
            borrowed = _take(keys, kept) if decode else keys

    def run(
        self,
        tokens: IntArray,
        layout: SegmentLayout,
        borrowed: KeyValues,
        keep: Sequence[Range],
        reads: IntArray,
        work: Work,
    ) -> tuple[Tensor, KeyValues]:
        """One forward: hidden states [num_reads, hidden_size] of `reads`, and keys and values of the ranges `keep`."""
        bucket = self.execution.bucket(len(tokens))
        tokens = np.append(tokens, np.zeros(bucket - len(tokens), dtype=np.int64))
        layout = layout.padded(bucket)
        with work.stage("forward"):
            # Layers that are compiled or pruned cannot tell what they are: a first, plain forward does.
            if not self.layers and (self._compiled or self._pruned is not None):
                self._run(tokens, layout, borrowed, (), None, {})
            rows = _padded(reads, self.execution.bucket(max(1, len(reads)))) if self._pruned is not None else None
            if rows is not None and len(rows) >= bucket:  # nothing to leave out
                rows = None
            hidden, kept = self._run(tokens, layout, borrowed, tuple(keep), rows, self._compiled)
        work.count(bucket)
        if rows is not None:
            return hidden[: len(reads)], kept
        return hidden[torch.from_numpy(reads).to(hidden.device)], kept

    def _run(
        self,
        tokens: IntArray,
        layout: SegmentLayout,
        borrowed: KeyValues,
        keep: tuple[Range, ...],
        rows: IntArray | None,
        compiled: CompiledLayers,
    ) -> tuple[Tensor, KeyValues]:
        """Hidden states of the whole stream, or of `rows` where the last layer is pruned."""
        state = ForwardState(
            layout=layout,
            borrowed=borrowed,
            keep=keep,
            backend=self.execution.attention,
            invariant=self.execution.invariant,
            layers=self.layers,
        )
        with ExitStack() as inside:
            inside.enter_context(running(self.decoder, self.device))
            inside.enter_context(packed_attention(self.decoder, state))
            inside.enter_context(in_place_of(compiled))
            if self._pruned is not None and rows is not None:
                inside.enter_context(pruned(self._pruned, state, rows))
            hidden: Tensor = self.decoder(
                input_ids=torch.from_numpy(tokens)[None].to(self.device),
                position_ids=torch.from_numpy(layout.row_positions)[None].to(self.device),
                use_cache=False,
            ).last_hidden_state[0]
        if not state.calls:
            raise UnsupportedModelError(f"{type(self.decoder).__name__} never called the registered attention function")
        if state.calls != len(self.layers):
            raise BackendError("some layers ran with another attention: something changed the model during the call")
        return hidden, state.kept


def _padded(rows: IntArray, size: int) -> IntArray:
    """Rows up to `size` by repeating the last; row 0 for none."""
    last = rows[-1:] if len(rows) else np.zeros(1, dtype=np.int64)
    return np.append(rows, np.repeat(last, size - len(rows)))


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
            every = np.arange(one.num_rows)
            stream, keys = self._path.run(tokens[part], one, self._keys, new, every, self._work)
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
