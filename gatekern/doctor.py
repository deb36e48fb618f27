"""What this machine can run, as text."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from gatekern import __version__
from gatekern.engine.support import TESTED, support_matrix
from gatekern.ops import backends
from gatekern.ops.dispatch import FORMS, chosen

_PACKAGES = ("torch", "transformers", "triton", "flash_attn", "numpy", "gguf")


def report(*, models: bool = False) -> str:
    """Versions, devices and backends; with `models`, the path of every architecture."""
    lines = [f"gatekern {__version__}, Python {platform.python_version()}, {platform.platform()}", ""]
    lines += [f"  {name:<13} {_version(name)}" for name in _PACKAGES]
    lines += [
        "",
        "devices",
        f"  cpu           {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
    ]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if torch.cuda.is_available():
        lines += [f"  cuda:{at:<8} {torch.cuda.get_device_name(at)}" for at in range(torch.cuda.device_count())]
    else:
        lines.append("  cuda          none")
    lines += ["", "operator backends"]
    for backend in backends():
        state = backend.detail if backend.available else f"off: {backend.reason}"
        lines.append(f"  {backend.name:<13} {state}")
    lines += ["", "operators: what `auto` takes on each kind of device, and why not what is faster"]
    for op in FORMS:
        for device in devices:
            lines.append(f"  {op:<17} {device:<5} {chosen(op, device)}")
    if models:
        tested = {family for families in TESTED.values() for family in families}
        lines += ["", "architectures of this transformers (*: compared with separate forwards by the test suite)"]
        for name, support in support_matrix().items():
            mark = "*" if name in tested else " "
            lines.append(f"{mark} {name:<24} {support.path:<9} {support.reason}")
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
