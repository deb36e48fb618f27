"""Options and the table of a benchmark run."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SHARED = Path(__file__).parents[2] / "shared" / "data" / "workloads"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workloads", type=Path, default=SHARED if SHARED.exists() else None, help="folder with NAME.jsonl workloads"
    )
    parser.addoption("--model", default=None, help="model to measure (default: SmolLM2-135M-Instruct)")
    parser.addoption("--facts", type=int, default=None, help="use the first so many facts only (a smoke test)")
    parser.addoption("--rounds", type=int, default=3, help="alternating rounds")


def machine() -> str:
    """One line that says what a figure was measured on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return (
        f"{cpu}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; "
        f"torch {torch.__version__}, "
        f"transformers {transformers.__version__}; commit {commit.stdout.strip() or 'unknown'}"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the figures that the benchmarks put into `extra_info`, as a Markdown table."""
    session = getattr(config, "_benchmarksession", None)
    rows = [bench.extra_info for bench in getattr(session, "benchmarks", []) if bench.extra_info]
    if not rows:
        return
    terminalreporter.section("figures")
    terminalreporter.line(machine())
    columns = list(dict.fromkeys(column for row in rows for column in row))
    terminalreporter.line("| " + " | ".join(columns) + " |")
    terminalreporter.line("|" + "---|" * len(columns))
    for row in rows:
        terminalreporter.line("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")
