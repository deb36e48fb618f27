"""Every operator in every form against float64 on random operands: no form is timed that has not passed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.recorder import Recorder, Results, Row, Setup, name_of, row_of
from gatekern import ops
from gatekern.layout import SegmentLayout
from gatekern.ops import dispatch
from gatekern.ops.class_lse import class_lse_reference
from gatekern.ops.label_scores import label_scores_reference, pack_groups
from gatekern.ops.merge_attention import merge_attention, merge_attention_reference
from gatekern.ops.prefix_attention import prefix_attention_reference
from gatekern.ops.vocab_lse import vocab_lse_reference
from gatekern.planning import NO_TRIE, build_prefix_tree, build_trie, pack
from tests.head_operands import Head, HeadOperands

Kind = Literal["packed", "trie", "decode", "cut", "one row"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: What an attention result may be off beyond plain PyTorch, for values of size 1: that of the tests.
ATTENTION_EPS = {FP32: 1e-6, BF16: 1e-2, FP16: 1e-3}
#: The head operators, and log-sum-exps, are float32 whatever the dtype of the operands.
FLOAT32_EPS = 1e-6
#: Label ids of two groups, as a tokenizer spells yes and no.
LABELS = [list(range(100, 106)), list(range(200, 207))]
#: Of the parser's replies; token 0 ends one.
VOCABULARY = ["</s>", "Score", ":", " ", "0", ".", *"123456789", " because", " the", "</think>", "%", "/"]


@dataclass(frozen=True)
class AttentionCase:
    """``heads / kv_heads x dim`` over a kind of layout, with what a layer may ask for.

    Layouts: ``packed`` contexts with facts of unequal length, ``trie`` continuations below every fact, ``decode`` two
    steps below them, ``cut`` the last of several forwards, which reads keys of those before it, ``one row`` one step
    below a single prompt.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    kind: Kind = "packed"
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        options = {"window": self.window, "chunk": self.chunk, "softcap": self.softcap}
        asked = [f"{name} {value}" for name, value in options.items() if value is not None]
        return ", ".join([f"{self.heads}/{self.kv_heads} x {self.dim}", self.kind, *asked, *["sinks"] * self.sinks])


#: What is timed and what models use comes first; kernels are compiled once for dtype, group, dim and the options.
ATTENTION = (
    AttentionCase(BF16, 32, 8, 128),
    AttentionCase(BF16, 14, 2, 64),
    AttentionCase(BF16, 32, 8, 64),
    AttentionCase(BF16, 8, 4, 256, window=100),
    AttentionCase(BF16, 32, 8, 128, "trie"),
    AttentionCase(BF16, 32, 8, 128, "decode"),
    AttentionCase(BF16, 32, 8, 128, "cut"),
    AttentionCase(BF16, 32, 8, 128, "one row"),
    AttentionCase(FP32, 8, 2, 64),
    AttentionCase(FP32, 8, 2, 64, "trie"),
    AttentionCase(FP32, 8, 2, 64, "decode"),
    AttentionCase(FP32, 4, 4, 128, "cut"),
    AttentionCase(BF16, 4, 4, 80),
    AttentionCase(FP32, 7, 1, 80),
    AttentionCase(FP32, 4, 2, 256, window=100),
    AttentionCase(FP16, 14, 2, 64),
    AttentionCase(BF16, 8, 2, 64, window=40, sinks=True),
    AttentionCase(BF16, 8, 2, 64, chunk=64),
    AttentionCase(BF16, 4, 2, 256, "trie", window=100, softcap=5.0),
    AttentionCase(FP32, 8, 2, 64, "trie", window=40, softcap=5.0, sinks=True),
    AttentionCase(FP16, 8, 2, 128, softcap=5.0),
)

#: dtype, rows, width, vocabulary, dtype of the bias, soft-cap, scale
HEADS = (
    (BF16, 33, 896, 5001, None, None, 1.0),
    (BF16, 200, 576, 4099, FP32, 30.0, 0.0625),
    (FP32, 33, 896, 5001, None, None, 1.0),
    (FP32, 65, 577, 4099, FP32, 5.0, -1.5),
    (FP16, 17, 320, 4099, FP16, None, 1.0),
)


def parity(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """All operators; ``error`` is ours, ``plain_error`` that of plain PyTorch on the same operands in their dtype."""
    for case in ATTENTION:
        what = {"op": "prefix_attention", "case": str(case), "dtype": name_of(case.dtype), "dim": case.dim}
        recorder.case(partial(attention, case, setup), **what)
    for dtype, rows, width, vocab, bias_dtype, softcap, scale in HEADS:
        terms = [f"bias {name_of(bias_dtype)}"] if bias_dtype else []
        terms += [f"softcap {softcap}"] if softcap else []
        terms += [f"scale {scale}"] if scale != 1.0 else []
        for op in ("label_scores", "vocab_lse", "score_rows", "class_lse"):
            head = partial(Head.random, rows, width, vocab, dtype, bias_dtype=bias_dtype, softcap=softcap, scale=scale)
            case = ", ".join([f"{rows} x {width}, vocabulary {vocab:,}", *terms])
            recorder.case(partial(_head, op, head, setup), op=op, case=case, dtype=name_of(dtype))
    for dtype in (BF16, FP32):
        for part in ("output", "log-sum-exp"):
            case = f"{part}, 300 x 7 x 80, some rows blind on one side or both"
            recorder.case(partial(_merge, part, dtype, setup), op="merge_attention", case=case, dtype=name_of(dtype))
    recorder.case(partial(_parse, setup), op="parse_scores", case="1,000 replies of known score, 20,000 random ones")


def why_not_timed(
    earlier: Results, op: str, backend: str, dtype: torch.dtype | None = None, dim: int | None = None
) -> str | None:
    """None where a form passed parity in this dtype and head dimension, in every case that could run."""
    wanted = {"op": op, "dtype": dtype and name_of(dtype), "dim": dim}
    verdicts = [
        row["verdict"]
        for row in earlier.get("parity", {}).get("rows", [])
        if all(row.get(key) == value for key, value in wanted.items())
        and row.get("backend", backend) == backend  # a case that hung says nothing of its forms: it counts against all
    ]
    ran = [found for found in verdicts if not found.startswith("skipped")]
    if not ran:
        return verdicts[0] if verdicts else "skipped: parity was not reached"
    return None if set(ran) == {"pass"} else "skipped: failed parity"


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
    assert ours.dtype == plain.dtype, f"the result is {ours.dtype}"
    assert ours.shape == truth.shape, f"the result is {tuple(ours.shape)}"
    ours, plain, finite = ours.double(), plain.double(), truth.isfinite()
    same = torch.equal(ours[~finite].nan_to_num(nan=0.5), truth[~finite].nan_to_num(nan=0.5))
    error, plain_error = ((x - truth)[finite].abs().amax().item() if finite.any() else 0.0 for x in (ours, plain))
    allowed = plain_error + eps * max(1.0, size)
    passed = same and error <= allowed  # NaN fails
    return {"error": error, "plain_error": plain_error, "allowed": allowed, "verdict": "pass" if passed else "fail"}


def backends_of(op: str) -> tuple[str, ...]:
    """What composes two operators runs where label scores do."""
    return dispatch.FORMS["label_scores" if op == "score_rows" else op]


def _judged(forms: Iterable[str], run: Callable[[str], Tensor], judge: Callable[[Tensor], Row]) -> Iterator[Row]:
    for form in forms:
        try:
            yield {"backend": form, **judge(run(form))}
        except Exception as error:  # whatever it is, it is this form's alone
            yield {"backend": form, **row_of(error)}


def attention(
    case: AttentionCase, setup: Setup, forms: Iterable[str] = (*dispatch.FORMS["prefix_attention"], "torch, invariant")
) -> Iterator[Row]:
    """One row for each form."""
    layout = _layout(case.kind, setup.tiny)
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        """Heads first in memory, as some models have them, in a view with rows first."""
        drawn = torch.randn(heads, rows, case.dim, generator=generator).to(setup.device, case.dtype).transpose(0, 1)
        return drawn.contiguous() if case.kind == "packed" else drawn

    q, k, v = draw(layout.num_rows, case.heads), *(draw(layout.num_keys, case.kv_heads) for _ in range(2))
    sinks = torch.linspace(-1, 2, case.heads, device=setup.device) if case.sinks else None
    options = {"scale": case.dim**-0.5, "window": case.window, "chunk": case.chunk, "softcap": case.softcap}
    plain = prefix_attention_reference(q, k, v, layout, sinks=sinks, **options)
    truth = prefix_attention_reference(q.double(), k.double(), v.double(), layout, sinks=sinks, **options)
    size = truth.abs().max().item()

    def run(form: str) -> Tensor:
        backend, *invariant = form.split(", ")
        return ops.prefix_attention(q, k, v, layout, sinks=sinks, backend=backend, invariant=bool(invariant), **options)

    def judge(ours: Tensor) -> Row:
        return verdict(ours, plain, truth, ATTENTION_EPS[case.dtype], size)

    return _judged(forms, run, judge)


@cache
def _layout(kind: Kind, tiny: bool) -> SegmentLayout:
    rng = np.random.default_rng(0)
    prefix, lengths = (23, (5, 17, 1, 9)) if tiny else (333, (5, 60, 1, 129, 33, 300))
    contexts = [rng.integers(0, 1000, size) for size in (prefix, prefix // 2, prefix + 7)]
    prompts = [np.concatenate([head, rng.integers(0, 1000, size)]) for head in contexts for size in lengths]
    trie = build_trie([(1, 2, 3), (1, 2, 4), (5, 6), (7,)]) if kind in ("trie", "decode") else NO_TRIE
    total = sum(map(len, contexts)) + 3 * (sum(lengths) + len(lengths) * len(trie))
    budget = total // 3 if kind == "cut" else total
    tree = build_prefix_tree(prompts[:1] if kind == "one row" else prompts, trie=trie, max_segment=budget)
    layout = [forward.layout for forward in pack(tree, budget)][-1]
    for rows in {"decode": (40, 40), "one row": (1,)}.get(kind, ()):
        last = np.array([layout.num_rows - 1])
        layout = layout.extended(last if rows == 1 else np.sort(rng.integers(0, layout.num_rows, rows)))
    return layout


def _head(op: str, draw: Callable[[], Head], setup: Setup) -> Iterator[Row]:
    head = draw()
    head.hidden, head.weight = head.hidden.to(setup.device), head.weight.to(setup.device)
    head.bias = None if head.bias is None else head.bias.to(setup.device)
    run, reference = _operators(head, setup)[op]
    plain, truth, size = reference(head.operands), reference(head.operands64), head.magnitude().max().item()
    return _judged(backends_of(op), run, lambda ours: verdict(ours, plain, truth, FLOAT32_EPS, size))


def _operators(head: Head, setup: Setup) -> dict[str, tuple[Callable[[str], Tensor], Callable[[HeadOperands], Tensor]]]:
    """Each operator, with the name of a backend, and its definition; results flattened into one tensor."""
    hidden, weight, *terms = head.operands
    spec = ops.HeadSpec(weight, head.bias, head.scale, head.softcap)
    packed = pack_groups(LABELS, len(weight), setup.device)
    generator, num_classes = torch.Generator().manual_seed(0), 7
    classes = torch.randint(0, num_classes, (1, len(weight)), generator=generator, dtype=torch.uint8).to(setup.device)

    def flat(*parts: Tensor | None) -> Tensor:
        return torch.cat([part.flatten() for part in parts if part is not None])

    def rows_reference(operands: HeadOperands) -> Tensor:
        logits, score = label_scores_reference(*operands[:2], *packed, *operands[2:])
        mass = torch.exp(logits.logsumexp(-1) - vocab_lse_reference(*operands)).clamp(max=1.0)
        return flat(logits, score, mass)

    return {
        "label_scores": (
            lambda backend: flat(*ops.label_scores(hidden, weight, packed, *terms, backend=backend)),
            lambda x: flat(*label_scores_reference(*x[:2], *packed, *x[2:])),
        ),
        "vocab_lse": (
            lambda backend: ops.vocab_lse(hidden, weight, *terms, backend=backend),
            lambda x: vocab_lse_reference(*x),
        ),
        "score_rows": (
            lambda backend: flat(*ops.score_rows(hidden, spec, packed, mass=True, backend=backend)),
            rows_reference,
        ),
        "class_lse": (
            lambda backend: ops.class_lse(hidden[None], weight, classes, num_classes, *terms, backend=backend),
            lambda x: class_lse_reference(x[0][None], x[1], classes, num_classes, *x[2:]),
        ),
    }


def _merge(part: Literal["output", "log-sum-exp"], dtype: torch.dtype, setup: Setup) -> Iterator[Row]:
    """Outputs, which are in the dtype of the operands, or log-sum-exps, which are float32."""
    at, eps = {"output": (0, ATTENTION_EPS[dtype]), "log-sum-exp": (1, FLOAT32_EPS)}[part]
    out_a, out_b = (torch.randn(300, 7, 80, device=setup.device).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(300, 7, device=setup.device) * 5 for _ in range(2))
    lse_a[:20], lse_b[10:30] = -torch.inf, -torch.inf
    operands = (out_a, lse_a, out_b, lse_b)
    plain, truth = (merge_attention_reference(*some)[at] for some in (operands, [x.double() for x in operands]))
    size = truth[truth.isfinite()].abs().max().item()

    def run(backend: str) -> Tensor:
        return merge_attention(*operands, backend=backend)[at]

    return _judged(backends_of("merge_attention"), run, lambda ours: verdict(ours, plain, truth, eps, size))


def known_replies(count: int) -> tuple[list[list[int]], list[float]]:
    """Replies ``Score: 0.d`` of eight tokens, and what they say."""
    number = {text: token for token, text in enumerate(VOCABULARY)}
    replies = [[number[text] for text in ("Score", ":", " ", "0", ".", str(at % 10))] + [0, 0] for at in range(count)]
    return replies, [at % 10 / 10 for at in range(count)]


def _parse(setup: Setup) -> Iterator[Row]:
    """Equal to what the replies say, and to plain PyTorch on the CPU on random ones: values, NaN and status."""
    replies, expected = known_replies(1000)
    table = ops.token_table(VOCABULARY, [0])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(-1, len(VOCABULARY), (2000 if setup.tiny else 20_000, 12), generator=generator)
    truth = ops.parse_scores(tokens, table, backend="torch")
    on_device = table.to(setup.device)

    def wrong(backend: str) -> Tensor:
        known = ops.parse_scores(torch.tensor(replies).to(setup.device), on_device, backend=backend)
        values, status = (x.cpu() for x in ops.parse_scores(tokens.to(setup.device), on_device, backend=backend))
        same = (values == truth.values) | (values.isnan() & truth.values.isnan())
        return (known.values.cpu() != torch.tensor(expected)).sum() + (~same | (status != truth.status)).sum()

    def judge(count: Tensor) -> Row:
        return {"error": count.item(), "plain_error": 0, "allowed": 0, "verdict": "fail" if count else "pass"}

    return _judged(backends_of("parse_scores"), wrong, judge)
