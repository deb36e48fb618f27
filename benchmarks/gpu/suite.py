"""The sections of the GPU checks, run one after the other; the report is written again after each."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import markdown
from benchmarks.gpu.worker import GRACE_S, Worker

RESULTS = Path(__file__).resolve().parents[1] / "results"
TOTAL_S = 345.0  # of all sections: with starting and stopping under six minutes


@dataclass(frozen=True)
class Section:
    """``module:function`` with the arguments (setup, recorder, earlier results), and the seconds that it may take."""

    target: str
    seconds: float


SECTIONS: dict[str, Section] = {
    "environment": Section("benchmarks.gpu.machine:environment", 10),
    "ceilings": Section("benchmarks.gpu.machine:ceilings", 15),
    "parity": Section("benchmarks.gpu.parity:parity", 85),
    "invariance": Section("benchmarks.gpu.invariance:invariance", 25),
    "operators": Section("benchmarks.gpu.operators:operators", 65),
    "models": Section("benchmarks.gpu.models:models", 85),
    "compiled": Section("benchmarks.gpu.models:compiled", 90),
}


def run(out: Path, device: str = "auto", size: str | None = None) -> int:
    """Run all sections and write the report; returns the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    report: dict[str, Any] = {
        "command": f"python benchmarks/gpu/run.py --device {device}" + (f" --size {size}" if size else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sections": {},
    }
    worker = Worker(device, size)
    try:
        for name, section in SECTIONS.items():
            left = TOTAL_S - (time.monotonic() - begin)
            seconds = min(section.seconds, left)
            limit = min(section.seconds + GRACE_S, left)
            print(f"{name} ...", flush=True)
            result: dict[str, Any] = (
                worker.run(section.target, seconds, limit, report["sections"])
                if left > 0
                else {"rows": [], "seconds": 0.0, "error": f"not begun: {TOTAL_S:.0f} s were spent"}
            )
            report["sections"][name] = {"budget_s": section.seconds, **result}
            print(
                f"{name}: {len(result['rows'])} rows in {result['seconds']} s; {_last_line(result['error'])}",
                flush=True,
            )
            report["seconds"] = round(time.monotonic() - begin, 1)
            report["problems"] = problems(report["sections"])
            report["exit_code"] = int(bool(report["problems"]))
            _write(out, report)
    finally:
        worker.stop()
    print("\n".join([*report["problems"], f"{out / 'results.md'}, {report['seconds']} s"]))
    return int(report["exit_code"])


def problems(sections: dict[str, dict[str, Any]]) -> list[str]:
    """One line for every section that failed and every row that failed a check or raised."""
    found = []
    for name, section in sections.items():
        if section["error"]:
            found.append(f"{name}: {_last_line(section['error'])}")
        for row in section["rows"]:
            if row.get("verdict") in ("fail", "error"):
                what = ", ".join(
                    f"{key} {row[key]}" for key in ("op", "model", "case", "backend", "form") if key in row
                )
                found.append(f"{name}: {what}: {row['verdict']} {_last_line(row.get('traceback'))}".rstrip())
    return found


def _last_line(text: str | None) -> str:
    return text.strip().splitlines()[-1] if text else ""


def _write(out: Path, report: dict[str, Any]) -> None:
    (out / "results.json").write_text(json.dumps(_finite(report), indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(markdown(report), encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Parity, speed and bits of every operator and of whole models.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results.json and results.md")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--size", choices=("tiny", "full"), help="default: full on a GPU, tiny on a CPU")
    options = parser.parse_args()
    return run(options.out, options.device, options.size)
