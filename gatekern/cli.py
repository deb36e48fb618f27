"""Command line. Heavy imports happen inside the commands, so that ``--help`` answers at once."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from gatekern import __version__
from gatekern.errors import GatekernError, InputError

if TYPE_CHECKING:
    from gatekern.results import ScoreBatch

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Score how strongly a source text supports facts, before an agent stores them.",
)

INCOMPLETE = 3  # exit code: the run finished, but some rows have no score


class Layout(StrEnum):
    paper = "paper"
    fact_last = "fact_last"


class Mode(StrEnum):
    logprob = "logprob"
    exact = "exact"
    sample = "sample"
    adaptive = "adaptive"


class Reply(StrEnum):
    number = "number"
    text = "text"


class Law(StrEnum):
    unconstrained = "unconstrained"
    masked = "masked"


_OF_MODES: Any = {"rich_help_panel": "Options of the modes", "show_default": False}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def score(
    model: Annotated[str, typer.Option(help="Hub id, local folder, or .gguf file of a causal language model.")],
    input: Annotated[str, typer.Option(help="JSONL, one object a line with `context` and `fact`; - for stdin.")] = "-",
    output: Annotated[str, typer.Option(help="JSONL, one object a line, in input order; - for stdout.")] = "-",
    mode: Annotated[
        Mode,
        typer.Option(
            help="logprob: probability of yes against no. exact: expectation of the model's score from 0.0 to 1.0. "
            "sample: mean of K replies. adaptive: logprob, then exact for undecided facts."
        ),
    ] = Mode.logprob,
    layout: Annotated[
        Layout,
        typer.Option(help="paper: the question follows the fact. fact_last: it precedes the context; faster."),
    ] = Layout.paper,
    prompt: Annotated[
        Path | None, typer.Option(help="TOML file with your own template of the yes/no question.")
    ] = None,
    rating_prompt: Annotated[
        Path | None, typer.Option(help="TOML file with your own template of the question for a score.")
    ] = None,
    k: Annotated[int | None, typer.Option(help="sample: replies to every fact (default 5).", **_OF_MODES)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="sample, exact, adaptive: of the replies (default 1).", **_OF_MODES)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="sample: nucleus to draw from (default 1).", **_OF_MODES)] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="sample: longest reply, tokens (default 8, as text 64).", **_OF_MODES)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="sample: of the random numbers (default 0).", **_OF_MODES)] = None,
    min_valid: Annotated[
        int | None, typer.Option(help="sample: replies that must give a score (default 1).", **_OF_MODES)
    ] = None,
    reply: Annotated[
        Reply | None,
        typer.Option(
            help="sample: read a reply's opening number (default), or let it run and read the text.", **_OF_MODES
        ),
    ] = None,
    early_stop: Annotated[
        bool | None,
        typer.Option("--early-stop", help="sample: stop once no reply can change the decision.", **_OF_MODES),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="adaptive, early stop: score from which on a fact is accepted.", **_OF_MODES)
    ] = None,
    band: Annotated[
        float | None, typer.Option(help="adaptive: distance from the threshold that decides (0.15).", **_OF_MODES)
    ] = None,
    mass: Annotated[float | None, typer.Option(help="adaptive: label mass that decides (0.85).", **_OF_MODES)] = None,
    law: Annotated[
        Law | None, typer.Option(help="exact, adaptive: the model as it is (default), or masked.", **_OF_MODES)
    ] = None,
    distribution: Annotated[
        bool, typer.Option("--distribution", help="exact, adaptive: write all 101 probabilities.", **_OF_MODES)
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file inside --model.")] = None,
    min_label_mass: Annotated[
        float, typer.Option(help="Below this probability of an answer as asked, the status is low_label_mass.")
    ] = 0.05,
    backend: Annotated[
        str, typer.Option(help="What reads labels: auto, triton, native or torch; see `gatekern doctor`.")
    ] = "auto",
    attention: Annotated[
        str, typer.Option(help="What computes attention: auto, triton, flash or torch; see `gatekern doctor`.")
    ] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits in any batch; says whether a self-test holds.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile of decoder layers; pays on GPUs with small models.")
    ] = False,
    prune_last_layer: Annotated[
        bool, typer.Option("--prune-last-layer", help="Run the last layer on the rows that are read only.")
    ] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Rows read, scored and written at a time.")] = 1024,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no summary.")] = False,
) -> None:
    """Score facts against their contexts.

    Each input line is a JSON object with `context` and `fact`; all other keys (an `id`, say) are carried through. Each
    output line is the input object plus `score` (0 to 1, null without one), `status`, `note` and `decided_by`; logprob
    and adaptive add one `logit_<label>` per label, all but sample `label_mass`, exact and adaptive `std`, sample
    `samples` and `replies`. Input keys of these names are replaced. Contexts may come in any order; rows that share one
    should be near each other, because sharing works within a chunk.

    Exit code: 0 every row has a score; 3 some have none (see their `status`); 1 the run stopped with an error; 2 usage.
    """
    import transformers
    from tqdm import tqdm

    from gatekern import prompts
    from gatekern.modes import mode_options
    from gatekern.verifier import Verifier

    given = {
        "k": k,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "min_valid": min_valid,
        "reply": reply and reply.value,
        "early_stop": early_stop,
        "threshold": threshold,
        "band": band,
        "mass": mass,
        "law": law and law.value,
    }
    options = {name: value for name, value in given.items() if value is not None}
    for name, given_one, modes in (
        ("--distribution", distribution, (Mode.exact, Mode.adaptive)),
        ("--prompt", prompt, (Mode.logprob, Mode.adaptive)),
        ("--rating-prompt", rating_prompt, (Mode.exact, Mode.sample, Mode.adaptive)),
    ):
        if given_one and mode not in modes:
            raise typer.BadParameter(f"{name} is not an option of --mode {mode.value}")
    try:
        mode_options(mode.value, options)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None

    if input != "-" and output != "-" and Path(input).resolve() == Path(output).resolve():
        raise typer.BadParameter("--output would overwrite --input")
    transformers.utils.logging.disable_progress_bar()  # those of loading; ours counts facts
    with _opened(input, "r", sys.stdin) as source:
        verifier = Verifier.from_pretrained(
            model,
            device=device,
            dtype=dtype,
            gguf_file=gguf_file,
            layout=layout.value,
            prompt=prompts.load(prompt) if prompt else None,
            rating_prompt=prompts.load(rating_prompt) if rating_prompt else None,
            backend=backend,
            attention=attention,
            deterministic=deterministic,
            compile=compile,
            prune_last_layer=prune_last_layer,
            min_label_mass=min_label_mass,
        )
        if verifier.invariance is not None and not quiet:
            typer.echo(f"deterministic: {verifier.invariance}", err=True)
        rows = _rows(source)
        total = unscored = 0
        with (
            _opened(output, "w", sys.stdout) as sink,
            tqdm(unit=" facts", file=sys.stderr, disable=quiet) as bar,
        ):
            while batch := list(islice(rows, chunk)):
                for line in _score_rows(verifier, batch, mode.value, options, distribution):
                    unscored += line["score"] is None
                    sink.write(_json(line) + "\n")
                sink.flush()
                total += len(batch)
                bar.update(len(batch))
    if not quiet:
        typer.echo(f"{total - unscored} of {total} facts scored", err=True)
    if unscored:
        raise typer.Exit(INCOMPLETE)


@app.command()
def doctor(
    models: Annotated[
        bool, typer.Option("--models", help="Also list the path of every architecture, and why.")
    ] = False,
) -> None:
    """Say what this machine can run, and why it cannot run the rest."""
    from gatekern.doctor import report

    typer.echo(report(models=models))


def main() -> None:
    """Entry point: expected errors become one line and exit code 1."""
    try:
        app()
    except (GatekernError, OSError) as error:
        typer.echo(f"gatekern: {error}", err=True)
        raise SystemExit(1) from None


def _rows(source: IO[str]) -> Iterator[dict[str, Any]]:
    """Input objects; a line that is not one becomes an object that says so."""
    for number, line in enumerate(source, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.removeprefix("\ufeff"), parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            yield {"line": number, _PROBLEM: f"line {number} is not JSON that can be read: {error}"}
            continue
        if not isinstance(row, dict):
            yield {"line": number, _PROBLEM: f"line {number} is not a JSON object"}
        elif missing := [key for key in ("context", "fact") if key not in row]:
            yield {**row, _PROBLEM: f"line {number} has no {' and no '.join(missing)}"}
        else:
            yield row


def _finite(text: str) -> float:
    """A JSON number; NaN and infinities, spelled out or by overflow, could not be written back as JSON."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


_PROBLEM = "\0problem"  # no JSON key of a user collides with it


def _score_rows(
    verifier: Any, rows: list[dict[str, Any]], mode: str, options: dict[str, Any], distribution: bool
) -> Iterator[dict[str, Any]]:
    pairs = [(row.get("context"), row.get("fact")) for row in rows if _PROBLEM not in row]
    result: ScoreBatch = verifier.score_batch(pairs, mode, on_error="report", **options)
    columns = _columns(result, distribution)
    at = 0
    for row in rows:
        problem = row.pop(_PROBLEM, None)
        if problem is not None:
            empty = dict.fromkeys(columns)
            yield {**row, **empty, "score": None, "status": "invalid_input", "note": problem}
            continue
        yield {**row, **{name: values[at] for name, values in columns.items()}}
        at += 1


def _columns(result: ScoreBatch, distribution: bool) -> dict[str, list[Any]]:
    """What a result adds to the rows: JSON values by name."""
    import numpy as np

    columns: dict[str, list[Any]] = {
        "score": _numbers(result.scores),
        "status": [str(status) for status in result.status],
        "note": list(result.notes),
        "decided_by": list(result.decided_by),
    }
    if result.label_mass is not None:
        columns["label_mass"] = _numbers(result.label_mass)
    if result.label_logits is not None:
        columns |= {
            f"logit_{name}": _numbers(logits)
            for name, logits in zip(result.label_names, result.label_logits.T, strict=True)
        }
    if result.samples is not None:
        drawn = [replies is not None for replies in result.replies or ()]
        columns["samples"] = [_numbers(row) if one else None for row, one in zip(result.samples, drawn, strict=True)]
        columns["replies"] = list(result.replies or ())
    if result.distribution is not None:
        columns["std"] = _numbers(result.distribution.variance**0.5)
        if distribution:
            rows = result.distribution.probabilities
            columns["distribution"] = [None if np.isnan(row).all() else _numbers(row) for row in rows]
    return columns


def _json(line: dict[str, Any]) -> str:
    """Readable where that is valid UTF-8; a lone surrogate goes out as the escape that it came in as."""
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(line)
    return text


def _numbers(values: Any) -> list[float | None]:
    """JSON has no NaN."""
    return [None if value != value else value for value in values.tolist()]


@contextmanager
def _opened(path: str, how: str, standard: IO[str]) -> Iterator[IO[str]]:
    # Bytes that are not UTF-8 become lone surrogates, which the verifier repairs and notes, as it does in an escape.
    if path == "-":
        if isinstance(standard, TextIOWrapper):
            standard.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield standard
    else:
        with open(path, how, encoding="utf-8", errors="surrogateescape") as file:
            yield file


if __name__ == "__main__":
    main()
