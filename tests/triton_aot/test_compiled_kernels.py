"""Every shipped configuration, compiled for every architecture without a GPU; `-s` prints the table.

Each kernel must fit the part's shared memory, spill nothing, use tensor cores where it multiplies 16-bit operands, and
compute row offsets in 64 bits.
"""

from __future__ import annotations

import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(allow_module_level=True, reason="the interpreter replaces the compiler: run in a process of its own")
pytest.importorskip("triton")

from gatekern.ops.triton import configs
from gatekern.ops.triton.label_scores import label_scores_kernel
from gatekern.ops.triton.parse_scores import parse_scores_kernel
from gatekern.ops.triton.vocab_lse import row_lse_kernel, tile_lse_kernel

# Ampere, Hopper and Blackwell data-centre parts; then Ada and Blackwell parts, which have 99 KiB of shared memory.
LARGE, SMALL = (80, 90, 100), (89, 120)
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
SIZES = ("rows", "width", "vocab", "labels", "groups", "tiles", "hidden_stride", "weight_stride")
TYPES = {
    **dict.fromkeys(SIZES, "i32"),
    **dict.fromkeys(("bias", "logits", "score", "partial", "out"), "*fp32"),
    **dict.fromkeys(("label_ids", "group_offsets"), "*i64"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}
UNALIGNED = frozenset({"rows", "labels", "groups", "tiles", "vocab"})


def types(dtype: str) -> dict[str, str]:
    return {**TYPES, "hidden": f"*{dtype}", "weight": f"*{dtype}"}


def report(name, dtype, config, arch, softcap, used) -> None:
    tile = f"{config.block_rows}x{config.block_vocab}x{config.block_width} w{config.num_warps} s{config.num_stages}"
    cap = "softcap" if softcap else "-"
    print(
        f"\n{name:14s} {dtype} {tile:19s} {cap:8s} sm_{arch:<4d} {used.registers:3d} registers "
        f"{used.shared:6d} B shared, stack {used.stack}, spill {used.spill}, {' '.join(used.instructions) or 'no mma'}",
        end="",
    )


def check(used, arch: int, shared_limit: dict[int, int]) -> None:
    assert used.stack == 0
    assert used.spill == 0
    assert used.shared <= shared_limit[arch]
    assert used.registers <= 255


@pytest.mark.parametrize("arch", LARGE + SMALL)
@pytest.mark.parametrize("labels", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_label_scores(compile_kernel, shared_limit, dtype, labels, arch):
    config = configs.label_scores_config(ELEMENT_SIZE[dtype], labels)
    constants = {
        "HAS_BIAS": True,
        "HAS_SOFTCAP": True,
        "UPCAST": False,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_LABELS": config.block_vocab,
        "BLOCK_WIDTH": config.block_width,
    }
    used = compile_kernel(label_scores_kernel, types(dtype), constants, arch, config, UNALIGNED)
    report("label_scores", dtype, config, arch, True, used)
    check(used, arch, shared_limit)
    # Sixteen rows are below the 64 of a Hopper or Blackwell matrix instruction: the warp-wide one is the right choice.
    assert used.instructions == (frozenset() if dtype == "fp32" else frozenset({"mma.sync"}))
    check_row_offsets(used.ttir, config.block_rows)


@pytest.mark.parametrize(("arch", "large"), [(arch, True) for arch in LARGE] + [(arch, False) for arch in SMALL])
@pytest.mark.parametrize(("dtype", "softcap"), [("bf16", False), ("bf16", True), ("fp16", True), ("fp32", True)])
def test_vocab_lse_tiles(compile_kernel, shared_limit, dtype, softcap, arch, large):
    config = configs.vocab_lse_config(ELEMENT_SIZE[dtype], divmod(arch, 10))
    if dtype != "fp32":
        assert (config.block_vocab == 256) == large
    constants = {
        "HAS_BIAS": True,
        "HAS_SOFTCAP": softcap,
        "UPCAST": False,
        "BAND": configs.ROW_TILES_PER_BAND,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_VOCAB": config.block_vocab,
        "BLOCK_WIDTH": config.block_width,
    }
    used = compile_kernel(tile_lse_kernel, types(dtype), constants, arch, config, UNALIGNED)
    report("vocab_lse", dtype, config, arch, softcap, used)
    check(used, arch, shared_limit)
    tensor_core = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
    assert used.instructions == (frozenset() if dtype == "fp32" else frozenset({tensor_core[arch]}))
    check_row_offsets(used.ttir, config.block_rows)


@pytest.mark.parametrize("arch", LARGE)
def test_vocab_lse_rows(compile_kernel, shared_limit, arch):
    config = configs.Config(
        block_rows=1, block_vocab=configs.PARTIALS_PER_STEP, block_width=0, num_warps=4, num_stages=3
    )
    used = compile_kernel(row_lse_kernel, TYPES, {"BLOCK": configs.PARTIALS_PER_STEP}, arch, config, UNALIGNED)
    report("vocab_lse rows", "fp32", config, arch, False, used)
    check(used, arch, shared_limit)


PARSE_TYPES = {
    **dict.fromkeys(("rows", "columns", "vocab", "row_stride"), "i32"),
    **{"tokens": "*i64", "codes": "*u8", "offsets": "*i32", "table": "*i32", "powers": "*i64", "floats": "*fp64"},
    **{"values": "*fp32", "statuses": "*u8"},
}


@pytest.mark.parametrize("arch", LARGE + SMALL)
@pytest.mark.parametrize("tokens", ["*i64", "*i32"])
def test_parse_scores(compile_kernel, shared_limit, tokens, arch):
    config = configs.PARSE_SCORES
    types = {**PARSE_TYPES, "tokens": tokens}
    unaligned = frozenset({"rows", "columns", "vocab", "row_stride"})
    used = compile_kernel(parse_scores_kernel, types, {"BLOCK_ROWS": config.block_rows}, arch, config, unaligned)
    report("parse_scores", tokens, config, arch, False, used)
    check(used, arch, shared_limit)
    # Rows times their stride are 64-bit; a state times the classes is within the table.
    products = re.findall(r"arith\.muli (.*) : (tensor<[^>]*>)", used.ttir)
    assert any("row" in names and product.endswith("xi64>") for names, product in products), products


def test_sizes_of_one_compile(compile_kernel):
    """The run-time compiler turns an integer argument that is 1 into a constant."""
    config = configs.label_scores_config(2, 1)
    blocks = {"BLOCK_ROWS": config.block_rows, "BLOCK_LABELS": config.block_vocab, "BLOCK_WIDTH": config.block_width}
    flags = {"HAS_BIAS": False, "HAS_SOFTCAP": False, "UPCAST": False}
    ones = dict.fromkeys(("rows", "width", "vocab", "labels", "groups", "hidden_stride", "weight_stride"), 1)
    assert compile_kernel(label_scores_kernel, types("bf16"), {**blocks, **flags, **ones}, 90, config, UNALIGNED)
    config = configs.vocab_lse_config(2, (9, 0))
    blocks = {"BLOCK_ROWS": config.block_rows, "BLOCK_VOCAB": config.block_vocab, "BLOCK_WIDTH": config.block_width}
    del ones["labels"], ones["groups"]
    constants = {**blocks, **flags, **ones, "BAND": configs.ROW_TILES_PER_BAND}
    assert compile_kernel(tile_lse_kernel, types("bf16"), constants, 90, config, UNALIGNED)
    assert compile_kernel(row_lse_kernel, TYPES, {"BLOCK": 1024, "tiles": 1}, 90, config, UNALIGNED)


def check_row_offsets(ttir: str, block_rows: int) -> None:
    """Row numbers times strides pass 2**31: the products that address rows are 64-bit."""
    products = re.findall(r"arith\.muli .* : (tensor<[^>]*>)", ttir)
    rows = [product for product in products if product.startswith(f"tensor<{block_rows}")]
    assert rows
    assert all(product.endswith("xi64>") for product in products), products
