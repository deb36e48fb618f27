"""All that a gate reads from a hidden state, in one call: label logits, the first label's probability, the label mass.

It composes `label_scores` and `vocab_lse`: with packed groups everything stays on the device, and nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gatekern.ops import dispatch
from gatekern.ops.head import HeadSpec
from gatekern.ops.label_scores import Groups, label_scores
from gatekern.ops.vocab_lse import vocab_lse


class RowScores(NamedTuple):
    """What `score_rows` returns.

    Attributes
    ----------
    logits : Tensor, float32 [N, G]
        Log-sum-exp of each group's logits, in nats.
    score : Tensor, float32 [N]
        Probability of group 0 among all groups.
    mass : Tensor, float32 [N], or None
        Probability of all groups together among the whole vocabulary, at most 1; None where it was not asked for.
    """

    logits: Tensor
    score: Tensor
    mass: Tensor | None


def score_rows(
    hidden: Tensor, head: HeadSpec, groups: Groups, *, mass: bool = False, backend: str = "auto"
) -> RowScores:
    r"""Score label groups from final hidden states, with the probability that the model gives to any label.

    With the logits :math:`z_t` of `head` (see `HeadSpec`),

    .. math:: \ell_g = \log \sum_{t \in g} e^{z_t}, \qquad p = \frac{e^{\ell_0}}{\sum_g e^{\ell_g}}, \qquad
              m = \min\Big(1, \frac{\sum_g e^{\ell_g}}{\sum_{t < V} e^{z_t}}\Big).

    Parameters
    ----------
    hidden : Tensor, float32 | bfloat16 | float16 [N, H]
        Final hidden states, after the last norm, on any device.
    head : HeadSpec
        Weight [V, H] of the same dtype and on the same device, with its bias, scale and soft-cap.
    groups : sequence of sequences of int, or (Tensor int64 [L], Tensor int64 [G + 1])
        Token ids of each label group; or the result of `gatekern.ops.label_scores.pack_groups` on the device of
        `hidden`, which saves the checks and the transfer.
    mass : bool
        Compute the label mass too. It reads the whole weight, where the other two read the rows of the labels.
    backend : str
        ``"auto"``, ``"triton"``, ``"native"`` or ``"torch"``. The mass has no native form: PyTorch computes it then.

    Returns
    -------
    RowScores
        ``logits`` float32 [N, G] in nats, ``score`` float32 [N] and ``mass`` float32 [N] or None, on the device of
        `hidden`; not differentiable.

    Raises
    ------
    InputError
        If an operand does not fit, a group is empty, or an id is outside [0, V) or given twice.
    BackendError
        If an explicit `backend` cannot run here.

    Notes
    -----
    With packed groups the host neither waits for the device nor reads from it. A score is NaN, never a plausible one,
    where `label_scores` says so; a mass where any logit is NaN, a label's is +inf, or all of the vocabulary's are -inf.

    In the native and Triton forms logits and score of a row do not depend on the other rows, to the last bit. For the
    mass that is not promised: on a CPU it comes from PyTorch's matrix product.

    Examples
    --------
    >>> import torch
    >>> head = HeadSpec(torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
    >>> rows = score_rows(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), head, groups=[[0], [1]], mass=True)
    >>> rows.score
    tensor([0.8808, 0.1192])
    >>> rows.mass
    tensor([0.8935, 0.8935])
    """
    terms = (head.bias, head.softcap, head.scale)
    logits, score = label_scores(hidden, head.weight, groups, *terms, backend=backend)
    if not mass:
        return RowScores(logits, score, None)
    lse = vocab_lse(hidden, head.weight, *terms, backend=dispatch.with_form("vocab_lse", backend))
    return RowScores(logits, score, torch.exp(logits.logsumexp(dim=-1) - lse).clamp(max=1.0))
