"""A forward never waits for the device: run on the meta device, where reading any value raises.

What remains are copies of plans to the device; their number must not grow with layers or with facts.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gatekern.engine import attention
from gatekern.engine.packed import Execution, PackedPath
from gatekern.engine.work import Work
from tests.exactness import TRIE
from tests.families import tiny_model

META = torch.device("meta")


class Transfers(TorchDispatchMode):
    """Counts copies to the device, and would note values that are read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = 0
        self.reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
        if "meta" in inputs and func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.reads.append(func.name())
        out = func(*args, **(kwargs or {}))
        outputs = {out.device.type} if isinstance(out, torch.Tensor) else set()
        self.to_device += inputs == {"cpu"} and outputs == {"meta"}
        return out


@pytest.fixture
def on_triton(monkeypatch):
    """Everything of the Triton path but the launch itself."""
    pytest.importorskip("triton")
    from gatekern.ops.triton import prefix_attention as module

    class Kernel:
        def __init__(self) -> None:
            self.launches = 0

        def __getitem__(self, grid):
            def launch(*args, **options):
                self.launches += 1

            return launch

    def through_triton(*operands, backend, invariant, **options):
        return module.prefix_attention(*operands, **options)

    kernel = Kernel()
    monkeypatch.setattr(module, "prefix_attention_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())  # it does not know this device
    monkeypatch.setattr(attention, "prefix_attention", through_triton)
    return kernel


def prompts(facts: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 97, 60) for _ in range(2)]
    return [np.concatenate([contexts[at % 2], rng.integers(0, 97, 9)]) for at in range(facts)]


def transfers(family: str, layers: int, facts: int, execution: Execution) -> tuple[int, int]:
    """Copies to the device of one prefill with a trie, and of one step of a decode."""
    model = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=layers).to(META)
    path = PackedPath(model.get_decoder(), META, 4096, execution)
    path.hidden_rows(prompts(facts), Work())  # learns the layers
    with Transfers() as prefill:
        path.hidden_rows(prompts(facts), Work(), TRIE)
    (continuation,) = path.continuations(prompts(facts), Work())
    decode = continuation.start()
    with Transfers() as step:
        decode.extend(np.arange(facts), np.ones(facts, dtype=np.int64))
    assert prefill.reads == step.reads == []
    return prefill.to_device, step.to_device


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "mixtral", "granite", "cohere", "phi3", "olmo2"])
def test_a_forward_reads_nothing_back(on_triton, family):
    few = transfers(family, 2, 6, Execution())
    launches = on_triton.launches
    assert launches == 2 * 4
    assert transfers(family, 4, 6, Execution()) == few
    assert transfers(family, 2, 60, Execution()) == few
    assert sum(few) < 20


def test_padding_to_buckets_reads_nothing_back(on_triton):
    few = transfers("llama", 2, 6, Execution(invariant=True, token_buckets=(256, 1024)))
    assert transfers("llama", 4, 60, Execution(invariant=True, token_buckets=(256, 1024))) == few


def test_reading_a_value_would_be_noticed(on_triton, monkeypatch):
    launch = attention.prefix_attention

    def waits(*operands, **options):
        out = launch(*operands, **options)
        out.sum().item()
        return out

    monkeypatch.setattr(attention, "prefix_attention", waits)
    with pytest.raises(RuntimeError, match="item"):
        transfers("llama", 2, 6, Execution())
