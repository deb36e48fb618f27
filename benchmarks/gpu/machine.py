"""The machine: what it is, and how fast it copies and multiplies."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import gatekern
from benchmarks.gpu.recorder import Recorder, Results, Row, Setup, name_of
from benchmarks.gpu.timing import compare
from gatekern.ops import backends

_HERE = Path(__file__).parent
_SMI = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached: bytes/s read and written by a copy, FLOP/s of a bf16 product; None: not measured."""

    copy: float | None
    matmul: float | None

    @classmethod
    def of(cls, earlier: Results) -> Ceilings:
        """From the rows of section ``ceilings``."""
        rows = {row["case"]: row.get("per_s") for row in earlier.get("ceilings", {}).get("rows", [])}
        return cls(rows.get("copy"), rows.get("matmul bfloat16"))

    def floor_s(self, num_bytes: float, flops: float) -> float | None:
        """``max(bytes / copy bandwidth, FLOP / matmul rate)``."""
        return max(num_bytes / self.copy, flops / self.matmul) if self.copy and self.matmul else None


def environment(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """Device, driver, clocks, versions, commit, and which backends can run."""
    cpu = _cpu_name()
    found: dict[str, object] = {"device": cpu, "device type": setup.device.type}
    if setup.cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory, GiB": round(properties.total_memory / 2**30, 1),
            "CUDA of torch": torch.version.cuda,
            _SMI.replace(",", ", "): _output("nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"),
        }
    found |= {
        "CPU": f"{cpu}, {torch.get_num_threads()} threads",
        "sizes": "tiny" if setup.tiny else "full",
        "python": platform.python_version(),
        "gatekern": gatekern.__version__,
        "torch": torch.__version__,
        **{package: _version(package) for package in ("triton", "transformers", "numpy")},
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        **{f"backend {one.name}": one.detail if one.available else one.reason for one in backends()},
    }
    for what, value in found.items():
        recorder.add(what=what, value=value if isinstance(value, (int, float)) else str(value))


def ceilings(setup: Setup, recorder: Recorder, earlier: Results) -> None:
    """A copy of a large tensor (bytes read plus bytes written), and ``2 n^3`` FLOP of square products; TF32 off."""

    def rate(form: Callable[[], object], amount: float, unit: str) -> Iterator[Row]:
        form()  # what the first call sets up is no matter here
        row = compare({"": form}, setup, 1.0)[""]
        yield row | ({"per_s": amount / row["median_us"] * 1e6, "unit": unit} if "median_us" in row else {})

    def copy(size: int) -> Iterator[Row]:
        source = torch.randn(size // 2, device=setup.device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        return rate(lambda: target.copy_(source), 2 * size, "B/s")

    def product(dtype: torch.dtype, side: int) -> Iterator[Row]:
        # Random, not zero: products of zeros run faster than those of data.
        left, right = (torch.randn(side, side, device=setup.device).to(dtype) for _ in range(2))
        return rate(lambda: left @ right, 2 * side**3, "FLOP/s")

    size = 1 << 20 if setup.tiny else 2 << 30
    recorder.case(partial(copy, size), case="copy", size=f"{size / 2**20:.0f} MiB")
    for dtype, full in ((torch.bfloat16, 8192), (torch.float32, 4096)):
        side = 256 if setup.tiny else full
        recorder.case(partial(product, dtype, side), case=f"matmul {name_of(dtype)}", size=f"{side} x {side} x {side}")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def _output(*command: str) -> str:
    """What a program prints, in one line; why not, where it does not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.strip().replace("\n", "; ")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
