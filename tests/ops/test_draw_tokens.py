"""Drawing by inverse transform against its definition, one draw at a time."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

from gatekern.errors import InputError
from gatekern.ops import draw_tokens
from tests.head_operands import Head

HEAD = Head.random(7, 63, 300, spread=2.0)


def draws(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 7, (count,), generator=generator)
    return rows, torch.rand(count, generator=generator, dtype=torch.float64)


def definition(rows, uniforms, head=HEAD, temperature=1.0, top_p=1.0) -> list[int]:
    hidden, weight, bias, softcap, scale = head.operands64
    logits = scale * (hidden @ weight.T + (0 if bias is None else bias))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    found = []
    for row, uniform in zip(rows.tolist(), uniforms.tolist(), strict=True):
        p = (logits[row] / temperature).softmax(0).numpy()
        order = np.argsort(-p, kind="stable")
        inside = order[: int((np.cumsum(p[order]) < top_p).sum()) + 1]
        kept = np.where(np.isin(np.arange(len(p)), inside), p, 0.0)
        found.append(int(np.searchsorted(np.cumsum(kept) / kept.sum(), uniform, side="right")))
    return found


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
def test_matches_its_definition(temperature, top_p):
    rows, uniforms = draws(200)
    found = draw_tokens(HEAD.hidden, HEAD.weight, rows, uniforms, temperature=temperature, top_p=top_p)
    assert found.tolist() == definition(rows, uniforms, temperature=temperature, top_p=top_p)


def test_head_terms():
    head = Head.random(7, 63, 300, spread=10.0, bias_dtype=torch.float32, softcap=4.0, scale=0.5)
    rows, uniforms = draws(200)
    hidden, weight, *terms = head.operands
    assert draw_tokens(hidden, weight, rows, uniforms, *terms).tolist() == definition(rows, uniforms, head)


def test_a_draw_does_not_depend_on_the_others(monkeypatch):
    rows, uniforms = draws(300)
    together = draw_tokens(HEAD.hidden, HEAD.weight, rows, uniforms)
    one = torch.zeros(1, dtype=torch.int64)
    alone = [
        draw_tokens(HEAD.hidden[row : row + 1], HEAD.weight, one, uniforms[at : at + 1]).item()
        for at, row in enumerate(rows.tolist())
    ]
    assert together.tolist() == alone
    monkeypatch.setattr(import_module("gatekern.ops.draw_tokens"), "_LOGITS_PER_BLOCK", 600)  # two rows at a time
    assert draw_tokens(HEAD.hidden, HEAD.weight, rows, uniforms).tolist() == alone


def test_temperature_0_takes_the_most_probable():
    rows, uniforms = draws(50)
    found = draw_tokens(HEAD.hidden, HEAD.weight, rows, uniforms, temperature=0.0)
    assert torch.equal(found, (HEAD.hidden @ HEAD.weight.T).argmax(-1)[rows])


def test_the_ends_of_the_unit_interval_are_tokens():
    ends = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    bias = torch.full((300,), -torch.inf)
    bias[[40, 50]] = 0.0
    found = draw_tokens(HEAD.hidden, HEAD.weight, torch.tensor([3, 3]), ends, bias)
    assert found.tolist() == [40, 50]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_draw_nothing(temperature):
    hidden = HEAD.hidden.clone()
    hidden[2] = torch.nan
    rows, uniforms = draws(50)
    found = draw_tokens(hidden, HEAD.weight, rows, uniforms, temperature=temperature)
    clean = draw_tokens(HEAD.hidden, HEAD.weight, rows, uniforms, temperature=temperature)
    assert torch.equal(found, clean.where(rows != 2, -1))


def test_a_nucleus_beyond_the_first_thousand_tokens():
    head = Head.random(2, 8, 5000, spread=0.01)
    rows, uniforms = torch.tensor([0, 1] * 100), draws(200)[1]
    found = draw_tokens(head.hidden, head.weight, rows, uniforms, top_p=0.5)
    assert (head.hidden @ head.weight.T).gather(1, found.view(100, 2).T).min() > (head.hidden @ head.weight.T).median()
    assert len(found.unique()) > 50


@pytest.mark.parametrize("options", [{"temperature": -0.1}, {"temperature": float("inf")}, {"top_p": 0}, {"top_p": 2}])
def test_bad_options(options):
    with pytest.raises(InputError):
        draw_tokens(HEAD.hidden, HEAD.weight, *draws(3), **options)
