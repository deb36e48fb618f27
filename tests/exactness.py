"""Packed (or branched) scoring against separate forwards, for every family: test oracle and README table.

``python -m tests.exactness`` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatekern.engine.backbone import Backbone
from gatekern.engine.work import Work
from gatekern.layout import IntArray
from gatekern.ops.label_scores import label_scores_reference, pack_groups
from gatekern.planning import NO_TRIE, TokenTrie, build_trie
from tests.families import FAMILIES, VOCAB, tiny_model

#: fp32 logits; the limit that every family has to keep.
LIMIT = 1e-4


@dataclass(frozen=True)
class Exactness:
    """Largest difference of any logit of the vocabulary between gatekern and separate forwards."""

    path: str
    error: float
    tree_error: float  # of the nodes of a trie below every prompt, in the same forwards
    decode_error: float  # of the same nodes, reached token by token
    spread: float  # standard deviation of the logits: what an error has to be compared with
    computed: int
    naive: int


def prompts_of_unequal_length(seed: int = 1) -> list[IntArray]:
    """Three contexts below one header, five facts each; lengths cross the tiny models' windows and chunks."""
    rng = np.random.default_rng(seed)
    header = rng.integers(3, VOCAB, 9)
    contexts = [rng.integers(3, VOCAB, length) for length in (23, 31, 12)]
    return [
        np.concatenate([header, context, rng.integers(3, VOCAB, length)])
        for context in contexts
        for length in (3, 7, 1, 5, 14)
    ]


#: Branches at both levels, and a node that is both read and continued.
TRIE = build_trie([(5, 7, 9), (5, 7, 11), (6, 7), (12,)])


def separate_logits(model: PreTrainedModel, prompts: list[IntArray], trie: TokenTrie = NO_TRIE) -> Tensor:
    """One full, unpadded, uncached forward for each place: the definition. [num_prompts, 1 + num_nodes, vocab]."""
    with torch.no_grad():
        rows = [
            model(input_ids=torch.from_numpy(np.concatenate([prompt, path]))[None], use_cache=False).logits[0, -1]
            for prompt in prompts
            for path in trie.paths()
        ]
    return torch.stack(rows).float().unflatten(0, (len(prompts), 1 + len(trie)))


def logits_of(
    backbone: Backbone, prompts: list[IntArray], work: Work | None = None, trie: TokenTrie = NO_TRIE
) -> Tensor:
    """Logits of the whole vocabulary through gatekern's hidden states and head."""
    return _logits(backbone, backbone.hidden_rows(prompts, work or Work(), trie))


def decoded_logits(backbone: Backbone, prompts: list[IntArray], trie: TokenTrie) -> Tensor:
    """As `logits_of`, reached by steps of a decode, one level of the trie each."""
    hidden: dict[tuple[int, int], Tensor] = {}
    for index, continuation in backbone.continuations(prompts, Work(), 3):
        level = [(at, -1) for at in range(len(index))]  # a prompt of the group, and the node reached
        decode = continuation.start()
        while level:
            hidden |= {(int(index[at]), node): row for (at, node), row in zip(level, decode.hidden, strict=True)}
            steps = [
                (row, at, child)
                for row, (at, node) in enumerate(level)
                for child in np.nonzero(trie.parent == node)[0].tolist()
            ]
            if steps:
                parents, _, children = (np.array(column) for column in zip(*steps, strict=True))
                decode.extend(parents, trie.tokens[children])
            level = [(at, child) for _, at, child in steps]
    every = [hidden[at, node] for at in range(len(prompts)) for node in range(-1, len(trie))]
    return _logits(backbone, torch.stack(every).unflatten(0, (len(prompts), 1 + len(trie))))


def _logits(backbone: Backbone, hidden: Tensor) -> Tensor:
    head = backbone.head
    every_token = pack_groups([[token] for token in range(head.vocab_rows)], head.vocab_rows)
    with torch.no_grad():
        return label_scores_reference(
            hidden.flatten(0, 1), head.weight, *every_token, bias=head.bias, softcap=head.softcap, scale=head.scale
        ).logits.unflatten(0, hidden.shape[:2])


def measure(family: str, *, max_tokens: int | None = None, **changes: object) -> Exactness:
    """Score the prompts of `prompts_of_unequal_length` on a tiny random model of the family."""
    model = tiny_model(family, **changes)
    backbone, work, prompts = Backbone(model, max_tokens=max_tokens), Work(), prompts_of_unequal_length()
    some = prompts[::3]  # below both contexts and of every length
    truth, tree_truth = separate_logits(model, prompts), separate_logits(model, some, TRIE)
    errors = [
        (found - expected).abs().max().item()
        for found, expected in (
            (logits_of(backbone, prompts, work), truth),
            (logits_of(backbone, some, trie=TRIE), tree_truth),
            (decoded_logits(backbone, some, TRIE), tree_truth),
        )
    ]
    naive = sum(len(prompt) for prompt in prompts)
    return Exactness(backbone.path, *errors, truth.std().item(), work.computed_tokens, naive)


def main() -> None:
    """Print one line a family, whole and in small forwards."""
    import transformers

    transformers.logging.set_verbosity_error()
    print("| family | path | max abs logit error | trie | decode | worst, forwards of 40 tokens | logit std | tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for family in FAMILIES:
        whole, cut = measure(family), measure(family, max_tokens=40)
        worst = max(cut.error, cut.tree_error, cut.decode_error)
        print(
            f"| {family} | {whole.path} | {whole.error:.1e} | {whole.tree_error:.1e} | {whole.decode_error:.1e} "
            f"| {worst:.1e} | {whole.spread:.2f} | {whole.computed} / {whole.naive} |"
        )


if __name__ == "__main__":
    main()
