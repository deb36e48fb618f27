"""Log-probability mode: one forward, the answer's label logits, no sampling (ConsistencyGate, equation 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gatekern import ops
from gatekern.engine.backbone import Backbone
from gatekern.engine.work import Work
from gatekern.labels import LabelSet
from gatekern.layout import IntArray
from gatekern.modes.evidence import Evidence


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
    with work.stage("score"):
        rows = ops.score_rows(backbone.readable(hidden), backbone.head, labels.ids, mass=True, backend=backend)
    assert rows.mass is not None  # it was asked for
    labelled, scored, answered = (x[: len(prompts)].cpu().numpy() for x in (rows.logits, rows.score, rows.mass))
    return Evidence(
        scores=scored,
        finite=np.isfinite(scored) & np.isfinite(answered),
        mass=answered,
        label_logits=labelled,
    )
