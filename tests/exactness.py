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
from gatekern.ops.label_scores import label_scores_reference, pack_groups
from gatekern.planning import IntArray
from tests.families import FAMILIES, VOCAB, tiny_model

#: fp32 logits; the limit that every family has to keep.
LIMIT = 1e-4


@dataclass(frozen=True)
class Exactness:
    """Largest difference of any logit of the vocabulary between gatekern and separate forwards."""

    path: str
    error: float
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


def separate_logits(model: PreTrainedModel, prompts: list[IntArray]) -> Tensor:
    """One full, unpadded, uncached forward a prompt, logits [num_prompts, vocab]: the definition."""
    with torch.no_grad():
        rows = [model(input_ids=torch.from_numpy(p)[None], use_cache=False).logits[0, -1] for p in prompts]
    return torch.stack(rows).float()


def logits_of(backbone: Backbone, prompts: list[IntArray], work: Work | None = None) -> Tensor:
    """Logits of the whole vocabulary through gatekern's hidden states and head, [num_prompts, vocab]."""
    head = backbone.head
    every_token = pack_groups([[token] for token in range(head.vocab_rows)], head.vocab_rows)
    with torch.no_grad():
        hidden = backbone.hidden_rows(prompts, work or Work())
        return label_scores_reference(
            hidden, head.weight, *every_token, bias=head.bias, softcap=head.softcap, scale=head.scale
        ).logits


def measure(family: str, *, max_tokens: int | None = None, **changes: object) -> Exactness:
    """Score the prompts of `prompts_of_unequal_length` on a tiny random model of the family."""
    model = tiny_model(family, **changes)
    backbone, work, prompts = Backbone(model, max_tokens=max_tokens), Work(), prompts_of_unequal_length()
    truth = separate_logits(model, prompts)
    error = (logits_of(backbone, prompts, work) - truth).abs().max().item()
    return Exactness(
        backbone.path, error, truth.std().item(), work.computed_tokens, sum(len(prompt) for prompt in prompts)
    )


def main() -> None:
    """Print one line a family, whole and in small forwards."""
    import transformers

    transformers.logging.set_verbosity_error()
    print("| family | path | max abs logit error | same, forwards of 40 tokens | logit std | tokens computed / naive |")
    print("|---|---|---|---|---|---|")
    for family in FAMILIES:
        whole, cut = measure(family), measure(family, max_tokens=40)
        print(
            f"| {family} | {whole.path} | {whole.error:.1e} | {cut.error:.1e} | {whole.spread:.2f} "
            f"| {whole.computed} / {whole.naive} |"
        )


if __name__ == "__main__":
    main()
