"""The GPU checks on a CPU with tiny sizes: every section runs, and what goes wrong is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import suite
from benchmarks.gpu.suite import SECTIONS, Section, problems

ROOT = Path(__file__).parents[1]
OPERATORS = {
    "label_scores",
    "vocab_lse",
    "score_rows",
    "class_lse",
    "parse_scores",
    "merge_attention",
    "prefix_attention",
}


def test_a_whole_run(tmp_path):
    """As a user starts it. One test, because the run is what takes the time."""
    command = [sys.executable, "benchmarks/gpu/run.py", "--device", "cpu", "--size", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    assert {"command", "date", "seconds", "sections", "problems", "exit_code"} <= report.keys()
    assert list(report["sections"]) == list(SECTIONS)
    assert all(section["error"] is None and section["rows"] for section in report["sections"].values())
    assert report["problems"] == []
    parity_has_a_verdict_for_every_form(report["sections"]["parity"]["rows"])
    only_what_passed_is_timed(report["sections"]["operators"]["rows"])
    models_are_compared_with_naive_batches(report["sections"]["models"]["rows"])
    promised_bits_are_equal(report["sections"]["invariance"]["rows"])
    text = (tmp_path / "results.md").read_text()
    assert all(f"## {name.capitalize()}" in text for name in SECTIONS)
    assert "No section failed, and no check." in text
    assert "How to read this" in text


def parity_has_a_verdict_for_every_form(rows: list[dict[str, Any]]) -> None:
    assert all(row["verdict"] == "pass" or row["verdict"].startswith("skipped: ") for row in rows)
    ran = {row["op"] for row in rows if row["backend"] == "torch" and row["verdict"] == "pass"}
    assert ran == OPERATORS
    skipped = {row["verdict"] for row in rows if row["backend"] == "triton"}
    assert skipped == {"skipped: Triton kernels run on CUDA devices only"}


def only_what_passed_is_timed(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        timed = "median_us" in row
        assert timed != row.get("verdict", "").startswith("skipped: ")
        assert not timed or (row["p10_us"] <= row["median_us"] <= row["p90_us"] and row["percent_of_floor"] > 0)


def models_are_compared_with_naive_batches(rows: list[dict[str, Any]]) -> None:
    packed, naive = (next(row for row in rows if row["form"] == form) for form in ("packed", "naive"))
    assert packed["path"] == "packed"
    assert naive["difference"] <= 0.1
    assert packed["ratio"] == pytest.approx(packed["facts_per_s"] / naive["facts_per_s"])
    assert packed["extrapolated"] == pytest.approx(packed["facts_per_s"] / 2)  # 2 of 4 layers


def promised_bits_are_equal(rows: list[dict[str, Any]]) -> None:
    promised = [row for row in rows if row.get("promised")]
    assert promised
    assert all(row["equal"] for row in promised)


def works(setup: Any, recorder: Any, earlier: Any) -> None:
    recorder.add(case="before", value=1)


def hangs(setup: Any, recorder: Any, earlier: Any) -> None:
    recorder.add(case="before", value=1)
    time.sleep(600)


def dies(setup: Any, recorder: Any, earlier: Any) -> None:
    os._exit(3)


def raises(setup: Any, recorder: Any, earlier: Any) -> None:
    recorder.add(case="behind", value=sorted(earlier), size=float("nan"))
    raise ValueError("a section that raises")


def test_a_section_that_fails_is_reported_and_costs_no_other(monkeypatch, tmp_path):
    seconds = {"works": 60, "hangs": 1, "dies": 60, "raises": 60}
    targets = {name: Section(f"tests.test_gpu_script:{name}", budget) for name, budget in seconds.items()}
    monkeypatch.setattr(suite, "SECTIONS", targets)
    monkeypatch.setattr(suite, "GRACE_S", 1)
    assert suite.run(tmp_path, "cpu", "tiny") == 1
    sections = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert sections["works"]["error"] is None
    assert sections["hangs"]["error"] == "stopped after 2 s"
    assert sections["hangs"]["rows"] == [{"case": "before", "value": 1}]
    assert sections["dies"]["error"] == "the process died with exit code 3"
    assert "ValueError: a section that raises" in sections["raises"]["error"]
    assert sections["raises"]["rows"] == [{"case": "behind", "value": ["dies", "hangs", "works"], "size": "nan"}]
    text = (tmp_path / "results.md").read_text()
    assert "* raises: ValueError: a section that raises" in text
    assert "Traceback" in text


def test_a_failed_check_is_a_problem():
    row = {"op": "vocab_lse", "case": "3 x 4", "backend": "triton", "verdict": "fail"}
    section = {"error": None, "rows": [row, {"case": "fine", "verdict": "pass"}, {"case": "not here", "verdict": None}]}
    assert problems({"parity": section}) == ["parity: op vocab_lse, case 3 x 4, backend triton: fail"]
