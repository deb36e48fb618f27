"""prune_last_layer=True: the last layer on the rows that are read, as exact as on all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gatekern.engine.backbone import Backbone
from gatekern.engine.support import TESTED
from gatekern.engine.work import Work
from gatekern.errors import UnsupportedModelError
from tests.exactness import LIMIT, TRIE, decoded_logits, logits_of, prompts_of_unequal_length, separate_logits
from tests.families import tiny_model

OTHER_LAYERS = {"olmo2", "olmo3", "gpt2", "gpt_neox", "opt", "exaone4", "biogpt"}  # other names, or norms after


@pytest.mark.parametrize("family", sorted(set(TESTED["packed"]) - OTHER_LAYERS))
def test_pruned_equals_separate_forwards(family):
    model, prompts = tiny_model(family), prompts_of_unequal_length()
    truth = separate_logits(model, prompts)
    for options in ({}, {"max_tokens": 40}, {"max_tokens": 40, "deterministic": True}):
        backbone = Backbone(model, pruned=True, **options)
        assert backbone.path == "packed"
        assert (logits_of(backbone, prompts) - truth).abs().max() <= LIMIT
    with_trie = logits_of(backbone, prompts, trie=TRIE)
    assert (with_trie[:, :1] - truth).abs().max() <= LIMIT
    assert (with_trie - decoded_logits(backbone, prompts, TRIE)).abs().max() <= LIMIT
    assert (with_trie - logits_of(Backbone(model), prompts, trie=TRIE)).abs().max() <= LIMIT


@pytest.mark.parametrize("family", sorted(OTHER_LAYERS))
def test_layers_of_another_make_are_refused_by_name(family):
    with pytest.raises(UnsupportedModelError, match="does not begin with input_layernorm and self_attn"):
        Backbone(tiny_model(family), pruned=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_bits_survive_pruning(dtype):
    backbone = Backbone(tiny_model("llama", dtype=dtype), pruned=True, deterministic=True)
    found = backbone.prove_invariance(lambda hidden: torch.stack([row.float().sum() for row in hidden]))
    assert found.verified, found


def test_the_last_layer_computes_only_what_is_read():
    model, prompts = tiny_model("llama"), prompts_of_unequal_length()
    backbone = Backbone(model, pruned=True)
    rows = {"mlp": [], "norm": []}
    handles = [
        model.model.layers[-1].mlp.register_forward_hook(lambda m, a, out: rows["mlp"].append(out.shape[1])),
        model.model.norm.register_forward_hook(lambda m, a, out: rows["norm"].append(out.shape[1])),
    ]
    backbone.hidden_rows(prompts, Work())
    assert rows == {"mlp": [len(prompts)], "norm": [len(prompts)]}
    for handle in handles:
        handle.remove()
    assert not model.model.layers[-1]._forward_pre_hooks, "the model is left as it was"


def test_with_compiled_layers():
    model, prompts = tiny_model("llama"), prompts_of_unequal_length()
    backbone = Backbone(model, pruned=True, compiled=True)
    assert (logits_of(backbone, prompts) - separate_logits(model, prompts)).abs().max() <= LIMIT


def test_a_forward_that_reads_nothing():
    """A context longer than the budget: its first forwards are read nowhere."""
    model = tiny_model("llama")
    prompts = [np.concatenate([np.arange(3, 93), [5 + at]]) for at in range(3)]
    backbone = Backbone(model, pruned=True, max_tokens=30)
    assert (logits_of(backbone, prompts) - separate_logits(model, prompts)).abs().max() <= LIMIT


def test_a_layer_that_calls_no_attention_is_an_error(monkeypatch):
    model = tiny_model("llama")
    backbone = Backbone(model, pruned=True)
    monkeypatch.setattr(model.model.layers[-1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(UnsupportedModelError, match="cannot be pruned"):
        backbone.hidden_rows([np.arange(9)], Work())
