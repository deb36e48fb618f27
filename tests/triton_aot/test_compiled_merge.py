"""The merge kernel compiled for every architecture without a GPU; `-s` prints the table."""

from __future__ import annotations

import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(allow_module_level=True, reason="the interpreter replaces the compiler: run in a process of its own")
pytest.importorskip("triton")

from gatekern.ops.triton.configs import MERGE_ATTENTION
from gatekern.ops.triton.merge_attention import merge_attention_kernel

SIDES = ("out_a", "lse_a", "out_b", "lse_b")
STRIDES = tuple(f"{side}_{axis}_stride" for side in SIDES for axis in ("row", "head"))
CONSTANTS = {"BLOCK_ROWS": MERGE_ATTENTION.block_rows, "BLOCK_WIDTH": MERGE_ATTENTION.block_width}
UNALIGNED = frozenset({"rows", "heads", *(stride for stride in STRIDES if stride.startswith("lse"))})


def types(dtype: str) -> dict[str, str]:
    return {
        **dict.fromkeys(("out_a", "out_b", "out"), f"*{dtype}"),
        **dict.fromkeys(("lse_a", "lse_b", "lse"), "*fp32"),
        **dict.fromkeys(("rows", "heads", "dim", *STRIDES), "i32"),
    }


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_merge_attention(compile_kernel, shared_limit, dtype, arch):
    used = compile_kernel(merge_attention_kernel, types(dtype), CONSTANTS, arch, MERGE_ATTENTION, UNALIGNED)
    print(
        f"\nmerge_attention {dtype} {CONSTANTS} w{MERGE_ATTENTION.num_warps} sm_{arch:<4d} "
        f"{used.registers:3d} registers {used.shared:6d} B shared, stack {used.stack}, spill {used.spill}",
        end="",
    )
    assert used.stack == 0
    assert used.spill == 0
    assert used.shared <= shared_limit[arch]
    assert used.registers <= 128  # bound by memory: four warps a program, so that four programs share a multiprocessor
    products = re.findall(r"arith\.muli .* : (tensor<[^>]*>)", used.ttir)  # row numbers times strides pass 2**31
    assert products
    assert all(product.endswith("xi64>") for product in products), products


def test_sizes_of_one_compile(compile_kernel):
    """The run-time compiler turns an integer argument that is 1 into a constant."""
    ones = dict.fromkeys(("rows", "heads", "dim", *STRIDES), 1)
    assert compile_kernel(merge_attention_kernel, types("bf16"), {**CONSTANTS, **ones}, 90, MERGE_ATTENTION, UNALIGNED)
