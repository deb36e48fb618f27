"""Exact mode: the whole distribution of the scores that a model would reply with, from one forward.

A score of at most two decimals passes through few token histories: "0", "1", "0.", "1.", "0.0" .. "1.0". They are read
as a trie below every prompt, in the packed forward that reads the prompts. At each history the vocabulary falls into
classes (a further digit, an end of the number, anything else); their probabilities, multiplied along the paths, are the
law of the replies that `sample` mode draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gatekern import ops
from gatekern.engine.backbone import Backbone
from gatekern.engine.work import Work
from gatekern.layout import IntArray
from gatekern.modes.checks import LOWEST_TEMPERATURE, check_choice, check_real
from gatekern.modes.evidence import Evidence
from gatekern.ops import dispatch
from gatekern.reply_table import VALUES, ReplyTable

Law = Literal["unconstrained", "masked"]


@dataclass(frozen=True)
class ExactOptions:
    """Options of ``mode="exact"``.

    Attributes
    ----------
    law : "unconstrained" or "masked"
        ``unconstrained``: the model as it is; the values' probabilities sum to `label_mass`, and the score is the
        expectation given that the reply is a score. ``masked``: at every token only what leads to a score is allowed,
        renormalised, as decoders with a grammar do; probabilities sum to 1. The two differ where a beginning is likely
        that seldom ends as a score.
    temperature : float
        Of the replies, from 0.01 on.
    """

    law: Law = "unconstrained"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_choice("law", self.law, ("unconstrained", "masked"))
        check_real("temperature", self.temperature, LOWEST_TEMPERATURE, math.inf)


def reply_evidence(
    backbone: Backbone,
    prompts: Sequence[IntArray],
    table: ReplyTable,
    work: Work,
    options: ExactOptions,
    *,
    backend: str = "auto",
) -> Evidence:
    """Expected score of each prompt, its distribution, and the probability that the reply is a score at all.

    Parameters
    ----------
    backbone : Backbone
    prompts : sequence of int64 [length_i]
        At least one, none empty.
    table : ReplyTable
        How scores are spelled after these prompts.
    work : Work
        Counters to add to.
    options : ExactOptions
    backend : str
        For the operators; see `gatekern.ops`.
    """
    hidden = backbone.hidden_rows(prompts, work, table.trie).transpose(0, 1)
    head = backbone.head
    terms: dict[str, Any] = {"bias": head.bias, "softcap": head.softcap, "scale": head.scale}
    with work.stage("score"), torch.no_grad():
        classes = torch.from_numpy(table.classes).to(hidden.device)
        lse = ops.class_lse(
            backbone.readable(hidden),
            head.weight,
            classes,
            table.num_classes,
            temperature=options.temperature,
            backend=dispatch.with_form("class_lse", backend),
            **terms,
        )[:, : len(prompts)].double()
        free = _leaves(lse.softmax(dim=-1).cpu().numpy(), table)
        probabilities = free
        if options.law == "masked":
            lse[..., 0] = -torch.inf
            probabilities = _leaves(lse.softmax(dim=-1).nan_to_num(0.0).cpu().numpy(), table)
    total = probabilities.sum(axis=1)
    scores = np.divide(probabilities @ VALUES, total, out=np.full(len(prompts), np.nan), where=total > 0)
    return Evidence(
        scores=scores.astype(np.float32),
        finite=np.isfinite(free).all(axis=1),
        mass=free.sum(axis=1).clip(max=1.0).astype(np.float32),
        probabilities=np.where(total[:, None] > 0, probabilities, np.nan).astype(np.float32),
    )


def _leaves(steps: np.ndarray[Any, np.dtype[np.float64]], table: ReplyTable) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Probability of each value, [num_prompts, num_values], from that of each class [1 + num_nodes, num_prompts, C]."""
    reach = np.zeros(steps.shape[:2])
    reach[0] = 1.0
    values = np.zeros((steps.shape[1], len(VALUES)))
    for node, (nodes_after, values_after) in enumerate(zip(table.node_after, table.value_after, strict=True)):
        for cls, (child, value) in enumerate(zip(nodes_after.tolist(), values_after.tolist(), strict=True)):
            if child >= 0:
                reach[child] = reach[node] * steps[node, :, cls]
            elif value >= 0:
                values[:, value] += reach[node] * steps[node, :, cls]
    return values
