"""Every check that needs a GPU, in one command: ``python benchmarks/gpu/run.py``, from the repository root.

Under six minutes on a data-centre GPU, under one on a CPU (tiny sizes: it then only shows that the script is alive).
Writes ``results.json`` and ``results.md``. The exit code is 1 where a section failed, a result was less exact than
plain PyTorch allows, or a promise about bits was broken.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run as a file, its own folder is there

from benchmarks.gpu.report import markdown  # noqa: E402
from benchmarks.gpu.worker import Section, Workers  # noqa: E402

TOTAL_S = 345.0  # of all sections: with starting and stopping under six minutes

# The most important first: what comes late is what a slow section costs. Parity only computes, so its cases, which
# mostly wait for the compiler, are shared among processes; everything that is timed has the machine to itself.
SECTIONS: dict[str, Section] = {
    "environment": Section("benchmarks.gpu.machine:environment", 15),
    "ceilings": Section("benchmarks.gpu.machine:ceilings", 15),
    "parity": Section("benchmarks.gpu.parity:parity", 70, processes=4),
    "operators": Section("benchmarks.gpu.operators:operators", 75),
    "models": Section("benchmarks.gpu.models:models", 80),
    "invariance": Section("benchmarks.gpu.invariance:invariance", 25),
    "compiled": Section("benchmarks.gpu.models:compiled", 75),
}


def run(out: Path, device: str = "auto", size: str | None = None) -> int:
    """Run all sections, write the report again after each, and return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    sections: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {
        "command": f"python benchmarks/gpu/run.py --device {device}" + (f" --size {size}" if size else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sections": sections,
    }
    workers = Workers(device, size)
    try:
        for name, section in SECTIONS.items():
            left = TOTAL_S - (time.monotonic() - begin)
            result: dict[str, Any] = {"rows": [], "seconds": 0.0, "error": f"not begun: {TOTAL_S:.0f} s were spent"}
            if left > 0:
                print(f"{name} ...", flush=True)
                result = workers.run(section, left, sections)
            sections[name] = {"budget_s": section.seconds, **result}
            print(f"{name}: {len(result['rows'])} rows in {result['seconds']} s; {_last_line(result['error'])}")
            report["seconds"] = round(time.monotonic() - begin, 1)
            report["problems"] = problems(sections)
            report["exit_code"] = int(bool(report["problems"]))
            (out / "results.json").write_text(json.dumps(_finite(report), indent=1) + "\n", encoding="utf-8")
            (out / "results.md").write_text(markdown(report), encoding="utf-8")
    finally:
        workers.stop()
    print("\n".join([*report["problems"], f"{out / 'results.md'}, {report['seconds']} s"]), flush=True)
    return int(report["exit_code"])


def problems(sections: dict[str, dict[str, Any]]) -> list[str]:
    """One line for every section that failed and every row that failed a check or raised."""
    found = []
    for name, section in sections.items():
        if section["error"]:
            found.append(f"{name}: {_last_line(section['error'])}")
        for row in section["rows"]:
            if row.get("verdict") in ("fail", "error"):
                keys = ("op", "model", "case", "dtype", "backend", "form")
                what = ", ".join(f"{key} {row[key]}" for key in keys if row.get(key) is not None)
                found.append(f"{name}: {what}: {row['verdict']} {_last_line(row.get('traceback'))}".rstrip())
    return found


def _last_line(text: str | None) -> str:
    return text.strip().splitlines()[-1] if text else ""


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
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="folder of the report"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--size", choices=("tiny", "full"), help="default: full on a GPU, tiny on a CPU")
    options = parser.parse_args()
    return run(options.out, options.device, options.size)


if __name__ == "__main__":
    sys.exit(main())
