"""Operators on a language-model head, and the parser of replies, against float64 and against each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.heads import known_replies, reply_table
from benchmarks.gpu.judge import HEAD_EPS, forms, gate, name_of, verdict
from benchmarks.gpu.recorder import NotHereError, Recorder, Row, Setup
from gatekern.ops import HeadSpec, class_lse, label_scores, parse_scores, score_rows, vocab_lse
from gatekern.ops.class_lse import class_lse_reference
from gatekern.ops.label_scores import label_scores_reference, pack_groups
from gatekern.ops.vocab_lse import vocab_lse_reference
from tests.head_operands import Head, HeadOperands

GROUPS = [[3, 5, 7, 11, 13, 17], [2, 4, 8, 16, 32, 64, 65]]
#: dtype, rows, width, vocabulary, dtype of the bias, soft-cap, scale
HEADS = (
    (torch.bfloat16, 33, 896, 5001, None, None, 1.0),
    (torch.bfloat16, 200, 576, 4099, torch.float32, 30.0, 0.0625),
    (torch.float32, 33, 896, 5001, None, None, 1.0),
    (torch.float32, 65, 577, 4099, torch.float32, 5.0, -1.5),
    (torch.float16, 17, 320, 4099, torch.float16, None, 1.0),
)
Operator = Callable[[HeadOperands, str], Tensor]
Reference = Callable[[HeadOperands], Tensor]


def heads_and_parser(setup: Setup, recorder: Recorder) -> None:
    """One row for every operator, form and case."""
    for dtype, rows, width, vocab, bias_dtype, softcap, scale in HEADS:
        head = Head.random(rows, width, vocab, dtype, bias_dtype=bias_dtype, softcap=softcap, scale=scale)
        head.hidden, head.weight = head.hidden.to(setup.device), head.weight.to(setup.device)
        head.bias = None if head.bias is None else head.bias.to(setup.device)
        terms = [f"bias {name_of(bias_dtype)}"] if bias_dtype else []
        terms += [
            f"{name} {value}" for name, value in (("softcap", softcap), ("scale", scale)) if value not in (None, 1.0)
        ]
        for op, (run, reference) in _operators(setup, vocab).items():
            # What composes two operators runs where label scores do.
            for backend, reason in forms("label_scores" if op == "score_rows" else op, setup).items():
                recorder.case(
                    lambda head=head, run=run, reference=reference, backend=backend, reason=reason: _judge(  # type: ignore[misc]
                        head, run, reference, backend, reason
                    ),
                    op=op,
                    case=", ".join([f"{rows} x {width}, vocabulary {vocab:,}", *terms]),
                    dtype=name_of(dtype),
                    backend=backend,
                    gate=gate(op, backend, dtype),
                )
    for backend, reason in forms("parse_scores", setup).items():
        recorder.case(
            lambda backend=backend, reason=reason: _parse(backend, reason, setup),  # type: ignore[misc]
            op="parse_scores",
            case="1,000 replies of known score, 20,000 random ones",
            backend=backend,
            gate=gate("parse_scores", backend),
        )


def _judge(head: Head, run: Operator, reference: Reference, backend: str, reason: str | None) -> Row:
    if reason is not None:
        raise NotHereError(reason)
    ours, plain, truth = run(head.operands, backend), reference(head.operands), reference(head.operands64)
    return verdict(ours, plain, truth, HEAD_EPS, head.magnitude().max().item())


def _operators(setup: Setup, vocab: int) -> dict[str, tuple[Operator, Reference]]:
    """Each operator and its definition, results flattened into one tensor."""
    packed = pack_groups(GROUPS, vocab, setup.device)
    num_classes = 7
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, num_classes, (1, vocab), generator=generator, dtype=torch.uint8).to(setup.device)

    def flat(*parts: Tensor | None) -> Tensor:
        return torch.cat([part.flatten() for part in parts if part is not None])

    def rows_reference(operands: HeadOperands) -> Tensor:
        hidden, weight, bias, softcap, scale = operands
        logits, score = label_scores_reference(hidden, weight, *packed, bias, softcap, scale)
        mass = torch.exp(logits.logsumexp(-1) - vocab_lse_reference(*operands)).clamp(max=1.0)
        return flat(logits, score, mass)

    def rows(operands: HeadOperands, backend: str) -> Tensor:
        hidden, weight, bias, softcap, scale = operands
        head = HeadSpec(weight, bias, scale, softcap)
        return flat(*score_rows(hidden, head, packed, mass=True, backend=backend))

    return {
        "label_scores": (
            lambda x, backend: flat(*label_scores(x[0], x[1], packed, *x[2:], backend=backend)),
            lambda x: flat(*label_scores_reference(x[0], x[1], *packed, *x[2:])),
        ),
        "vocab_lse": (lambda x, backend: vocab_lse(*x, backend=backend), lambda x: vocab_lse_reference(*x)),
        "score_rows": (rows, rows_reference),
        "class_lse": (
            lambda x, backend: class_lse(x[0][None], x[1], classes, num_classes, *x[2:], backend=backend),
            lambda x: class_lse_reference(x[0][None], x[1], classes, num_classes, *x[2:]),
        ),
    }


def _parse(backend: str, reason: str | None, setup: Setup) -> Row:
    """Equal to what the replies say, and to plain PyTorch on the CPU on random ones: values, NaN and status."""
    if reason is not None:
        raise NotHereError(reason)
    replies, expected = known_replies(1000)
    table = reply_table()
    known = parse_scores(torch.tensor(replies).to(setup.device), table.to(setup.device), backend=backend)
    wrong = int((known.values.cpu() != torch.tensor(expected)).sum())
    generator = torch.Generator().manual_seed(0)
    vocab = len(table.offsets) - 1
    tokens = torch.randint(-1, vocab, (2000 if setup.tiny else 20_000, 12), generator=generator)
    ours = parse_scores(tokens.to(setup.device), table.to(setup.device), backend=backend)
    truth = parse_scores(tokens, table, backend="torch")
    same = (ours.values.cpu() == truth.values) | (ours.values.cpu().isnan() & truth.values.isnan())
    wrong += int((~same | (ours.status.cpu() != truth.status)).sum())
    return {"error": wrong, "plain_error": 0, "allowed": 0, "verdict": "fail" if wrong else "pass"}
