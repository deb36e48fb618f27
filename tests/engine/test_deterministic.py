"""deterministic=True: the same bits alone and in company, and a self-test that can say no."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch

import gatekern as gk
from gatekern.engine import backbone as backbone_module
from gatekern.engine.backbone import Backbone
from gatekern.engine.invariance import Invariance, find_invariance
from gatekern.engine.work import Work
from tests.exactness import LIMIT, TRIE, logits_of, prompts_of_unequal_length, separate_logits
from tests.families import tiny_model
from tests.test_verifier import make_verifier

DTYPES = [torch.float32, torch.bfloat16]


def total(hidden: torch.Tensor) -> torch.Tensor:
    """Something that is read from a row, one row after the other."""
    return torch.stack([row.float().sum() for row in hidden])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "phi", "gpt2"])
def test_dense_models_are_verified_on_the_cpu(family, dtype):
    found = Backbone(tiny_model(family, dtype=dtype), deterministic=True).prove_invariance(total)
    assert found.verified, found
    assert str(found) == "verified: the same bits in 6 batches as alone"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prompt_in_many_batches(dtype, threads):
    """Random batches beyond those of the self-test: order, company, budgets, tries, repetition."""
    torch.set_num_threads(threads)
    backbone = Backbone(tiny_model("llama", dtype=dtype), deterministic=True)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 97, 70)
    alone = backbone.hidden_rows([prompt], Work(), TRIE)[0]
    for trial in range(12):
        company = [rng.integers(0, 97, int(length)) for length in rng.integers(1, 90, rng.integers(1, 40))]
        company += [np.concatenate([prompt[: int(cut)], rng.integers(0, 97, 5)]) for cut in rng.integers(0, 71, 6)]
        place = int(rng.integers(0, len(company) + 1))
        budget = [None, 64, 100, 333][trial % 4]
        some = Backbone(backbone.model, deterministic=True, max_tokens=budget) if budget else backbone
        rows = some.hidden_rows([*company[:place], prompt, *company[place:]], Work(), TRIE)
        assert torch.equal(rows[place], alone)


def test_it_is_as_exact_as_ever():
    for family in ("llama", "gemma3_text", "gpt_oss", "llama4_text"):
        model, prompts = tiny_model(family), prompts_of_unequal_length()
        error = (logits_of(Backbone(model, deterministic=True), prompts) - separate_logits(model, prompts)).abs().max()
        assert error <= LIMIT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_scores_in_every_mode(dtype, backend):
    verifier = make_verifier(deterministic=True, backend=backend, dtype=dtype)
    assert verifier.invariance is not None
    assert verifier.invariance.verified
    pair = ("The bridge opened in 1932 and is painted green.", "The bridge is green.")
    others = [(f"Note {at}. " * (1 + at % 9), f"Fact {at}.") for at in range(40)]
    others += [(pair[0], f"The bridge opened in {year}.") for year in range(1900, 1910)]
    for mode, options in (("logprob", {}), ("exact", {}), ("sample", {"k": 4}), ("adaptive", {"threshold": 0.5})):
        alone = verifier.score_batch([pair], mode=mode, **options)
        for batch, at in (([pair, *others], 0), ([*others[::-1], pair], -1)):
            found = verifier.score_batch(batch, mode=mode, **options)
            assert found.scores[at].tobytes() == alone.scores[0].tobytes()
            if alone.label_mass is not None:
                assert found.label_mass[at].tobytes() == alone.label_mass[0].tobytes()


def test_what_cannot_be_promised_is_said(caplog, monkeypatch):
    """Experts of a mixture get rows by the batch; a library may add them in another order."""
    monkeypatch.setattr(backbone_module, "find_invariance", lambda *_: Invariance(False, "a prompt in company differs"))
    with caplog.at_level(logging.WARNING, logger="gatekern"):
        verifier = make_verifier(deterministic=True)
    assert not verifier.invariance.verified
    assert "deterministic=True is unverified: a prompt in company differs" in caplog.text
    # One size for all forwards was tried before giving up.
    assert verifier.backbone._path.execution.token_buckets == (2048,)


def test_the_self_test_can_fail():
    """Whatever depends on the number of rows, on the order, or on the budget is found."""
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.standard_normal((1000, 8)))

    def honest(prompts, budget):
        return torch.stack([table[torch.from_numpy(prompt)].sum(dim=0) for prompt in prompts])

    def by_size(prompts, budget):
        return honest(prompts, budget) + 1e-12 * (len(prompts) > 60)

    def by_budget(prompts, budget):
        return honest(prompts, budget) + 1e-12 * (budget is not None)

    def by_neighbour(prompts, budget):
        return honest(prompts, budget) + 1e-12 * (max(map(len, prompts)) > 200)

    assert find_invariance(honest, 1000, 500).verified
    for dishonest, words in ((by_size, "strangers"), (by_budget, "small forwards"), (by_neighbour, "ten times longer")):
        found = find_invariance(dishonest, 1000, 500)
        assert not found.verified
        assert words in found.detail


def test_ordinary_verifiers_promise_no_bits(tiny_verifier):
    assert tiny_verifier.invariance is None


def test_flash_cannot_be_deterministic():
    with pytest.raises(gk.BackendError, match="flash"):
        Backbone(tiny_model("llama"), attention="flash", deterministic=True)


def test_the_same_bits_in_another_process():
    code = (
        "import torch, numpy as np; from tests.families import tiny_model; from gatekern.engine.work import Work; "
        "from gatekern.engine.backbone import Backbone; torch.set_num_threads(1); "
        "b = Backbone(tiny_model('llama'), deterministic=True); "
        "print(b.hidden_rows([np.arange(40)], Work()).view(torch.int32).sum().item())"
    )
    runs = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120).stdout
            for _ in range(2)}  # fmt: skip
    assert len(runs) == 1
