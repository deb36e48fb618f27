"""compile=True: the decoder layers through torch.compile, the model untouched, the result as exact as before."""

from __future__ import annotations

import pytest
import torch

from gatekern.engine.backbone import Backbone
from gatekern.engine.compiling import compiled_layers, in_place_of
from gatekern.errors import BackendError, UnsupportedModelError
from tests.exactness import LIMIT, TRIE, decoded_logits, logits_of, prompts_of_unequal_length, separate_logits
from tests.families import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:Torchinductor does not support:UserWarning")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "llama4_text"])
def test_compiled_layers_are_as_exact(family):
    """Windows, sinks, soft-caps, experts and Llama 4's temperature; prefills of several sizes, tries and decodes."""
    model, prompts = tiny_model(family), prompts_of_unequal_length()
    graphs = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    before = graphs["unique_graphs"]
    backbone = Backbone(model, compiled=True)
    assert backbone.path == "packed"
    truth = separate_logits(model, prompts)
    assert (logits_of(backbone, prompts) - truth).abs().max() <= LIMIT
    assert (logits_of(backbone, prompts[:2]) - truth[:2]).abs().max() <= LIMIT
    assert (logits_of(Backbone(model, compiled=True, max_tokens=40), prompts) - truth).abs().max() <= LIMIT
    together = logits_of(backbone, prompts, trie=TRIE)
    assert (decoded_logits(backbone, prompts, TRIE) - together).abs().max() <= LIMIT
    # One graph serves all layers of a kind and all lengths, with attention inside it.
    assert 1 <= graphs["unique_graphs"] - before <= 4
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_model_is_left_as_it_was():
    model = tiny_model("llama")
    layers = list(model.model.layers)
    compiled = compiled_layers(model.get_decoder())
    assert list(compiled) == layers
    with in_place_of(compiled):
        assert all(layer._compiled_call_impl is not None for layer in layers)
    assert all(layer._compiled_call_impl is None for layer in layers)

    def fails() -> None:
        with in_place_of(compiled):
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fails()
    assert all(layer._compiled_call_impl is None for layer in layers)


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(UnsupportedModelError, match="no decoder layers"):
        compiled_layers(torch.nn.Linear(2, 2))
    with pytest.raises(
        UnsupportedModelError, match="compile=True needs the packed path, and mamba2 takes the branched"
    ):
        Backbone(tiny_model("mamba2"), compiled=True)


def test_a_layer_that_does_not_compile_is_an_error_not_a_slower_path(monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda call, **_: broken)
    with pytest.raises(BackendError, match="compile=True: RuntimeError: no compiler"):
        Backbone(tiny_model("llama"), compiled=True)
