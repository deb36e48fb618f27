"""The machine: what it is, and how fast it copies and multiplies."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.recorder import Recorder, Results, Row, Setup
from benchmarks.gpu.timing import compare, rate
from gatekern.ops import backends

_PACKAGES = ("gatekern", "torch", "triton", "transformers", "numpy")
_SMI = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached: bytes/s read and written by a copy, FLOP/s of a matrix product; None: not measured."""

    copy: float | None
    flops: dict[str, float]  # by dtype

    @classmethod
    def of(cls, earlier: Results) -> Ceilings:
        """From the rows of section ``ceilings``."""
        rows = {row["case"]: row.get("per_s") for row in earlier.get("ceilings", {}).get("rows", [])}
        flops = {name: rows[f"matmul {name}"] for name in ("bfloat16", "float32") if rows.get(f"matmul {name}")}
        return cls(rows.get("copy"), flops)

    def floor_us(self, num_bytes: float, flops: float, dtype: torch.dtype | None) -> float | None:
        """``max(bytes / copy bandwidth, FLOP / matmul ceiling)`` in microseconds."""
        peak = self.flops.get("float32" if dtype == torch.float32 else "bfloat16")
        return 1e6 * max(num_bytes / self.copy, flops / peak) if self.copy and peak else None


def environment(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Device, driver, clocks, versions, commit, and which backends can run."""
    recorder.add(what="device", value=_device_name(setup))
    if setup.cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        recorder.add(what="capability", value=f"{properties.major}.{properties.minor}")
        recorder.add(what="multiprocessors", value=properties.multi_processor_count)
        recorder.add(what="memory, GiB", value=round(properties.total_memory / 2**30, 1))
        recorder.add(what="CUDA of torch", value=torch.version.cuda)
        recorder.add(
            what=_SMI.replace(",", ", "), value=_output("nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader")
        )
    recorder.add(what="CPU", value=f"{_cpu_name()}, {torch.get_num_threads()} threads")
    recorder.add(what="sizes", value="tiny" if setup.tiny else "full")
    recorder.add(what="python", value=platform.python_version())
    for package in _PACKAGES:
        recorder.add(what=package, value=_version(package))
    recorder.add(what="commit", value=_output("git", "rev-parse", "--short", "HEAD"))
    for backend in backends():
        recorder.add(what=f"backend {backend.name}", value=backend.detail if backend.available else backend.reason)


def ceilings(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """A copy of a large tensor (bytes read plus bytes written), and ``2 n^3`` FLOP of square products; TF32 off."""
    size = 1 << 20 if setup.tiny else 2 << 30
    sides = {torch.bfloat16: 256, torch.float32: 256} if setup.tiny else {torch.bfloat16: 8192, torch.float32: 4096}

    def copy() -> Row:
        source = torch.randn(size // 2, dtype=torch.bfloat16, device=setup.device)
        target = torch.empty_like(source)
        return rate(compare({"copy": lambda: target.copy_(source)}, setup, 1.0)["copy"], 2 * size, "B/s")

    def product(dtype: torch.dtype) -> Row:
        side = sides[dtype]
        # Random, not zero: products of zeros run faster than those of data.
        left, right = (torch.randn(side, side, device=setup.device).to(dtype) for _ in range(2))
        return rate(compare({"product": lambda: left @ right}, setup, 1.5)["product"], 2 * side**3, "FLOP/s")

    recorder.case(copy, case="copy", size=f"{size / 2**20:.0f} MiB")
    for dtype, side in sides.items():
        name = str(dtype).removeprefix("torch.")
        recorder.case(lambda dtype=dtype: product(dtype), case=f"matmul {name}", size=f"{side} x {side} x {side}")  # type: ignore[misc]


def _device_name(setup: Setup) -> str:
    return torch.cuda.get_device_name(setup.device) if setup.cuda else _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def _output(*command: str) -> str:
    """First line that a program prints; why not, where it does not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
