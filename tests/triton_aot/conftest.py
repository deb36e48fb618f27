"""Compile a kernel without a GPU and read what the assembler made of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gatekern.ops.triton.configs import ENABLE_FP_FUSION, AttentionConfig, Config

# Shared memory that one thread block can have, in bytes (CUDA C programming guide, table of technical specifications).
_SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

# Instructions that multiply on tensor cores: Ampere and Ada, Hopper, Blackwell.
_TENSOR_CORE = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)")


@dataclass(frozen=True)
class Compiled:
    """What one compilation used."""

    registers: int
    stack: int
    spill: int
    shared: int
    instructions: frozenset[str]
    ttir: str


@pytest.fixture
def shared_limit() -> dict[int, int]:
    return _SHARED_LIMIT


@pytest.fixture
def compile_kernel(tmp_path: Path) -> Callable[..., Compiled]:
    """Compile as the run-time compiler would for 16-byte aligned pointers and sizes that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def compile_(
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        arch: int,
        config: Config | AttentionConfig,
        unaligned: frozenset[str] = frozenset(),
        *,
        fp_fusion: bool = ENABLE_FP_FUSION,
    ) -> Compiled:
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if name not in constants and name not in unaligned and types[name] != "fp32"
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned)
        options = {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": fp_fusion,
        }
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        fields = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
        return Compiled(
            registers=fields["REG"],
            stack=fields["STACK"],
            spill=fields["LOCAL"],
            shared=built.metadata.shared,
            instructions=frozenset(_TENSOR_CORE.findall(built.asm["ptx"])),
            ttir=built.asm["ttir"],
        )

    return compile_
