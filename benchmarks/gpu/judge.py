"""The rule by which a result passes, and which forms of an operator there are to judge."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.recorder import Results, Row, Setup
from gatekern.errors import BackendError
from gatekern.ops import dispatch

#: What an attention result may be off beyond plain PyTorch, for values of size 1: that of the tests.
ATTENTION_EPS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
#: The head operators promise float32 whatever the dtype of the operands.
HEAD_EPS = 1e-6


def verdict(ours: Tensor, plain: Tensor, truth: Tensor, eps: float, size: float) -> Row:
    """``max |ours - truth| <= max |plain - truth| + eps * max(1, size)``; NaN and infinities stay where they are.

    Parameters
    ----------
    ours, plain : Tensor
        Of the operator, and of plain PyTorch on the same operands.
    truth : Tensor, float64
    eps : float
    size : float
        Size of what was rounded on the way: the largest result or logit.
    """
    ours, plain, finite = ours.double(), plain.double(), truth.isfinite()
    same = torch.equal(ours[~finite].nan_to_num(nan=0.5), truth[~finite].nan_to_num(nan=0.5))
    error, plain_error = (((x - truth)[finite]).abs().amax().item() if finite.any() else 0.0 for x in (ours, plain))
    allowed = plain_error + eps * max(1.0, size)
    return {
        "error": error,
        "plain_error": plain_error,
        "allowed": allowed,
        "verdict": "pass" if same and error <= allowed else "fail",
    }


def forms(op: str, setup: Setup) -> dict[str, str | None]:
    """Every form of an operator with the reason why it cannot run here, None where it can."""
    reasons: dict[str, str | None] = {}
    for backend in dispatch.FORMS[op]:
        try:
            dispatch.select(op, backend, setup.device)
            reasons[backend] = None
        except BackendError as error:
            reasons[backend] = str(error).removeprefix(f"{op}: backend {backend!r} cannot run on {setup.device}: ")
    return reasons


def gate(op: str, backend: str, dtype: torch.dtype | None = None, dim: int | None = None) -> str:
    """What has to have passed before a form is timed."""
    parts = (op, backend, None if dtype is None else name_of(dtype), None if dim is None else f"dim {dim}")
    return ", ".join(part for part in parts if part)


def why_not_timed(earlier: Results, wanted: str) -> str | None:
    """None where every parity row of the gate passed and there is one."""
    verdicts = [row["verdict"] for row in earlier.get("parity", {}).get("rows", []) if row.get("gate") == wanted]
    ran = [found for found in verdicts if not found.startswith("skipped")]
    if not ran:
        return verdicts[0] if verdicts else "skipped: parity was not reached"
    return None if set(ran) == {"pass"} else "skipped: failed parity"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
