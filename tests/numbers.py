"""Verifiers over tiny random models that like to answer with numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

import gatekern as gk
from tests.families import tiny_model
from tests.tinytok import tiny_tokenizer

CONTEXTS = ("Alice lives in Paris.", "It rains.")
PAIRS = [(context, fact) for context in CONTEXTS for fact in ("Bob sleeps", "yes", "no 7")]


def number_verifier(
    family: str = "llama",
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    other: float = -9.0,
    likely: Sequence[str] = ("0", "."),
    **options: object,
) -> gk.Verifier:
    """A tiny model whose head has a bias, nats: 5 for `likely` tokens, 3 for digits and ends, `other` for the rest."""
    tokenizer = tokenizer or tiny_tokenizer()
    model = tiny_model(family, vocab_size=len(tokenizer) + 5, max_position_embeddings=2048)
    bias = torch.full((len(tokenizer) + 5,), other)
    for text, token in tokenizer.get_vocab().items():
        if text.strip("0123456789") == "" or token in tokenizer.all_special_ids:
            bias[token] = 3.0
        if text in likely:
            bias[token] = 5.0
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight *= 0.2  # some families have logits that would drown the bias
    head.bias = nn.Parameter(bias, requires_grad=False)
    return gk.Verifier(model, tokenizer, **{"min_label_mass": 0.0, **options})
