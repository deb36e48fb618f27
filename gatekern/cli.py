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
from gatekern.errors import GatekernError

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
    mode: Annotated[str, typer.Option(help="logprob: probability of yes against no, from one forward.")] = "logprob",
    layout: Annotated[
        Layout,
        typer.Option(help="paper: the question follows the fact. fact_last: it precedes the context; faster."),
    ] = Layout.paper,
    prompt: Annotated[Path | None, typer.Option(help="TOML file with a prompt template of your own.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file inside --model.")] = None,
    backend: Annotated[str, typer.Option(help="auto, triton, native or torch; see `gatekern doctor`.")] = "auto",
    chunk: Annotated[int, typer.Option(min=1, help="Rows read, scored and written at a time.")] = 1024,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no summary.")] = False,
) -> None:
    """Score facts against their contexts.

    Each input line is a JSON object with `context` and `fact`; all other keys (an `id`, say) are carried through. Each
    output line is the input object plus `score` (0 to 1, null without one), `status`, `note`, `label_mass` and one
    `logit_<label>` per label; input keys of these names are replaced. Contexts may come in any order; rows that share
    one should be near each other, because sharing works within a chunk.

    Exit code: 0 every row has a score; 3 some have none (see their `status`); 1 the run stopped with an error; 2 usage.
    """
    import transformers
    from tqdm import tqdm

    from gatekern import prompts
    from gatekern.verifier import Verifier

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
            backend=backend,
        )
        rows = _rows(source)
        total = unscored = 0
        with (
            _opened(output, "w", sys.stdout) as sink,
            tqdm(unit=" facts", file=sys.stderr, disable=quiet) as bar,
        ):
            while batch := list(islice(rows, chunk)):
                for line in _score_rows(verifier, batch, mode):
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


def _score_rows(verifier: Any, rows: list[dict[str, Any]], mode: str) -> Iterator[dict[str, Any]]:
    pairs = [(row.get("context"), row.get("fact")) for row in rows if _PROBLEM not in row]
    result: ScoreBatch = verifier.score_batch(pairs, mode, on_error="report")
    at = 0
    for row in rows:
        problem = row.pop(_PROBLEM, None)
        if problem is not None:
            empty = {f"logit_{name}": None for name in result.label_names}
            yield {**row, "score": None, "status": "invalid_input", "note": problem, "label_mass": None, **empty}
            continue
        logits = zip(result.label_names, result.label_logits[at].tolist(), strict=True)
        yield {
            **row,
            "score": _number(result.scores[at]),
            "status": str(result.status[at]),
            "note": result.notes[at],
            "label_mass": _number(result.label_mass[at]),
            **{f"logit_{name}": _number(value) for name, value in logits},
        }
        at += 1


def _json(line: dict[str, Any]) -> str:
    """Readable where that is valid UTF-8; a lone surrogate goes out as the escape that it came in as."""
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(line)
    return text


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if value != value else float(value)


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
