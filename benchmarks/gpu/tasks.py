"""What is timed: tasks with their least bytes and FLOP, our forms, and the code that users would write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import heads
from benchmarks.gpu.attention import Heads, Problem
from benchmarks.gpu.prompts import Workload
from benchmarks.gpu.recorder import Setup
from gatekern.ops import HeadSpec, dispatch, label_scores, parse_scores, prefix_attention, score_rows, vocab_lse
from gatekern.ops.label_scores import pack_groups
from gatekern.ops.merge_attention import merge_attention

BF16 = torch.bfloat16

HEADS = (
    Heads("Qwen3-8B", 32, 8, 128),
    Heads("Qwen2.5-0.5B", 14, 2, 64),
    Heads("Llama-3.2-1B", 32, 8, 64),
    Heads("Gemma-3", 8, 4, 256, window=1024),
)
WORKLOADS = (
    Workload(16, 1000, 20, 60),
    Workload(4, 4000, 50, 60),
    Workload(16, 300, 10, 60),
    Workload(2, 8000, 100, 80),
)
VOCAB, WIDTHS, ROWS = 151_936, (896, 2048, 4096), (1, 64, 1024, 4096)
REPLIES = (1024, 65_536)
MERGES = ((19_200, 32, 128), (19_200, 14, 64))  # the facts' rows of 16 x (1,000 + 20 x 60)

TINY_WORKLOADS = (Workload(2, 24, 3, 8),)
TINY_VOCAB, TINY_WIDTHS, TINY_ROWS, TINY_REPLIES, TINY_MERGES = 500, (64,), (1, 33), (64,), ((50, 4, 64),)

Named = tuple[str, str, Callable[[], "Task"]]  # operator, case, and how to build the task


@dataclass
class Task:
    """One thing to compute, in several forms.

    Attributes
    ----------
    op : str
    bytes, flops : float
        What the task needs at least.
    ours : dict of str to callable
        Forms of the operator, by backend.
    peers : dict of str to callable
        What a user would write; they return float tensors that `compared` makes of our results.
    compared : callable
    tolerance : float
        Largest difference of any two forms: they round differently, and how exact each is is the matter of parity.
    dtype, dim : torch.dtype or None, int or None
        What the parity that it has to have passed was in.
    """

    op: str
    bytes: float
    flops: float
    ours: dict[str, Callable[[], Any]]
    peers: dict[str, Callable[[], Tensor]]
    compared: Callable[[Any], Tensor]
    tolerance: float
    dtype: torch.dtype | None = BF16
    dim: int | None = None


def tasks(setup: Setup) -> Iterator[Named]:
    """All tasks, built one at a time when they are timed."""
    for width in TINY_WIDTHS if setup.tiny else WIDTHS:
        for rows in TINY_ROWS if setup.tiny else ROWS:
            vocab = TINY_VOCAB if setup.tiny else VOCAB
            case = f"{rows:,} rows, H={width:,}, V={vocab:,}"
            for op, build in (("label_scores", _label_scores), ("vocab_lse", _vocab_lse), ("score_rows", _score_rows)):
                yield op, case, partial(build, rows, width, vocab, setup)
    for count in TINY_REPLIES if setup.tiny else REPLIES:
        yield "parse_scores", f"{count:,} replies of 8 tokens", partial(_parse_scores, count, setup)
    for shape in TINY_MERGES if setup.tiny else MERGES:
        yield "merge_attention", " x ".join(f"{size:,}" for size in shape), partial(_merge, shape, setup)
    for workload in TINY_WORKLOADS if setup.tiny else WORKLOADS:
        for model in HEADS:
            yield "prefix_attention", f"{workload}, {model}", partial(_attention, workload, model, setup)


def _head(rows: int, width: int, vocab: int, setup: Setup) -> tuple[Tensor, Tensor]:
    """Hidden states, and a weight of which one is held at a time."""
    hidden = torch.randn(rows, width, device=setup.device).to(BF16)
    return hidden, _weight(width, vocab, setup.device)


@cache
def _weight(width: int, vocab: int, device: torch.device) -> Tensor:
    """An LM head, drawn on the device, whose logits have the standard deviation 2."""
    return torch.randn(vocab, width, device=device, dtype=BF16).mul_(2 / width**0.5)


def _label_scores(rows: int, width: int, vocab: int, setup: Setup) -> Task:
    """Bytes: hidden rows and label rows once, results in float32. FLOP: ``2 * rows * labels * width``."""
    hidden, weight = _head(rows, width, vocab, setup)
    packed = pack_groups(heads.GROUPS, vocab, setup.device)
    labels = len(packed[0])
    return Task(
        "label_scores",
        bytes=2 * (rows + labels) * width + 4 * rows * (len(heads.GROUPS) + 1),
        flops=2 * rows * labels * width,
        ours={form: partial(label_scores, hidden, weight, packed, backend=form) for form in _forms("label_scores")},
        peers={"full logits, log_softmax": lambda: heads.full_head(hidden, weight)[0]},
        compared=lambda result: result.score,
        tolerance=3e-2,
    )


def _vocab_lse(rows: int, width: int, vocab: int, setup: Setup) -> Task:
    """Bytes: hidden rows and the weight once, a float32 a row. FLOP: ``2 * rows * vocab * width``."""
    hidden, weight = _head(rows, width, vocab, setup)
    return Task(
        "vocab_lse",
        bytes=2 * (rows + vocab) * width + 4 * rows,
        flops=2 * rows * vocab * width,
        ours={form: partial(vocab_lse, hidden, weight, backend=form) for form in _forms("vocab_lse")},
        peers={"full logits, logsumexp": lambda: heads.full_lse(hidden, weight)},
        compared=lambda result: result,
        tolerance=3e-2,
    )


def _score_rows(rows: int, width: int, vocab: int, setup: Setup) -> Task:
    """Label scores and label mass; bytes and FLOP are the sums of both."""
    hidden, weight = _head(rows, width, vocab, setup)
    packed, spec = pack_groups(heads.GROUPS, vocab, setup.device), HeadSpec(weight)
    labels = len(packed[0])
    return Task(
        "score_rows",
        bytes=2 * (rows + vocab) * width + 4 * rows * (len(heads.GROUPS) + 2),
        flops=2 * rows * (vocab + labels) * width,
        ours={
            form: partial(score_rows, hidden, spec, packed, mass=True, backend=form) for form in _forms("label_scores")
        },
        peers={"full logits, log_softmax": lambda: torch.stack(heads.full_head(hidden, weight))},
        compared=lambda result: torch.stack([result.score, result.mass]),
        tolerance=3e-2,
    )


def _parse_scores(count: int, setup: Setup) -> Task:
    """Bytes: token ids (int64) once, a float32 and a status a row. No FLOP are counted."""
    replies, _ = heads.known_replies(count)
    tokens, table = torch.tensor(replies).to(setup.device), heads.reply_table().to(setup.device)
    return Task(
        "parse_scores",
        bytes=8 * tokens.numel() + 5 * count,
        flops=0,
        ours={form: partial(parse_scores, tokens, table, backend=form) for form in _forms("parse_scores")},
        peers={"detokenize, re": lambda: heads.by_regular_expression(tokens)},
        compared=lambda result: result.values.cpu(),
        tolerance=0.0,
        dtype=None,
    )


def _merge(shape: tuple[int, int, int], setup: Setup) -> Task:
    """Bytes: two outputs read and one written in bf16, three log-sum-exps in float32. FLOP: 3 an element."""
    rows, num_heads, dim = shape
    out_a, out_b = (torch.randn(shape, device=setup.device).to(BF16) for _ in range(2))
    lse_a, lse_b = (torch.randn(rows, num_heads, device=setup.device) for _ in range(2))

    def by_lerp() -> Tensor:
        weight = torch.sigmoid(lse_b - lse_a)[..., None]
        torch.logaddexp(lse_a, lse_b)
        return torch.lerp(out_a.float(), out_b.float(), weight).to(BF16)

    return Task(
        "merge_attention",
        bytes=rows * num_heads * (6 * dim + 12),
        flops=3 * rows * num_heads * dim,
        ours={
            form: partial(merge_attention, out_a, lse_a, out_b, lse_b, backend=form)
            for form in _forms("merge_attention")
        },
        peers={"lerp by sigmoid": by_lerp},
        compared=lambda result: result[0],
        tolerance=4e-2,
    )


def _attention(workload: Workload, model: Heads, setup: Setup) -> Task:
    """Bytes and FLOP: see `Problem`."""
    problem = Problem(workload, model, BF16, setup)
    operands = (problem.query, problem.key, problem.value, problem.layout)
    return Task(
        "prefix_attention",
        bytes=problem.bytes,
        flops=problem.flops,
        ours={
            form: partial(prefix_attention, *operands, scale=problem.scale, window=model.window, backend=form)
            for form in _forms("prefix_attention")
        },
        peers=problem.peers(),
        compared=problem.fact_rows,
        tolerance=4e-2,
        dim=model.dim,
    )


def _forms(op: str) -> tuple[str, ...]:
    return dispatch.FORMS[op]
