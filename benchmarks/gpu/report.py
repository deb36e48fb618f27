"""The report as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Columns of each section's table: heading, key of the row.
_COLUMNS: dict[str, dict[str, str]] = {
    "environment": {"what": "what", "value": "value"},
    "ceilings": {"what": "case", "size": "size", "per second": "per_s", "unit": "unit", "median us": "median_us",
                 "p10": "p10_us", "p90": "p90_us", "verdict": "verdict"},
    "parity": {"operator": "op", "case": "case", "dtype": "dtype", "form": "backend", "error": "error",
               "plain PyTorch": "plain_error", "allowed": "allowed", "verdict": "verdict"},
    "invariance": {"form": "form", "dtype": "dtype", "case": "case", "bits equal": "equal",
                   "max difference": "difference", "promised": "promised", "verdict": "verdict", "detail": "detail"},
    "operators": {"operator": "op", "case": "case", "form": "form", "median us": "median_us", "p10": "p10_us",
                  "p90": "p90_us", "host us": "host_us", "floor us": "floor_us", "% of floor": "percent_of_floor",
                  "MB": "MB", "GFLOP": "GFLOP", "rounds": "rounds", "first call s": "first_s",
                  "difference": "difference", "verdict": "verdict"},
    "models": {"model": "model", "layers": "layers", "workload": "workload", "form": "form", "facts/s": "facts_per_s",
               "ratio to naive": "ratio", "% of floor": "percent_of_floor", "ms": "ms", "floor ms": "floor_ms",
               "host plan ms": "plan_ms", "tokens": "tokens", "forwards": "forwards", "peak GiB": "peak_gib",
               "wrap s": "wrap_s", "first call s": "first_s", "rounds": "rounds", "path": "path",
               "attention": "attention", "difference": "difference", "verdict": "verdict"},
}  # fmt: skip
_COLUMNS["compiled"] = _COLUMNS["models"]

_GUIDE = """\
How to read this:

* **Floor** is arithmetic on two measurements of this run: the larger of bytes over the copy bandwidth and FLOP over the
  bf16 matmul rate of section *ceilings*. Bytes and FLOP are the least that the task needs, for every form alike, so "%
  of floor" of a form that computes more shows that too. In *models* it is 2 x weights outside embedding and head (those
  used by a token) x tokens, plus attention; of the last layer, where all layers were run, what the facts' last tokens
  need. A percentage is missing where a ceiling is.
* **Median, p10, p90** of operators on CUDA: device time between events around the call, after the L2 cache was
  overwritten, with all launches made ahead unless the form itself waits for the device; forms in turn and in the
  opposite order every other round. **Host** is the time until a call to an idle device returns to Python: a caller with
  nothing else to launch waits for the longer of the two. In *models* all times are wall times from call to scores.
* **Parity**: largest absolute error against float64 on the same operands. A form passes where its error is at most that
  of plain PyTorch in the same dtype plus an allowance (float32 1e-6, bf16 1e-2, fp16 1e-3 times the size of the values;
  1e-6 times the largest logit for operators on the head). Only forms that passed, in this dtype and head dimension, are
  timed, and only if they agree with PyTorch's at the timed size (**difference**: the largest, by the largest value).
* **Layers** are those that were built and run; facts/s are of that many. In Llama 4 transformers runs every token
  through all experts; the floor counts the one that it is routed to. Weights are random: speed is that of the shape,
  scores mean nothing.
* **Naive** is one prompt a fact in right-padded causal batches through the same model with PyTorch's attention and the
  last position's logits. A prefix-cached engine shares as gatekern does, and is not measured here.
* **Attention** is what was asked for; a layer whose heads it cannot take runs on another form. **Wrap** is the proof of
  the path against separate forwards at load; it holds most of what compiling takes.
* **Bits**: rows of hidden states of one prompt alone and in company, `torch.equal`. Only what is promised can fail.
* On a CPU, sizes are tiny and one round is timed: it shows that the script works and nothing else.
"""


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report; sections that failed show their traceback."""
    sections: Mapping[str, Mapping[str, Any]] = report["sections"]
    about = {row["what"]: row["value"] for row in sections.get("environment", {}).get("rows", [])}
    lines = [
        "# GPU checks",
        "",
        f"`{report['command']}`, {report['date']}, {about.get('device', 'device unknown')}, "
        f"sizes {about.get('sizes', 'unknown')}, {report['seconds']} s.",
        "",
        _GUIDE,
        "## Result",
        "",
        *([f"* {problem}" for problem in report["problems"]] or ["No section failed, and no check."]),
    ]
    for name, section in sections.items():
        lines += ["", f"## {name.capitalize()}", "", f"{section['seconds']} s of {section['budget_s']} s."]
        if section["error"]:
            lines += ["", "```", section["error"].strip(), "```"]
        lines += ["", *_table(section["rows"], _COLUMNS.get(name))] if section["rows"] else []
        for row in section["rows"]:
            if "traceback" in row:
                what = ", ".join(str(row[key]) for key in ("op", "model", "case", "backend", "form") if key in row)
                lines += ["", f"{what}:", "", "```", row["traceback"].strip(), "```"]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None) -> Iterable[str]:
    """Rows as a Markdown table, of the columns that any of them fills."""
    known = columns or {key: key for row in rows for key in row}
    used = {heading: key for heading, key in known.items() if any(row.get(key) is not None for row in rows)}
    yield "| " + " | ".join(used) + " |"
    yield "|" + "---|" * len(used)
    for row in rows:
        yield "| " + " | ".join(_cell(row.get(key)) for key in used.values()) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
