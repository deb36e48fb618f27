"""Operands of the head operators and of the parser, and what a user would write instead."""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from gatekern.ops import TokenTable, token_table

#: Label ids of two groups, as a tokenizer spells yes and no.
GROUPS = [list(range(100, 106)), list(range(200, 207))]

VOCABULARY = ["</s>", "Score", ":", " ", "0", ".", *"123456789", " because", " the", "</think>", "%", "/"]
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def full_head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """All logits, log-softmax, gather: the usual code. Probability of the first group, and of both together."""
    log_probs = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    yes, no = (log_probs[:, ids].logsumexp(-1) for ids in _groups_on(hidden.device))
    return torch.sigmoid(yes - no), yes.exp() + no.exp()


@functools.cache
def _groups_on(device: torch.device) -> list[Tensor]:
    return [torch.tensor(group, device=device) for group in GROUPS]


def full_lse(hidden: Tensor, weight: Tensor) -> Tensor:
    """Log-sum-exp of all logits, rounded to the dtype as a model rounds them."""
    return (hidden @ weight.T).float().logsumexp(-1)


def known_replies(count: int) -> tuple[list[list[int]], list[float]]:
    """Replies ``Score: 0.d`` of eight tokens, and what they say."""
    number = {text: token for token, text in enumerate(VOCABULARY)}
    replies = [[number[text] for text in ("Score", ":", " ", "0", ".", str(at % 10))] + [0, 0] for at in range(count)]
    return replies, [at % 10 / 10 for at in range(count)]


def reply_table() -> TokenTable:
    return token_table(VOCABULARY, [0])


def by_regular_expression(tokens: Tensor) -> Tensor:
    """Detokenize on the host and take the last number: the usual code."""
    scores = []
    for row in tokens.tolist():
        numbers = _NUMBER.findall("".join(VOCABULARY[token] for token in row if token))
        scores.append(float(numbers[-1]) if numbers else float("nan"))
    return torch.tensor(scores)
