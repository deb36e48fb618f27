"""Packed prompts from random token ids: contexts with facts below them, no tokenizer needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gatekern.layout import IntArray, SegmentLayout
from gatekern.planning import NO_TRIE, PrefixTree, TokenTrie, build_prefix_tree, pack


@dataclass(frozen=True)
class Workload:
    """``contexts`` of ``prefix`` tokens, ``facts`` below each of ``own`` tokens."""

    contexts: int
    prefix: int
    facts: int
    own: int

    def __str__(self) -> str:
        return f"{self.contexts} x ({self.prefix:,} + {self.facts} x {self.own})"

    @property
    def num_facts(self) -> int:
        return self.contexts * self.facts

    @property
    def num_tokens(self) -> int:
        return self.contexts * (self.prefix + self.facts * self.own)

    def prompts(self, vocab: int, *, jitter: int = 0, seed: int = 0) -> list[IntArray]:
        """Prompts that differ in the first token of each context and of each fact, in the order of the packed stream.

        With `jitter` the length of a fact varies by up to so many tokens.
        """
        rng = np.random.default_rng(seed)
        prompts = []
        for context in range(self.contexts):
            prefix = np.append(context, rng.integers(0, vocab, self.prefix - 1))
            for fact in range(self.facts):
                length = self.own + int(rng.integers(-jitter, jitter + 1))
                prompts.append(np.concatenate([prefix, [fact], rng.integers(0, vocab, length - 1)]))
        return prompts


def layout_of_forward(prompts: list[IntArray], trie: TokenTrie = NO_TRIE) -> SegmentLayout:
    """The attention pattern of all prompts in one forward."""
    tree = build_prefix_tree(prompts, trie=trie)
    (forward,) = pack(tree, len(tree.tokens))
    return forward.layout


def visible_pairs(tree_or_layout: PrefixTree | SegmentLayout, window: int | None = None) -> int:
    """Pairs of a row and a key that it sees: ``sum over rows of min(position + 1, window)``."""
    positions = tree_or_layout.positions if isinstance(tree_or_layout, PrefixTree) else tree_or_layout.row_positions
    seen = positions + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())
