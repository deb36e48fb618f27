"""Promise (b): packed scoring equals one-by-one uncached forwards, for every family of the support matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from gatekern.engine import attention, packed
from gatekern.engine.backbone import Backbone
from gatekern.engine.support import TESTED, support_matrix
from gatekern.engine.work import Work
from gatekern.errors import BackendError, InputError, UnsupportedModelError
from tests.exactness import (
    LIMIT,
    TRIE,
    decoded_logits,
    logits_of,
    measure,
    prompts_of_unequal_length,
    separate_logits,
)
from tests.families import FAMILIES, tiny_config, tiny_model

PATH_OF = {family: path for path, families in TESTED.items() for family in families}


@pytest.mark.parametrize("max_tokens", [None, 40], ids=["one_forward", "forwards_of_40"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_separate_forwards(family, max_tokens):
    result = measure(family, max_tokens=max_tokens)
    assert result.path == PATH_OF[family]
    assert max(result.error, result.tree_error, result.decode_error) <= LIMIT
    assert result.spread > 300 * LIMIT, "logits too uniform for the comparison to mean anything"
    if result.path == "packed":
        assert result.computed < 0.35 * result.naive


def test_the_matrix_lists_what_is_tested():
    assert set(FAMILIES) == {family for path, families in TESTED.items() if path != "refused" for family in families}


def test_every_architecture_of_transformers_has_a_path_and_a_reason():
    matrix = support_matrix()
    assert len(matrix) > 150
    assert all(support.reason for support in matrix.values())
    assert {matrix[name].path for name in ("llama", "qwen2", "llama4_text", "gemma4_text")} == {"packed"}
    assert matrix["mamba2"].path == "branched"
    assert matrix["deepseek_v32"].path == "full"
    assert matrix["bart"].path == matrix["bert"].path == "refused"


@pytest.mark.parametrize(
    ("family", "breakage"),
    [
        ("mistral", ("_reach", lambda module, layer, window: (None, None))),
        ("gemma3_text", ("_reach", lambda module, layer, window: (None, None))),
        ("llama4_text", ("_reach", lambda module, layer, window: (window, None))),
        ("llama4_text", ("_temperature", lambda module: None)),
    ],
)
def test_the_comparison_can_fail(family, breakage, monkeypatch):
    """Without windows, chunks or the temperature of Llama 4 the error is far above the limit."""
    monkeypatch.setattr(attention, *breakage)
    monkeypatch.setattr(
        Backbone,
        "_prove_path",
        lambda self, decoder, execution, explicit: packed.PackedPath(decoder, self.device, 2048, execution),
    )
    assert measure(family).error > 100 * LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "llama4_text"])
def test_low_precision_is_as_exact_as_separate_forwards(family, dtype):
    """Distance to float32 truth: ours at most that of separate forwards in the same dtype, plus a margin."""
    prompts = prompts_of_unequal_length()
    truth = separate_logits(tiny_model(family), prompts)
    model = tiny_model(family, dtype=dtype)
    separate = (separate_logits(model, prompts) - truth).abs()
    ours = (logits_of(Backbone(model), prompts) - truth).abs()
    # Root mean squares: the maximum over 15 x 97 logits of two noises is itself noisy.
    assert ours.square().mean().sqrt() <= 1.25 * separate.square().mean().sqrt()


@pytest.mark.parametrize(("family", "kind"), [("llama4", "Llama4"), ("gemma3", "Gemma3"), ("gemma4", "Gemma4")])
def test_the_text_part_of_multimodal_models(family, kind):
    """Llama-4-Scout, Gemma 3 and Gemma 4 checkpoints are multi-modal; only their language model runs."""
    text = tiny_config(f"{family}_text")
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "llama4":
        vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "image_size": 16,
                   "patch_size": 8}  # fmt: skip
    arguments = {"audio_config": None} if family == "gemma4" else {}
    config = getattr(transformers, f"{kind}Config")(text_config=text.to_dict(), vision_config=vision, **arguments)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    backbone, prompts = Backbone(model), prompts_of_unequal_length()
    assert backbone.path == "packed"
    # transformers 5.24 fails on text alone in Llama4ForConditionalGeneration; its language model does not.
    truth = separate_logits(model.language_model if family == "llama4" else model, prompts)
    assert (logits_of(backbone, prompts) - truth).abs().max() <= LIMIT


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0,
                  "rope_theta": 10000.0, "original_max_position_embeddings": 40}),
    ],
)  # fmt: skip
def test_angles_that_depend_on_the_longest_prompt_never_mix(family, rope):
    """GK-012: prompts on both sides of the switch, in one call, in any order, and again after a longer one."""
    limits = {"max_position_embeddings": 40} if family == "llama" else {"original_max_position_embeddings": 40}
    model = tiny_model(family, rope_parameters=rope, sliding_window=None, **limits)
    backbone = Backbone(model)
    assert backbone.support.packed_limit == 40
    prompts = prompts_of_unequal_length()
    assert {len(p) > 40 for p in prompts} == {True, False}

    def alone(prompt):
        """A forward that no earlier, longer call has left its angles in."""
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long))
        return separate_logits(model, [prompt])

    truth = torch.cat([alone(prompt) for prompt in prompts])
    order = np.random.default_rng(0).permutation(len(prompts))
    for _ in range(2):
        assert (logits_of(backbone, prompts) - truth).abs().max() <= LIMIT
        shuffled = logits_of(backbone, [prompts[at] for at in order])
        assert (shuffled - truth[order]).abs().max() <= LIMIT

    # What follows a prompt counts: a reply may cross the switch that its prompt does not.
    texts = [np.concatenate([prompt, path]) for prompt in prompts for path in TRIE.paths()]
    below = torch.cat([alone(text) for text in texts]).view(len(prompts), 1 + len(TRIE), -1)
    assert any(len(prompt) <= 40 < len(prompt) + 3 for prompt in prompts)
    assert (logits_of(backbone, prompts, trie=TRIE) - below).abs().max() <= LIMIT
    assert (decoded_logits(backbone, prompts, TRIE) - below).abs().max() <= LIMIT


def test_yarn_and_llama3_angles_are_static():
    for rope in (
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ):  # fmt: skip
        result = measure("llama", rope_parameters=rope)
        assert result.path == "packed"
        assert result.error <= LIMIT


def test_a_call_changes_nothing(monkeypatch):
    """GK-002: the same scores before and after other calls, also one that fails half-way; the model is untouched."""
    model = tiny_model("gemma2")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    backbone, prompts = Backbone(model, max_tokens=40), prompts_of_unequal_length()
    first = logits_of(backbone, prompts[:3])
    logits_of(backbone, prompts[5:])
    run, calls = attention.prefix_attention, []

    def breaks(*args, **options):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("half-way")
        return run(*args, **options)

    monkeypatch.setattr(attention, "prefix_attention", breaks)
    with pytest.raises(RuntimeError, match="half-way"):
        logits_of(backbone, prompts)
    monkeypatch.undo()
    assert torch.equal(logits_of(backbone, prompts[:3]), first)
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_no_forward_computes_vocabulary_logits():
    """GK-019: the head sees no prompt token; only label rows and tiles of one row a prompt are computed."""
    model = tiny_model("llama")
    backbone, prompts = Backbone(model), prompts_of_unequal_length()
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call))
    backbone.hidden_rows(prompts, Work())
    assert seen == []


def test_plan_tensors_follow_the_layers_of_a_dispatched_model(tmp_path):
    """A model spread over devices by accelerate hooks (here: memory and disk) scores the same."""
    accelerate = pytest.importorskip("accelerate")
    prompts = prompts_of_unequal_length()
    truth = separate_logits(tiny_model("llama"), prompts)
    model = tiny_model("llama")
    names = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    names |= {f"model.layers.{at}": "cpu" if at % 2 else "disk" for at in range(4)}
    model = accelerate.dispatch_model(
        model, device_map=names, offload_dir=tmp_path, main_device="cpu", force_hooks=True
    )
    assert (logits_of(Backbone(model), prompts) - truth).abs().max() <= LIMIT


@pytest.mark.parametrize(("part", "words"), [("lm_head", "output head"), ("model.embed_tokens", "input embedding")])
def test_an_offloaded_head_or_embedding_is_refused_by_name(tmp_path, part, words):
    accelerate = pytest.importorskip("accelerate")
    names = dict.fromkeys(["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    model = accelerate.dispatch_model(
        tiny_model("llama"),
        device_map={**names, part: "disk"},
        offload_dir=tmp_path,
        main_device="cpu",
        force_hooks=True,
    )
    with pytest.raises(UnsupportedModelError, match=f"the {words} is offloaded"):
        Backbone(model)


def test_models_that_cannot_be_scored_are_refused_by_name():
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(UnsupportedModelError, match="t5: encoder-decoder"):
        Backbone(transformers.T5ForConditionalGeneration(config).eval())
    bert = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(UnsupportedModelError, match="bert: an encoder"):
        Backbone(transformers.BertLMHeadModel(bert).eval())
    with pytest.raises(InputError, match=r"model\.eval\(\)"):
        Backbone(tiny_model("llama").train())
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(UnsupportedModelError, match="nan"):
        Backbone(broken)


def test_a_head_that_its_configuration_does_not_describe_is_refused():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.01)
    with pytest.raises(UnsupportedModelError, match="not what its configuration describes"):
        Backbone(model)


def test_a_bidirectional_model_is_refused(monkeypatch):
    """No path reproduces separate forwards when later tokens change earlier ones."""
    model = tiny_model("llama")
    attend = transformers.models.llama.modeling_llama.LlamaAttention.forward

    def sees_all(self, hidden_states, **options):
        mean = hidden_states.mean(dim=1, keepdim=True)
        return attend(self, hidden_states + mean, **options)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", sees_all)
    with pytest.raises(UnsupportedModelError, match="not causal"):
        Backbone(model)


def test_running_the_model_elsewhere_during_a_call_is_an_error_not_a_wrong_result():
    model = tiny_model("llama")
    model.config._attn_implementation = attention.NAME
    with pytest.raises(BackendError, match="another thread"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
