"""Which form runs, and what a user is told."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gatekern.errors import BackendError
from gatekern.ops import backends, dispatch, label_scores, native, vocab_lse
from gatekern.ops.label_scores import label_scores_reference, pack_groups

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget what earlier tests found out and said, before and after."""
    monkeypatch.setattr(dispatch, "_broken", {})
    monkeypatch.setattr(dispatch, "_said", set())
    dispatch._triton_state.cache_clear()
    yield
    dispatch._triton_state.cache_clear()


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU that looks usable until something is launched."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "Pretend GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    import triton

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: None))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    return driver


def test_import_touches_neither_triton_nor_cuda():
    code = (
        "import sys, torch, gatekern.ops; "
        "assert 'triton' not in sys.modules; assert 'gatekern._native' not in sys.modules; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_auto_on_cpu():
    expected = "torch" if native.why_not() else "native"
    assert dispatch.select("label_scores") == expected
    assert dispatch.select("parse_scores") == expected
    assert dispatch.select("vocab_lse") == "torch"
    assert dispatch.select("label_scores", "auto", "meta") == "torch"


def test_resolved_name():
    if reason := native.why_not():
        pytest.skip(reason)
    assert dispatch.resolved_name("label_scores") == f"native-{native.isa()}"
    assert dispatch.resolved_name("label_scores", "torch") == "torch"


@pytest.mark.parametrize(
    ("op", "backend", "device", "reason"),
    [
        ("label_scores", "triton", "cpu", "Triton kernels run on CUDA devices only"),
        ("label_scores", "native", "cuda:0", "the C\\+\\+ kernels run on the CPU only"),
        ("vocab_lse", "native", "cpu", "vocab_lse has no native form"),
        ("label_scores", "cuda", "cpu", "unknown backend 'cuda'"),
    ],
)
def test_explicit_backend_raises_with_the_reason(op, backend, device, reason):
    with pytest.raises(BackendError, match=reason):
        dispatch.select(op, backend, device)


def test_explicit_backend_raises_through_the_operator():
    ones = torch.ones(2, 3)
    with pytest.raises(BackendError, match="CUDA devices only"):
        label_scores(ones, ones, [[0], [1]], backend="triton")


def test_backends_describe_this_machine():
    found = {backend.name: backend for backend in backends()}
    assert list(found) == ["triton", "flash", "native", "torch"]
    assert found["torch"].available
    assert found["torch"].detail.startswith(f"torch {torch.__version__}")
    for backend in found.values():
        assert backend.available == (backend.reason == "")
    if found["native"].available:
        assert found["native"].detail == native.describe()
        assert native.isa() in found["native"].detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_no_gpu_is_the_reason():
    pytest.importorskip("triton")
    assert backends()[0].reason == "no CUDA device"


@pytest.mark.parametrize("error", [ImportError("no libtriton"), OSError("bad ELF"), RuntimeError("0 active drivers")])
def test_broken_triton_is_the_reason(monkeypatch, error):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "triton":
                raise error

    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert backends()[0].reason == f"import failed: {type(error).__name__}: {error}"
    assert label_scores(torch.ones(2, 3), torch.ones(2, 3), [[0], [1]]).score.tolist() == [0.5, 0.5]


def test_old_gpu_is_refused_and_said_once(monkeypatch, fake_gpu, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (7, 5))
    with caplog.at_level(logging.INFO, logger="gatekern"):
        for _ in range(3):
            assert dispatch.select("label_scores", "auto", CUDA) == "torch"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "needs compute capability 8.0 or higher, Pretend GPU has 7.5" in caplog.text
    with pytest.raises(BackendError, match=r"Pretend GPU has 7\.5"):
        dispatch.select("label_scores", "triton", CUDA)


def test_missing_c_compiler_is_the_reason(fake_gpu):
    def fail():
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    fake_gpu.active.get_current_target = fail
    assert dispatch.select("vocab_lse", "auto", CUDA) == "torch"
    assert "Failed to find C compiler" in backends()[0].reason


def test_usable_gpu(fake_gpu):
    assert dispatch.select("label_scores", "auto", CUDA) == "triton"
    assert dispatch.resolved_name("vocab_lse", "auto", CUDA) == "triton"
    assert backends()[0].detail.endswith("on Pretend GPU (sm_90)")


def _operands():
    hidden, weight = torch.randn(3, 7), torch.randn(5, 7)
    return hidden, weight, *pack_groups([[0], [1]], 5), None, None, 1.0


def _build_failures():
    return [subprocess.CalledProcessError(1, ["gcc"]), _out_of_resources()]


def _out_of_resources() -> Exception:
    errors = pytest.importorskip("triton.runtime.errors")
    return errors.OutOfResources(300000, 232448, "shared memory")


@pytest.mark.parametrize("error", _build_failures(), ids=lambda error: type(error).__name__)
def test_a_kernel_that_does_not_build_falls_back_once_and_is_remembered(fake_gpu, caplog, error):
    attempts = []

    def broken(*operands):
        attempts.append(1)
        raise error

    forms = {"triton": broken, "torch": label_scores_reference}
    expected = label_scores_reference(*_operands_fixed)
    with caplog.at_level(logging.INFO, logger="gatekern"):
        for _ in range(3):
            result = dispatch.run("label_scores", "auto", CUDA, forms, *_operands_fixed)
            assert torch.equal(result.score, expected.score)
    assert len(attempts) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    with pytest.raises(BackendError, match=type(error).__name__):
        dispatch.select("label_scores", "triton", CUDA)
    assert dispatch.select("vocab_lse", "auto", CUDA) == "triton"


_operands_fixed = _operands()


def test_an_explicit_kernel_that_does_not_build_raises(fake_gpu):
    def broken(*operands):
        raise _out_of_resources()

    with pytest.raises(BackendError, match=r"could not build its kernel.*shared memory"):
        dispatch.run("label_scores", "triton", CUDA, {"triton": broken, "torch": label_scores_reference})


def test_errors_that_are_not_build_failures_are_not_hidden(fake_gpu):
    def out_of_memory(*operands):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        dispatch.run("label_scores", "auto", CUDA, {"triton": out_of_memory, "torch": label_scores_reference})
    assert dispatch.select("label_scores", "auto", CUDA) == "triton"


def test_operands_can_rule_out_a_backend(fake_gpu):
    unfit = {"triton": "300 labels"}
    assert dispatch.select("label_scores", "auto", CUDA, unfit) == "torch"
    with pytest.raises(BackendError, match="300 labels"):
        dispatch.select("label_scores", "triton", CUDA, unfit)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_ignore_autocast_and_record_nothing(backend, dtype):
    """Their promise is float32 accumulation wherever they are called, and no graph that keeps widened tiles."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 64, generator=generator).to(dtype)
    weight = torch.nn.Parameter(torch.randn(300, 64, generator=generator).to(dtype))
    expected = [*label_scores(hidden, weight, [[1], [2]], backend=backend), vocab_lse(hidden, weight, backend=backend)]
    with torch.autocast("cpu", torch.bfloat16):
        inside = [
            *label_scores(hidden, weight, [[1], [2]], backend=backend),
            vocab_lse(hidden, weight, backend=backend),
        ]
    for a, b in zip(expected, inside, strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_every_form_compiles_and_matches_its_fake(backend):
    hidden, weight = torch.randn(5, 8), torch.randn(30, 8)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    torch.library.opcheck(torch.ops.gatekern.label_scores, (hidden, weight, ids, offsets, None, None, 1.0, backend))
    compiled = torch.compile(
        lambda h, w: label_scores(h * 2, w, (ids, offsets), backend=backend).score, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(
        compiled(hidden, weight), label_scores(hidden * 2, weight, (ids, offsets), backend=backend).score
    )
