"""Every shipped configuration of the attention kernel, compiled for every architecture without a GPU."""

from __future__ import annotations

import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(allow_module_level=True, reason="the interpreter replaces the compiler: run in a process of its own")
pytest.importorskip("triton")

from gatekern.ops.triton import configs
from gatekern.ops.triton.prefix_attention import prefix_attention_kernel

# Ampere, Hopper and Blackwell data-centre parts; Ada stands for those with 99 KiB of shared memory.
ARCHITECTURES = (80, 90, 100, 89)
TENSOR_CORE = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
STRIDES = [f"{name}_{axis}_stride" for name in ("query", "key", "value") for axis in ("row", "head")]
TYPES = {
    **dict.fromkeys(["heads", "num_keys", *STRIDES], "i32"),
    **dict.fromkeys(["table", "slot_keys", "key_table", "first_visible"], "*i32"),
    **dict.fromkeys(["scale", "softcap"], "fp32"),
}
PLAIN = {"HAS_REACH": False, "HAS_SOFTCAP": False, "HAS_SINKS": False}
EVERYTHING = dict.fromkeys(PLAIN, True)


def compiled(compile_kernel, dtype, dims, arch, flags, group=4):
    block_dims = [max(16, 1 << (dim - 1).bit_length()) for dim in dims]
    config = configs.prefix_attention_config(ELEMENT_SIZE[dtype], max(block_dims), divmod(arch, 10))
    constants = {
        **flags,
        "GROUP": group,
        "DIM": dims[0],
        "VALUE_DIM": dims[1],
        "UPCAST": False,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_SLOTS": config.block_slots,
        "BLOCK_DIM": block_dims[0],
        "BLOCK_VALUES": block_dims[1],
    }
    types = TYPES | dict.fromkeys(["query", "key", "value", "sinks", "out"], f"*{dtype}")
    unaligned = frozenset({"heads", "num_keys"})
    used = compile_kernel(prefix_attention_kernel, types, constants, arch, config, unaligned, fp_fusion=False)
    tile = f"{config.block_rows}x{config.block_slots} w{config.num_warps} s{config.num_stages}"
    kind = "everything" if flags == EVERYTHING else "plain"
    print(
        f"\nprefix_attention {dtype} {dims[0]:3d} {tile:12s} {kind:10s} sm_{arch:<4d} {used.registers:3d} registers "
        f"{used.shared:6d} B shared, stack {used.stack}, spill {used.spill}, {' '.join(used.instructions) or 'no mma'}",
        end="",
    )
    return used


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("flags", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_prefix_attention(compile_kernel, shared_limit, dtype, dim, flags, arch):
    used = compiled(compile_kernel, dtype, (dim, dim), arch, flags)
    assert used.stack == 0
    assert used.spill == 0
    assert used.shared <= shared_limit[arch]
    assert used.instructions == (frozenset() if dtype == "fp32" else frozenset({TENSOR_CORE[arch]}))
    # Row and key numbers times their strides pass 2**31: pointers are offset by 64-bit numbers only.
    offsets = re.findall(r"tt\.addptr .* : tensor<[^>]*!tt\.ptr<(?:bf16|f16|f32)>>, tensor<[^>]*x(i\d+)>", used.ttir)
    assert offsets
    assert set(offsets) <= {"i64", "i32"}
    products = re.findall(r"arith\.muli .* : tensor<[^>]*x(i\d+)>", used.ttir)
    assert products
    assert set(products) == {"i64"}


@pytest.mark.parametrize(
    ("dtype", "dims", "group"),
    [
        ("fp16", (64, 64), 1),
        ("bf16", (80, 80), 7),
        ("bf16", (96, 96), 3),
        ("bf16", (112, 112), 8),
        ("bf16", (192, 128), 1),
    ],
)
def test_other_head_shapes(compile_kernel, shared_limit, dtype, dims, group):
    """Dimensions between powers of two, groups that do not divide a tile, values shorter than keys."""
    for flags in (PLAIN, EVERYTHING):
        used = compiled(compile_kernel, dtype, dims, 90, flags, group)
        assert used.stack == 0
        assert used.spill == 0
        assert used.shared <= shared_limit[90]
        assert used.instructions == {"wgmma.mma_async"}
