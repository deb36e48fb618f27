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

from benchmarks.gpu import run, tune, worker
from benchmarks.gpu.parity import why_not_timed
from benchmarks.gpu.worker import Section
from gatekern.ops.triton import configs

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
    assert list(report["sections"]) == list(run.SECTIONS)
    assert all(section["error"] is None and section["rows"] for section in report["sections"].values())
    assert report["problems"] == []
    parity_has_a_verdict_for_every_form(report["sections"]["parity"]["rows"])
    only_what_passed_is_timed(report["sections"]["operators"]["rows"])
    models_are_compared_with_naive_batches(report["sections"]["models"]["rows"])
    promised_bits_are_equal(report["sections"]["invariance"]["rows"])
    text = (tmp_path / "results.md").read_text()
    assert all(f"## {name.capitalize()}" in text for name in run.SECTIONS)
    assert "No section failed, and no check." in text
    assert "How to read this" in text


def parity_has_a_verdict_for_every_form(rows: list[dict[str, Any]]) -> None:
    assert all(row["verdict"] == "pass" or row["verdict"].startswith("skipped: ") for row in rows)
    ran = {row["op"] for row in rows if row["backend"] == "torch" and row["verdict"] == "pass"}
    assert ran == OPERATORS
    skipped = {row["verdict"].split(": ")[-1] for row in rows if row["backend"] == "triton"}
    assert skipped == {"Triton kernels run on CUDA devices only"}


def only_what_passed_is_timed(rows: list[dict[str, Any]]) -> None:
    assert {row["op"] for row in rows if "median_us" in row} == OPERATORS - {"class_lse"}
    for row in rows:
        timed = "median_us" in row
        assert timed != row.get("verdict", "").startswith("skipped: ")
        assert not timed or (row["p10_us"] <= row["median_us"] <= row["p90_us"] and row["percent_of_floor"] > 0)


def models_are_compared_with_naive_batches(rows: list[dict[str, Any]]) -> None:
    forms = {row["form"]: row for row in rows}
    for name in ("packed", "packed, pruned"):
        assert forms[name]["path"] == "packed"
        assert forms[name]["ratio"] == pytest.approx(forms[name]["facts_per_s"] / forms["naive"]["facts_per_s"])
    assert forms["naive"]["difference"] <= 0.1


def promised_bits_are_equal(rows: list[dict[str, Any]]) -> None:
    promised = [row for row in rows if row.get("promised")]
    assert promised
    assert all(row["equal"] for row in promised)


def works(setup: Any, recorder: Any, earlier: Any) -> None:
    recorder.add(what="device type", value="cuda")  # so that later sections are shared among processes


def hangs(setup: Any, recorder: Any, earlier: Any) -> None:
    recorder.case(lambda: [{"value": 1}], case="before")
    recorder.case(lambda: time.sleep(600), case="asleep")
    recorder.case(lambda: [{"value": 2}], case="behind")


def dies(setup: Any, recorder: Any, earlier: Any) -> None:
    for at in range(5):
        recorder.case(lambda at=at: os._exit(3) if at == 2 else [{"process": os.getpid()}], case=at)


def raises(setup: Any, recorder: Any, earlier: Any) -> None:
    recorder.add(case="behind", value=sorted(earlier), size=float("nan"))
    raise ValueError("a section that raises")


def test_a_failure_is_reported_and_costs_nothing_else(monkeypatch, tmp_path):
    names = {"environment": "works", "hangs": "hangs", "dies": "dies", "raises": "raises"}
    sections = {name: Section(f"tests.test_gpu_script:{function}", 60) for name, function in names.items()}
    sections["dies"] = Section(sections["dies"].target, 60, processes=2)
    monkeypatch.setattr(run, "SECTIONS", sections)
    monkeypatch.setattr(worker, "CASE_S", 8)  # a process has to start in it
    assert run.run(tmp_path, "cpu", "tiny") == 1
    found = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert found["environment"]["error"] is None

    assert found["hangs"]["error"] == "no word for 8 s"
    lost = {"case": "asleep", "verdict": "error", "traceback": "no word for 8 s"}
    assert found["hangs"]["rows"] == [{"case": "before", "value": 1}, lost, {"case": "behind", "value": 2}]

    assert found["dies"]["error"] == "the process died with exit code 3"
    process = {row["case"]: row.get("process") for row in found["dies"]["rows"]}
    assert sorted(process) == [0, 1, 2, 3, 4]
    assert process[1] == process[3]
    assert process[2] is None
    assert len({process[0], process[1], process[4]}) == 3  # two shares, and a new process after the one that died

    assert "ValueError: a section that raises" in found["raises"]["error"]
    expected = [{"case": "behind", "value": ["dies", "environment", "hangs"], "size": "nan"}]
    assert found["raises"]["rows"] == expected
    text = (tmp_path / "results.md").read_text()
    assert "* raises: ValueError: a section that raises" in text
    assert "Traceback" in text


def test_a_section_is_stopped_when_its_time_is_up(monkeypatch):
    monkeypatch.setattr(worker, "GRACE_S", 0)
    workers = worker.Workers("cpu", "tiny")
    try:
        found = workers.run(Section("tests.test_gpu_script:hangs", 1), 60, {})
    finally:
        workers.stop()
    assert found["error"] == "stopped: its time and some grace were spent"


def test_a_failed_check_is_a_problem():
    row = {"op": "vocab_lse", "case": "3 x 4", "backend": "triton", "verdict": "fail"}
    section = {"error": None, "rows": [row, {"case": "fine", "verdict": "pass"}, {"case": "not here", "verdict": None}]}
    assert run.problems({"parity": section}) == ["parity: op vocab_lse, case 3 x 4, backend triton: fail"]


def test_what_failed_parity_in_any_case_or_was_not_reached_is_not_timed():
    rows = [
        {"op": "vocab_lse", "backend": "triton", "verdict": "pass"},
        {"op": "vocab_lse", "backend": "torch", "verdict": "pass"},
        {"op": "vocab_lse", "backend": "torch", "verdict": "fail"},
        {"op": "label_scores", "verdict": "error"},  # the case hung, in one form or other
    ]
    earlier = {"parity": {"rows": rows}}
    assert why_not_timed(earlier, "vocab_lse", "triton") is None
    assert why_not_timed(earlier, "vocab_lse", "torch") == "skipped: failed parity"
    assert why_not_timed(earlier, "label_scores", "torch") == "skipped: failed parity"
    assert why_not_timed(earlier, "parse_scores", "torch") == "skipped: parity was not reached"


def test_tuned_rows_replace_those_of_the_table():
    before = tune.CONFIGS.read_text()
    config = configs.AttentionConfig(block_rows=32, block_slots=128, num_warps=2, num_stages=5)
    key = (2, 128, True)
    after = tune.with_rows(before, {key: config})
    changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed == [(tune.row_text(key, configs._PREFIX_ATTENTION[key]), tune.row_text(key, config))]
    space: dict[str, Any] = {"__name__": configs.__name__}
    exec(compile(after, "configs", "exec"), space)
    assert vars(space["_PREFIX_ATTENTION"][key]) == vars(config)
    with pytest.raises(ValueError, match="have 0 rows"):
        tune.with_rows(before, {(8, 128, True): config})


def test_tuning_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune.py", "--write"])
    assert tune.main() == 1
    assert "needs a GPU" in capsys.readouterr().err
