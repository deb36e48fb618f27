"""Operators timed against what a user would write, as percent of what the machine's ceilings allow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import Heads, Problem, Workload
from benchmarks.gpu.machine import Ceilings
from benchmarks.gpu.parity import LABELS, VOCABULARY, backends_of, known_replies, why_not_timed
from benchmarks.gpu.recorder import Recorder, Results, Row, Setup
from benchmarks.gpu.timing import agreement, compare
from gatekern.ops import HeadSpec, label_scores, parse_scores, prefix_attention, score_rows, token_table, vocab_lse
from gatekern.ops.label_scores import pack_groups
from gatekern.ops.merge_attention import merge_attention

BF16 = torch.bfloat16
_SECONDS = 0.4  # for the timed rounds of all forms of a task together

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
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass
class Task:
    """One thing to compute, in several forms.

    Attributes
    ----------
    bytes, flops : float
        What the task needs at least.
    run : callable
        The operator, with the name of a backend.
    peers : dict of str to callable
        What a user would write; they return float tensors that `compared` makes of our results.
    exact, tolerance : float
        Largest difference from the PyTorch form, relative to its largest value: of our other forms, and of peers, which
        round logits or partial results. How exact each is is the matter of parity; this is the task at full size.
    dtype, dim : torch.dtype or None, int or None
        What the parity that it has to have passed was in.
    """

    bytes: float
    flops: float
    run: Callable[..., Any]
    peers: dict[str, Callable[[], Tensor]]
    compared: Callable[[Any], Tensor]
    exact: float
    tolerance: float
    dtype: torch.dtype | None = BF16
    dim: int | None = None


def operators(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """One row for every task and form; bytes and FLOP are the least that the task needs, whatever a form does."""

    def case(op: str, case: str, build: Callable[[], Task]) -> None:
        recorder.case(lambda: _measure(op, build(), setup, min(_SECONDS, recorder.left()), earlier), op=op, case=case)

    def attention(workload: Workload) -> None:
        for model in HEADS:
            case("prefix_attention", f"{workload}, {model}", partial(_attention, workload, model, setup))

    *workloads, longest = TINY_WORKLOADS if setup.tiny else WORKLOADS
    for workload in workloads:
        attention(workload)
    vocab = TINY_VOCAB if setup.tiny else VOCAB
    for width in TINY_WIDTHS if setup.tiny else WIDTHS:
        for rows in TINY_ROWS if setup.tiny else ROWS:
            for op in ("label_scores", "vocab_lse", "score_rows"):
                case(op, f"{rows:,} rows, H={width:,}, V={vocab:,}", partial(_head, op, rows, width, vocab, setup))
    for shape in TINY_MERGES if setup.tiny else MERGES:
        case("merge_attention", " x ".join(f"{size:,}" for size in shape), partial(_merge, *shape, setup))
    for count in TINY_REPLIES if setup.tiny else REPLIES:
        case("parse_scores", f"{count:,} replies of 8 tokens", partial(_parse, count, setup))
    attention(longest)  # some of its forms take a second


def _measure(op: str, task: Task, setup: Setup, seconds: float, earlier: Results) -> Iterator[Row]:
    """Agreement first, then times of those that agree."""
    backends = sorted(backends_of(op), key="torch".__ne__)  # PyTorch first: the others are compared with it
    rows: dict[str, Row] = {}
    for name in backends:
        reason = why_not_timed(earlier, op, name, task.dtype, task.dim)
        rows |= {name: {"verdict": reason}} if reason else {}
    forms: dict[str, Callable[[], Any]] = {
        name: partial(task.run, backend=name) for name in backends if name not in rows
    }
    found = {name: lambda form=form: task.compared(form()) for name, form in forms.items()} | task.peers
    rows |= agreement(found, setup, {name: task.exact if name in forms else task.tolerance for name in found})
    agreeing = {name: form for name, form in (forms | task.peers).items() if "verdict" not in rows[name]}
    floor = Ceilings.of(earlier).floor_s(task.bytes, task.flops)
    for name, timed in compare(agreeing, setup, seconds).items():
        rows[name] |= timed | {"MB": task.bytes / 1e6, "GFLOP": task.flops / 1e9}
        if floor is not None and "median_us" in timed:
            rows[name] |= {"floor_us": floor * 1e6, "percent_of_floor": 1e8 * floor / timed["median_us"]}
    for name in [*backends, *task.peers]:
        yield {"form": name, **rows[name]}


def _attention(workload: Workload, model: Heads, setup: Setup) -> Task:
    """Bytes and FLOP: see `Problem`. Results are rounded to bf16, and in some forms merged after that."""
    problem = Problem(workload, model, setup)
    operands = (problem.query, problem.key, problem.value, problem.layout)
    run = partial(prefix_attention, *operands, scale=problem.scale, window=model.window)
    peers, compared = problem.peers(), problem.fact_rows
    return Task(problem.bytes, problem.flops, run, peers, compared, exact=1e-2, tolerance=1e-2, dim=model.dim)


@lru_cache(maxsize=1)
def _weight(width: int, vocab: int, device: torch.device) -> Tensor:
    """An LM head, drawn on the device, whose logits have the standard deviation 2. One at a time is held."""
    return torch.randn(vocab, width, device=device, dtype=BF16).mul_(2 / width**0.5)


def _head(op: str, rows: int, width: int, vocab: int, setup: Setup) -> Task:
    """Hidden rows and those rows of the weight that are needed, in bf16, and float32 results, each once.

    ``2 * (rows + used) * width + 4 * rows * results`` bytes and ``2 * rows * used * width`` FLOP. `label_scores` uses
    the label rows and gives two logits and a score, `vocab_lse` the vocabulary for a log-sum-exp, and `score_rows` the
    vocabulary, which has the labels, for two logits, a score and a mass.
    """
    hidden, weight = torch.randn(rows, width, device=setup.device, dtype=BF16), _weight(width, vocab, setup.device)
    packed, sizes = pack_groups(LABELS, vocab, setup.device), [len(group) for group in LABELS]
    labels, places = packed[0], torch.arange(sum(sizes), device=setup.device)

    def groups(log_probs: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of the first group among both, and of both together."""
        yes, no = (log_probs[:, ids].logsumexp(-1) for ids in columns.split(sizes))
        return torch.sigmoid(yes - no), yes.exp() + no.exp()

    def full() -> tuple[Tensor, Tensor]:
        return groups((hidden @ weight.T).float().log_softmax(-1), labels)

    if op == "label_scores":
        run: Callable[..., Any] = partial(label_scores, hidden, weight, packed)
        peers = {
            "full logits, log_softmax": lambda: full()[0],
            "label rows only": lambda: groups((hidden @ weight[labels].T).float(), places)[0],
        }
        used, results, compared = len(labels), 3, lambda found: found.score
    elif op == "vocab_lse":
        run = partial(vocab_lse, hidden, weight)
        peers = {"full logits, logsumexp": lambda: (hidden @ weight.T).float().logsumexp(-1)}
        used, results, compared = vocab, 1, lambda found: found
    else:
        run = partial(score_rows, hidden, HeadSpec(weight), packed, mass=True)
        peers = {"full logits, log_softmax": lambda: torch.stack(full())}
        used, results, compared = vocab, 4, lambda found: torch.stack([found.score, found.mass])
    least = 2 * (rows + used) * width + 4 * rows * results
    return Task(least, 2 * rows * used * width, run, peers, compared, exact=1e-3, tolerance=3e-2)


def _merge(rows: int, heads: int, dim: int, setup: Setup) -> Task:
    """Bytes: two outputs read and one written in bf16, three log-sum-exps in float32. FLOP: 3 an element."""
    out_a, out_b = (torch.randn(rows, heads, dim, device=setup.device, dtype=BF16) for _ in range(2))
    lse_a, lse_b = (torch.randn(rows, heads, device=setup.device) for _ in range(2))

    def by_lerp() -> Tensor:
        torch.logaddexp(lse_a, lse_b)
        return torch.lerp(out_a.float(), out_b.float(), torch.sigmoid(lse_b - lse_a)[..., None]).to(BF16)

    run = partial(merge_attention, out_a, lse_a, out_b, lse_b)
    least, flops = rows * heads * (6 * dim + 12), 3 * rows * heads * dim
    return Task(least, flops, run, {"lerp by sigmoid": by_lerp}, lambda found: found[0], exact=1e-2, tolerance=1e-2)


def _parse(count: int, setup: Setup) -> Task:
    """Bytes: token ids (int64) once, a float32 and a status a row. No FLOP are counted."""
    tokens = torch.tensor(known_replies(count)[0]).to(setup.device)

    def by_regular_expression() -> Tensor:
        """Detokenize on the host and take the last number: the usual code."""
        texts = ("".join(VOCABULARY[token] for token in row if token) for row in tokens.tolist())
        found = (_NUMBER.findall(text) for text in texts)
        return torch.tensor([float(numbers[-1]) if numbers else float("nan") for numbers in found])

    run = partial(parse_scores, tokens, token_table(VOCABULARY, [0]).to(setup.device))
    peers, compared = {"detokenize, re": by_regular_expression}, lambda found: found.values.cpu()
    return Task(8 * tokens.numel() + 5 * count, 0, run, peers, compared, exact=0.0, tolerance=0.0, dtype=None)
