"""The fast path: every prompt of a call in one packed stream, shared tokens computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gatekern.engine.attention import ForwardState, KeyValue, packed_attention
from gatekern.engine.work import Work
from gatekern.errors import BackendError, UnsupportedModelError
from gatekern.planning import IntArray, PackedForward, build_prefix_tree, pack


class PackedPath:
    """Hidden states at the end of each prompt, by packed forwards of at most `max_tokens` tokens."""

    name = "packed"

    def __init__(self, decoder: nn.Module, device: torch.device, max_tokens: int) -> None:
        self.decoder = decoder
        self.device = device
        self.max_tokens = max_tokens
        self.layers: set[int] = set()  # attention layers of the model, learned from the first forward

    def hidden_rows(self, prompts: Sequence[IntArray], work: Work) -> Tensor:
        """Final hidden state at the last token of each prompt, [num_prompts, hidden_size]."""
        with work.stage("plan"):
            tree = build_prefix_tree(prompts, max_segment=self.max_tokens)
            forwards = pack(tree, self.max_tokens)
        borrowed: dict[int, KeyValue] = {}
        hidden = None
        while True:
            with work.stage("plan"):  # one at a time: a layout keeps masks that the next forward need not carry
                forward = next(forwards, None)
            if forward is None:
                break
            with work.stage("forward"):
                rows, borrowed = self._run(forward, borrowed)
                if hidden is None:
                    hidden = rows.new_empty(len(prompts), rows.shape[-1])
                hidden[torch.from_numpy(forward.read_prompts).to(rows.device)] = rows
            work.count(len(forward.tokens))
        assert hidden is not None  # there is at least one prompt, hence one forward
        return hidden

    def _run(self, forward: PackedForward, borrowed: dict[int, KeyValue]) -> tuple[Tensor, dict[int, KeyValue]]:
        state = ForwardState(
            layout=forward.layout,
            borrowed=borrowed,
            keep=tuple((begin, end) for _, begin, end in forward.kept),
        )
        with packed_attention(self.decoder, state):
            stream = self.decoder(
                input_ids=torch.from_numpy(forward.tokens)[None].to(self.device),
                position_ids=torch.from_numpy(forward.layout.row_positions)[None].to(self.device),
                use_cache=False,
            ).last_hidden_state[0]
        if not state.layers_run:
            raise UnsupportedModelError(f"{type(self.decoder).__name__} never called the registered attention function")
        if state.layers_run != (self.layers or state.layers_run):
            raise BackendError("some layers ran with another attention: something changed the model during the call")
        self.layers = state.layers_run
        rows = torch.from_numpy(forward.read_rows).to(stream.device)
        return stream[rows], state.kept
