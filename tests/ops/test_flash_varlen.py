"""Providers of variable-length attention: how each is called by its own names, which is found, and why none is."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gatekern.errors import BackendError
from gatekern.ops.flash import describe, varlen, why_not
from gatekern.ops.flash.prefix_attention import prefix_attention, unfit
from gatekern.ops.prefix_attention import prefix_attention_reference
from tests.ops.test_flash_attention import StandIn, prompts_below
from tests.ops.test_prefix_attention import operands


@pytest.fixture
def fresh():
    """Look for providers anew, and forget what this test shows."""
    varlen.find.cache_clear()
    varlen._why_not_cuda.cache_clear()
    yield
    varlen.find.cache_clear()
    varlen._why_not_cuda.cache_clear()


@pytest.fixture
def flash_attn(monkeypatch, fresh):
    """A module tree of flash-attn whose function has the names and order of the real one's arguments."""
    stand_in = StandIn()
    given_arguments = []

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert dropout_p == 0.0
        assert return_attn_probs is True
        assert window_size == (-1, -1) or (causal and window_size[1] == 0)
        given_arguments.append((causal, window_size, softcap))
        out, lse = stand_in(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            causal=causal,
            window=None if window_size == (-1, -1) else window_size[0] + 1,
            softcap=softcap or None,
        )
        return out, lse.T.contiguous(), None

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__version__ = "2.8.3"
    interface.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    return SimpleNamespace(arguments=given_arguments, interface=interface)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 2.0), (7, 2.0)])
def test_flash_attn_is_called_by_its_names(flash_attn, window, softcap):
    assert describe() == "flash-attn 2.8.3"
    layout = prompts_below(30, 5)
    q, k, v = operands(layout, 4, 2, 16, 16, torch.bfloat16)
    assert unfit(q, v, layout, window, None, softcap) is None
    out = prefix_attention(q, k, v, layout, scale=0.3, window=window, softcap=softcap)
    truth = prefix_attention_reference(q, k, v, layout, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(out, truth, rtol=2e-2, atol=2e-2)
    size = (-1, -1) if window is None else (6, 0)
    assert flash_attn.arguments[0] == (True, size, softcap or 0.0)
    assert len(flash_attn.arguments) == (2 if window is None else 1)


def test_flash_attn_that_is_old_or_damaged_is_passed_over(flash_attn, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    flash_attn.interface.flash_attn_varlen_func = lambda q, k, v: None
    assert "flash-attn 2.8.3 pads its log-sum-exp" in varlen._find_flash_attn()
    del flash_attn.interface.flash_attn_varlen_func
    assert "flash-attn does not load: AttributeError" in varlen._find_flash_attn()
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    assert "flash-attn does not load" in varlen._find_flash_attn()
    if "scale" in inspect.signature(varlen_module().varlen_attn).parameters:
        assert describe() == f"varlen_attn of torch {torch.__version__}"


def test_a_padded_log_sum_exp_is_refused(flash_attn):
    flash_attn.interface.flash_attn_varlen_func = lambda q, *args, softcap=0.0, **options: (
        q,
        torch.zeros(1, 2, 3),
        None,
    )
    layout = prompts_below(30, 5)
    with pytest.raises(BackendError, match=r"returned a log-sum-exp of shape \(1, 2, 3\)"):
        prefix_attention(*operands(layout, 4, 2, 16, 16, torch.bfloat16), layout, scale=0.3)


def varlen_module():
    return pytest.importorskip("torch.nn.attention.varlen")


def recorder(signature):
    """A function that has this signature, checks calls against it, and keeps them."""
    calls = []

    def function(*args, **options):
        bound = signature.bind(*args, **options)
        calls.append(bound.arguments)
        q = bound.arguments["query"]
        return q.clone(), torch.zeros(q.shape[1], q.shape[0])

    function.__signature__ = signature
    return function, calls


NEW = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)"
OLD = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None, scale=None"


@pytest.mark.parametrize("parameters", ["installed", NEW, OLD])
def test_varlen_attn_is_called_by_its_signature(parameters):
    if parameters == "installed":
        signature = inspect.signature(varlen_module().varlen_attn)
    else:
        signature = inspect.signature(eval(f"lambda {parameters}: None"))
    function, calls = recorder(signature)
    torch_varlen = varlen.TorchVarlen(function, "with lse", "varlen_attn")
    q, k, cu = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    asked = [(False, None), (True, None)]
    if "window_size" in signature.parameters:
        assert torch_varlen.supports_window
        asked.append((True, 3))
    assert not torch_varlen.supports_softcap
    for causal, window in asked:
        out, lse = torch_varlen(q, k, k, cu, cu, 5, 5, scale=0.5, causal=causal, window=window, softcap=None)
        assert out.shape == q.shape
        assert lse.shape == (5, 4)
        arguments = calls.pop()
        assert arguments["cu_seq_q"] is cu
        assert (arguments["max_q"], arguments["max_k"]) == (5, 5)
        assert arguments["scale"] == 0.5
        assert arguments["return_aux"] == "with lse"
        if "window_size" in signature.parameters:
            assert arguments["window_size"] == ((2 if window else -1, 0) if causal else (-1, -1))
        else:
            assert arguments["is_causal"] is causal
        if "enable_gqa" in signature.parameters:
            assert arguments["enable_gqa"] is True


def test_the_installed_varlen_attn_takes_the_call():
    """Its shape function checks the arguments and gives the shapes of the results without a GPU."""
    module = varlen_module()
    torch_varlen = varlen.TorchVarlen(module.varlen_attn, module.AuxRequest(lse=True), "varlen_attn")
    q, k, v = (torch.empty(5, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    for causal, window in ((False, None), (True, None), (True, 3)):
        out, lse = torch_varlen(q, k, v, cu, cu, 3, 3, scale=0.5, causal=causal, window=window, softcap=None)
        assert out.shape == q.shape
        assert lse.shape == (5, 4)


def test_varlen_attn_of_the_installed_torch_is_found(monkeypatch, fresh):
    module = varlen_module()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    found = varlen.find()
    assert found.function is module.varlen_attn
    assert found.with_lse == module.AuxRequest(lse=True)
    assert varlen.provider() is found
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "pads its log-sum-exp on ROCm" in varlen._find_torch_varlen()
    monkeypatch.setattr(module, "varlen_attn", lambda query, key, value: None)
    assert "takes no scale" in varlen._find_torch_varlen()


def test_why_not_tells_the_truth(monkeypatch, fresh):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    nothing = f"flash-attn is not installed, and torch {torch.__version__} has no varlen_attn"
    assert varlen.find() == nothing
    assert describe() == ""
    with pytest.raises(BackendError, match="flash-attn is not installed"):
        varlen.provider()
    layout = prompts_below(3, 2)
    q, _, v = operands(layout, 2, 1, 8, 8, torch.bfloat16)
    assert unfit(q, v, layout, None, None, None) == nothing

    assert why_not(torch.device("cpu")) == "FlashAttention runs on CUDA devices only"
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "Pretend GPU")
    for available, capability, expected in (
        (False, (9, 0), "no CUDA device"),
        (True, (7, 5), "needs compute capability 8.0 or higher, Pretend GPU has 7.5"),
        (True, (9, 0), nothing),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, capability=capability: capability)
        varlen._why_not_cuda.cache_clear()
        assert why_not(cuda) == expected


def test_a_usable_gpu_has_no_reason(flash_attn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    assert why_not(torch.device("cuda", 0)) is None
