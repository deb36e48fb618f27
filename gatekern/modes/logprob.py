"""Log-probability mode: one forward, the answer's label logits, no sampling (ConsistencyGate, equation 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gatekern import ops
from gatekern.engine.backbone import Backbone
from gatekern.engine.work import Work
from gatekern.labels import LabelSet
from gatekern.layout import IntArray
from gatekern.modes.evidence import Evidence
from gatekern.ops import dispatch


def label_evidence(
    backbone: Backbone, prompts: Sequence[IntArray], labels: LabelSet, work: Work, *, backend: str = "auto"
) -> Evidence:
    """Read the labels at the end of each prompt.

    Parameters
    ----------
    backbone : Backbone
    prompts : sequence of int64 [length_i]
        At least one, none empty.
    labels : LabelSet
        The score is the probability of the first group among all groups.
    work : Work
        Counters to add to.
    backend : str
        For the operators; see `gatekern.ops`.

    Notes
    -----
    ``mass = exp(logsumexp(label logits) - logsumexp(all logits))`` needs the whole vocabulary, in tiles: with one row
    a prompt this is well under 1 % of the forward.
    """
    hidden = backbone.hidden_rows(prompts, work)[:, 0]
    head = backbone.head
    terms: dict[str, Any] = {"bias": head.bias, "softcap": head.softcap, "scale": head.scale}
    # There is no C++ form of the vocabulary's log-sum-exp: PyTorch's matrix product is the best there is on a CPU.
    mass_backend = dispatch.with_form("vocab_lse", backend)
    with work.stage("score"), torch.no_grad():
        logits, scores = ops.label_scores(hidden, head.weight, labels.ids, backend=backend, **terms)
        mass = torch.exp(logits.logsumexp(dim=-1) - ops.vocab_lse(hidden, head.weight, backend=mass_backend, **terms))
    scored, labelled, answered = (x.float().cpu().numpy() for x in (scores, logits, mass.clamp(max=1.0)))
    return Evidence(
        scores=scored,
        finite=np.isfinite(scored) & np.isfinite(answered),
        mass=answered,
        label_logits=labelled,
    )
