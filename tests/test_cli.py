"""The command line end to end, in this process and as a program."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gatekern as gk
from gatekern.cli import INCOMPLETE, app
from gatekern.ops import dispatch
from tests.numbers import number_verifier

ROWS = [
    {"id": 7, "context": "Alice lives in Paris.", "fact": "Alice lives in Rome."},
    {"context": "The library was founded in 1923.", "fact": "é \U0001f600", "tags": ["a", {"b": None}]},
    {"id": "x", "context": "Alice lives in Paris.", "fact": "Alice lives in Paris."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_verifier) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_verifier.model.save_pretrained(folder)
    tiny_verifier.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def number_model(tmp_path_factory) -> str:
    """A model that often answers with a number; its head has a bias, as that of Phi does."""
    folder = tmp_path_factory.mktemp("number_model")
    verifier = number_verifier("phi")
    verifier.model.save_pretrained(folder)
    verifier.tokenizer.save_pretrained(folder)
    return str(folder)


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.mark.parametrize("chunk", ["1", "2", "1000"])
def test_score_carries_unknown_keys_and_keeps_the_order(model, tmp_path, chunk, tiny_verifier):
    source, target = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    source.write_text(lines(*ROWS, "", ROWS[0]), encoding="utf-8")
    result = run("score", "--model", model, "--input", str(source), "--output", str(target), "--chunk", chunk)
    assert result.exit_code == 0, result.output
    out = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [{key: row[key] for key in given} for given, row in zip([*ROWS, ROWS[0]], out, strict=True)] == [
        *ROWS,
        ROWS[0],
    ]
    expected = tiny_verifier.score_batch([(row["context"], row["fact"]) for row in ROWS])
    assert [row["score"] for row in out[:3]] == pytest.approx(expected.scores.tolist(), abs=1e-5)
    assert [row["logit_yes"] for row in out[:3]] == pytest.approx(expected.yes_logit.tolist(), abs=1e-4)
    assert "4 of 4 facts scored" in result.stderr


def test_score_from_stdin_to_stdout(model):
    result = run("score", "--model", model, "--quiet", stdin=lines(*ROWS))
    assert result.exit_code == 0
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == 3
    assert result.stderr == ""


def test_bad_lines_are_reported_and_cost_no_good_one(model):
    bad = ["{not json", "[1, 2]", {"context": "c"}, {"id": 3, "context": "c", "fact": 5}, {"context": "c", "fact": " "}]
    escaped = '{"context": "lone \\ud83d", "fact": "surrogate"}'
    result = run("score", "--model", model, "--quiet", stdin=lines(ROWS[0], *bad, escaped, ROWS[1]))
    assert result.exit_code == INCOMPLETE
    out = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["status"] in ("ok", "low_label_mass") for row in out] == [True] + [False] * 5 + [True] * 2
    assert [row["status"] for row in out[1:6]] == ["invalid_input"] * 5
    assert all(row["score"] is None and row["note"] for row in out[1:6])
    assert "line 2 is not JSON" in out[1]["note"]
    assert "line 4 has no fact" in out[3]["note"]
    assert out[4]["id"] == 3
    assert "surrogates in context repaired" in out[6]["note"]
    assert out[6]["context"] == "lone \ud83d", "carried through as it came"


@pytest.mark.parametrize(
    "line",
    ['{"id": ' + "1" * 5000 + "}", "[" * 100_000, '{"w": 1e999}', '{"w": NaN}'],
    ids=["digits", "deep", "inf", "nan"],
)
def test_json_that_cannot_be_read_or_written_back_is_one_bad_row(model, line):
    result = run("score", "--model", model, "--quiet", stdin=lines(ROWS[0], line, ROWS[1]))
    assert result.exit_code == INCOMPLETE
    out = [json.loads(text) for text in result.stdout.splitlines()]
    assert [row["score"] is None for row in out] == [False, True, False]
    assert set(out[1]) >= {"score", "status", "note", "label_mass", "logit_yes", "logit_no"}


def test_a_byte_order_mark_is_not_part_of_the_first_row(model):
    result = run("score", "--model", model, "--quiet", stdin="\ufeff" + lines(ROWS[0]))
    assert result.exit_code == 0, result.output


def test_version():
    assert run("--version").stdout.strip() == gk.__version__


def test_bytes_that_are_not_utf8_do_not_stop_a_file(model, tmp_path):
    source, target = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    source.write_bytes(b'{"context": "caf\xe9", "fact": "a fact"}\n' + lines(ROWS[0]).encode())
    assert run("score", "--model", model, "--input", str(source), "--output", str(target)).exit_code == 0
    first, second = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert "surrogates in context repaired" in first["note"]
    assert second["note"] is None


def test_expected_errors_are_one_line(tmp_path):
    command = [sys.executable, "-m", "gatekern.cli", "score"]
    for arguments, code, words in (
        (["--model", str(tmp_path / "none.gguf"), "--input", "-"], 1, "no such file"),
        (["--model", str(tmp_path), "--input", "-"], 1, "cannot load"),
        (["--model", "x", "--input", str(tmp_path / "absent.jsonl")], 1, "absent.jsonl"),
        (["--input", "-"], 2, "--model"),
        (["--model", "x", "--input", "same", "--output", "same"], 2, "overwrite"),
    ):
        done = subprocess.run(command + arguments, capture_output=True, text=True, input="", check=False)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_templates_and_layouts_from_the_command_line(model, tmp_path):
    template = tmp_path / "mine.toml"
    template.write_text('user = "{context} / {fact}: yes or no?"')
    scores = [
        json.loads(run("score", "--model", model, "--quiet", *extra, stdin=lines(ROWS[0])).stdout)["score"]
        for extra in ([], ["--layout", "fact_last"], ["--prompt", str(template)])
    ]
    assert len(set(scores)) == 3


@pytest.mark.parametrize(
    ("mode", "options", "fields"),
    [
        ("exact", ["--law", "masked", "--temperature", "0.7"], {"label_mass", "std"}),
        ("exact", ["--distribution"], {"label_mass", "std", "distribution"}),
        ("sample", ["--k", "3", "--seed", "2", "--reply", "text", "--max-new-tokens", "4"], {"samples", "replies"}),
        ("sample", ["--k", "3", "--threshold", "0.7", "--early-stop"], {"samples", "replies"}),
        (
            "adaptive",
            ["--threshold", "0.7", "--band", "0.2", "--mass", "0"],
            {"label_mass", "std", "logit_yes", "logit_no"},
        ),
    ],
)
def test_modes_and_their_fields(number_model, mode, options, fields):
    rows = [*ROWS, {"context": "c", "fact": ""}]
    result = run("score", "--model", number_model, "--quiet", "--mode", mode, *options, stdin=lines(*rows))
    assert result.exit_code == INCOMPLETE, result.output
    out = [json.loads(line) for line in result.stdout.splitlines()]
    always = {"context", "fact", "score", "status", "note", "decided_by"}
    for given, row in zip(rows, out, strict=True):
        assert set(row) == always | set(given) | fields
    assert out[-1]["score"] is out[-1]["decided_by"] is None
    modes = {row["decided_by"] for row in out[:-1]}
    assert modes <= ({"logprob", "exact"} if mode == "adaptive" else {mode})


def test_command_line_and_python_agree(number_model):
    verifier = gk.Verifier.from_pretrained(number_model)
    pairs = [(row["context"], row["fact"]) for row in ROWS]
    for mode, arguments, options in (
        ("exact", ["--temperature", "0.5"], {"temperature": 0.5}),
        ("sample", ["--k", "7", "--top-p", "0.9", "--min-valid", "2"], {"k": 7, "top_p": 0.9, "min_valid": 2}),
        ("adaptive", ["--threshold", "0.4"], {"threshold": 0.4}),
    ):
        result = run("score", "--model", number_model, "--quiet", "--mode", mode, *arguments, stdin=lines(*ROWS))
        scores = [json.loads(line)["score"] for line in result.stdout.splitlines()]
        expected = [None if score != score else score for score in verifier.score_batch(pairs, mode, **options).scores]
        assert scores == pytest.approx(expected, abs=1e-5)


def test_an_option_of_another_mode_is_a_usage_error(tmp_path):
    for arguments, words in (
        (["--mode", "exact", "--k", "3"], "'k' is not an option of mode='exact'"),
        (["--k", "3"], "which takes: none"),
        (["--mode", "adaptive"], "needs threshold"),
        (["--mode", "sample", "--temperature", "-1"], "temperature must be a number from 0.01 on"),
        (["--mode", "guess"], "guess"),
        (["--mode", "sample", "--distribution"], "--distribution is not an option of --mode sample"),
        (["--mode", "exact", "--prompt", "x.toml"], "--prompt is not an option of --mode exact"),
        (["--rating-prompt", "x.toml"], "--rating-prompt is not an option of --mode logprob"),
    ):
        result = run("score", "--model", str(tmp_path), *arguments, stdin="")
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.replace("│", " ").split())


def test_a_rating_template_of_your_own(number_model, tmp_path):
    template = tmp_path / "rate.toml"
    template.write_text('user = "{context} / {fact}: from 0.0 to 1.0?"')
    arguments = ["score", "--model", number_model, "--quiet", "--mode", "exact"]
    scores = [
        json.loads(run(*arguments, *extra, stdin=lines(ROWS[0])).stdout)["score"]
        for extra in ([], ["--rating-prompt", str(template)])
    ]
    assert scores[0] != scores[1]


def test_the_ways_of_running_a_forward(model, tiny_verifier):
    pairs = [(row["context"], row["fact"]) for row in ROWS]
    expected = tiny_verifier.score_batch(pairs).scores.tolist()
    for flags in (["--deterministic", "--prune-last-layer"], ["--attention", "torch"], ["--compile"]):
        result = run("score", "--model", model, "--min-label-mass", "0", *flags, stdin=lines(*ROWS))
        assert result.exit_code == 0, result.output
        scores = [json.loads(line)["score"] for line in result.stdout.splitlines()]
        assert scores == pytest.approx(expected, abs=1e-5)
        assert ("deterministic: verified: the same bits" in result.stderr) == ("--deterministic" in flags)
    result = run("score", "--model", model, "--attention", "flash", stdin=lines(*ROWS))
    assert result.exit_code == 1
    assert "prefix_attention: backend 'flash' cannot run on cpu" in str(result.exception)


def test_doctor_explains_every_backend():
    result = run("doctor", "--models")
    assert result.exit_code == 0
    for word in (gk.__version__, "torch", "native", "triton", "flash", "off:", "llama4_text", "branched"):
        assert word in result.stdout
    for op in dispatch.FORMS:
        assert re.search(rf"^  {op} +cpu +(native|torch) \(of .*torch\)", result.stdout, re.MULTILINE)


def test_help_teaches():
    text = run("score", "--help").stdout
    for word in ("context", "fact", "Exit code", "fact_last", "adaptive", "--rating-prompt"):
        assert word in text
