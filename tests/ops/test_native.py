"""The C++ kernels: every instruction set of this machine, memory bounds, loading and building."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gatekern.ops import native
from gatekern.ops.label_scores import LabelScores, pack_groups
from gatekern.ops.parse_scores import automaton, token_table
from tests.head_operands import Head

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

_reason = native.why_not()
needs_native = pytest.mark.skipif(_reason is not None, reason=str(_reason))
ISAS = [] if _reason else native._module().instruction_sets()


def run(head, groups: list[list[int]], isa: str) -> LabelScores:
    packed = pack_groups(groups, head.weight.shape[0])
    hidden, weight, *options = head.operands
    return LabelScores(*native.label_scores(hidden, weight, *packed, *options, instruction_set=isa))


GROUPS = [[3, 96, 41], [0, 7], [50]]


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 576, 577, 4096])
def test_every_instruction_set_is_accurate(isa, dtype, width):
    head = Head.random(17, width, 97, dtype, bias_dtype=dtype, softcap=30.0, scale=0.5)
    head.judge_label_scores(run(head, GROUPS, isa), pack_groups(GROUPS, 97))


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_read_exactly(isa, dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    if isa == "avx512_bf16" and dtype == torch.bfloat16:  # vdpbf16ps reads subnormal inputs as zero
        values = values[(values == 0) | ~(values.abs() < torch.finfo(dtype).tiny)]
    ids, offsets = pack_groups([[0]], 1)
    logits, _ = native.label_scores(
        values[:, None], torch.ones(1, 1, dtype=dtype), ids, offsets, None, None, 1.0, instruction_set=isa
    )
    torch.testing.assert_close(logits[:, 0], values.float(), rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 63, 577])
def test_every_alignment_and_nothing_outside_is_touched(isa, dtype, width):
    head = Head.random(3, width, 5, dtype)
    groups = [[4, 0], [2]]
    ids, offsets = pack_groups(groups, 5)
    expected = run(head, groups, isa)
    for offset in range(64 // head.hidden.element_size() + 1):
        operands = []
        for tensor in (head.hidden, head.weight):  # NaN around and between the rows: an overrun would show
            buffer = torch.full((len(tensor) * (width + 3) + 2 * offset + 64,), float("nan"), dtype=dtype)
            view = buffer.as_strided(tensor.shape, (width + 3, 1), offset)
            view.copy_(tensor)
            operands.append(view)
        logits = torch.full((3 * 2 + 40,), 12345.0)
        score = torch.full((3 + 40,), 12345.0)
        first = offset % 17
        native._module().label_scores(
            isa=isa,
            hidden=operands[0].data_ptr(),
            weight=operands[1].data_ptr(),
            bias=0,
            dtype=native._DTYPES[dtype],
            bias_dtype=0,
            label_ids=ids.data_ptr(),
            group_offsets=offsets.data_ptr(),
            logits=logits[first:].data_ptr(),
            score=score[first:].data_ptr(),
            rows=3,
            width=width,
            vocab=5,
            labels=3,
            groups=2,
            hidden_stride=width + 3,
            weight_stride=width + 3,
            scale=1.0,
            softcap=0.0,
        )
        assert torch.equal(logits[first : first + 6].view(3, 2), expected.logits)
        assert torch.equal(score[first : first + 3], expected.score)
        assert (logits[:first] == 12345).all()
        assert (logits[first + 6 :] == 12345).all()
        assert (score[:first] == 12345).all()
        assert (score[first + 3 :] == 12345).all()


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_offsets_beyond_32_bits(isa):
    head = Head.random(2, 63, 2, torch.bfloat16)
    expected = run(head, [[0], [1]], isa)
    stride = 2**31 + 5  # row 1 begins past 2**31 elements; the pages between the rows are never touched
    for name in ("hidden", "weight"):
        far = torch.empty(stride + 64, dtype=torch.bfloat16).as_strided((2, 63), (stride, 1))
        far.copy_(getattr(head, name))
        setattr(head, name, far)
    assert torch.equal(run(head, [[0], [1]], isa).logits, expected.logits)


@needs_native
def test_a_label_does_not_depend_on_the_labels_beside_it():
    head = Head.random(5, 577, 97)
    for isa in ISAS:
        for count in range(1, 12):
            many = run(head, [[token] for token in range(count)], isa)
            assert torch.equal(many.logits[:, 0], run(head, [[0]], isa).logits[:, 0])


@needs_native
def test_the_parser_writes_nothing_outside_its_rows():
    table, powers, floats = automaton(False, torch.device("cpu"))
    codes, offsets = token_table(["0.5", "", "x</s>"], [])
    tokens = torch.tensor([[0, 1, 2], [7, 0, 0], [-5, 0, 0]])  # an id outside the vocabulary ends a row
    values, status = torch.full((3 + 40,), 12345.0), torch.full((3 + 40,), 99, dtype=torch.uint8)
    for rows in range(4):
        native._module().parse_scores(
            tokens=tokens.data_ptr(),
            codes=codes.data_ptr(),
            offsets=offsets.data_ptr(),
            table=table.data_ptr(),
            powers=powers.data_ptr(),
            floats=floats.data_ptr(),
            values=values[20:].data_ptr(),
            status=status[20:].data_ptr(),
            rows=rows,
            columns=3,
            vocab=3,
            row_stride=3,
        )
        assert (values[:20] == 12345).all()
        assert (values[20 + rows :] == 12345).all()
        assert (status[:20] == 99).all()
        assert (status[20 + rows :] == 99).all()
    assert status[20:23].tolist() == [4, 1, 1]


def python(code: str, path: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), **env}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, cwd=path
    )


SCORE = (
    # An editable install would find the extension of the checkout that the copy was made from.
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
    "import torch, logging; logging.basicConfig()\n"
    "from gatekern.ops import label_scores, backends\n"
    "for _ in range(2): score = label_scores(torch.ones(2, 3), torch.ones(2, 3), [[0], [1]]).score\n"
    "print(score.tolist()); print(backends()[2])"
)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_gatekern_isa_is_obeyed(isa):
    done = python(
        "from gatekern.ops.dispatch import resolved_name; print(resolved_name('label_scores'))", GATEKERN_ISA=isa
    )
    assert done.stdout.strip() == f"native-{isa}", done.stderr


@needs_native
def test_gatekern_isa_that_does_not_exist_raises_with_the_choices():
    done = python(SCORE, GATEKERN_ISA="sse9")
    assert "BackendError: GATEKERN_ISA='sse9' is not an instruction set of gatekern" in done.stderr
    assert f"choices here: {', '.join(ISAS)}" in done.stderr
    done = python("from gatekern.ops import backends; print(backends()[2].reason)", GATEKERN_ISA="sse9")
    assert done.stdout.startswith("GATEKERN_ISA='sse9' is not"), done.stderr


@needs_native
def test_gatekern_isa_that_this_cpu_lacks_raises(monkeypatch):
    class Module:
        def instruction_sets(self):
            return ["scalar"]

    monkeypatch.setattr(native, "_module", Module)
    monkeypatch.setenv("GATEKERN_ISA", "avx2")
    with pytest.raises(native.BackendError, match="not available on this CPU; choices here: scalar"):
        native.isa.__wrapped__()


def copy_package(to: Path) -> Path:
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    return Path(shutil.copytree(ROOT / "gatekern", to / "gatekern", ignore=ignore))


@pytest.mark.parametrize("content", [b"", b"this is no shared library", b"\x7fELF\x02\x01\x01" + bytes(64)])
def test_damaged_library_falls_back_with_one_warning_and_the_cause(tmp_path, content):
    package = copy_package(tmp_path)
    suffix = next(s for s in __import__("importlib.machinery").machinery.EXTENSION_SUFFIXES)
    (package / f"_native{suffix}").write_bytes(content)
    done = python(SCORE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[0.5, 0.5]" in done.stdout
    assert "available=False" in done.stdout
    assert "does not load: ImportError" in done.stdout
    assert done.stderr.count("WARNING:gatekern") == 1, done.stderr
    assert "does not load: ImportError" in done.stderr


def test_foreign_build_is_refused(tmp_path):
    package = copy_package(tmp_path)
    (package / "_native.py").write_text("interface_version = 0\n")
    done = python(SCORE, tmp_path)
    assert "[0.5, 0.5]" in done.stdout
    assert "has interface 0, this version needs" in done.stdout


def test_absent_library_is_not_a_warning(tmp_path):
    copy_package(tmp_path)
    done = python(SCORE, tmp_path)
    assert "[0.5, 0.5]" in done.stdout
    assert "the C++ extension is not built" in done.stdout
    assert "WARNING" not in done.stderr


@needs_native
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
def test_wide_registers_only_in_their_own_translation_units():
    library = native._module().__file__
    listing = subprocess.run(["objdump", "-d", "-C", "--no-show-raw-insn", library], capture_output=True, text=True)
    function, users = "", {"ymm": set(), "zmm": set()}
    for line in listing.stdout.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = header[1]
        for register, names in users.items():
            if f"%{register}" in line:
                names.add(function)
    assert users["zmm"], "the AVX-512 unit is in the build"
    # The dot products have internal linkage, so their names carry the unit's own policy type.
    outside = [name for name in users["zmm"] | users["ymm"] if "dot_block" not in name and "dots" not in name]
    assert outside == []


def copy_build_tree(to: Path) -> None:
    shutil.copytree(ROOT / "csrc", to / "csrc")
    shutil.copy(ROOT / "setup.py", to)
    (to / "gatekern").mkdir()


def test_build_without_a_compiler_warns_once_and_succeeds(tmp_path):
    copy_build_tree(tmp_path)
    (tmp_path / "torch.py").write_text("raise RuntimeError('the build must not import torch')\n")
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the C++ extension was not built") == 1, done.stdout
    assert not list((tmp_path / "gatekern").glob("_native*"))


def test_no_flag_of_the_build_machine():
    source = (ROOT / "setup.py").read_text()
    flags = re.findall(r'"(-[^"]+)"', source)
    assert "-std=c++17" in flags
    assert not [flag for flag in flags if flag.startswith(("-march", "-mtune", "-mcpu", "-ffast"))]
