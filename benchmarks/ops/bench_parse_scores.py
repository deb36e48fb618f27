"""Replies to scores, against a loop of regular expressions: pytest benchmarks/ops/bench_parse_scores.py.

Every form is checked on replies whose scores are known before it is timed.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from gatekern.errors import BackendError
from gatekern.ops import dispatch, parse_scores, parse_texts, token_table

NUMBER = re.compile(r"\d+(?:\.\d+)?")
VOCABULARY = ["</s>", "Score", ":", " ", "0", ".", *"123456789", " because", " the", " text", " says", " so"]
FORMS = ["auto", "torch", "re"]


def by_regular_expression(texts: list[str]) -> list[float]:
    """The usual code: the last number, if it is in [0, 1]."""
    scores = []
    for text in texts:
        numbers = NUMBER.findall(text)
        scores.append(float(numbers[-1]) if numbers and float(numbers[-1]) <= 1 else float("nan"))
    return scores


def check(values, expected: list[float]) -> None:
    assert np.asarray(values, dtype=np.float32).tolist() == np.float32(expected).tolist()


def name_of(form: str, device: str = "cpu") -> str:
    try:
        return form if form == "re" else dispatch.resolved_name("parse_scores", form, device)
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("form", FORMS)
def test_tokens(benchmark, form):
    device = "cuda" if torch.cuda.is_available() and form != "re" else "cpu"
    table = token_table(VOCABULARY, [0]).to(device)
    number = {text: token for token, text in enumerate(VOCABULARY)}
    expected = [i % 10 / 10 for i in range(1000)]
    rows = [[number[text] for text in ("Score", ":", " ", "0", ".", str(i % 10))] + [0, 0] for i in range(1000)]
    tokens = torch.tensor(rows, device=device)
    benchmark.group = "1000 replies of 8 tokens"
    benchmark.extra_info["backend"] = name_of(form, device)

    def run():
        if form == "re":
            return by_regular_expression(["".join(VOCABULARY[t] for t in row if t) for row in tokens.tolist()])
        values = parse_scores(tokens, table, backend=form).values
        if device == "cuda":
            torch.cuda.synchronize()
        return values

    result = run()
    check(result if form == "re" else result.cpu(), expected)
    benchmark(run)


@pytest.mark.parametrize("form", FORMS)
def test_texts(benchmark, form):
    expected = [i / 1000 for i in range(1000)]
    filler = "The text says so in its second paragraph, and nothing else in it speaks against the claim. " * 3
    texts = [f"{filler[:184]} Score: {value:.3f}..." for value in expected]
    assert {len(text) for text in texts} == {200}
    benchmark.group = "1000 texts of 200 characters"
    benchmark.extra_info["backend"] = name_of(form)

    def run():
        return by_regular_expression(texts) if form == "re" else parse_texts(texts, backend=form).values

    check(run(), expected)
    benchmark(run)
