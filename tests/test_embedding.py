"""Every Python block of docs/embedding.md runs as it is printed, section by section; their asserts are the tests."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "embedding.md"


class Block(NamedTuple):
    section: str
    line: int  # of the page, 1-based: where the code begins
    code: str


def blocks() -> list[Block]:
    """The page's Python blocks in order, each with the `##` section that it belongs to."""
    found, section, begin = [], "", None
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if begin is None and line.startswith("## "):
            section = line.removeprefix("## ")
        elif begin is None and line == "```python":
            begin = number + 1
        elif begin is not None and line == "```":
            found.append(Block(section, begin, "\n".join(lines[begin - 1 : number - 1])))
            begin = None
    return found


SECTIONS = list(dict.fromkeys(block.section for block in blocks()))


@pytest.mark.parametrize("section", SECTIONS)
def test_the_blocks_of_a_section_run_in_order(section):
    namespace: dict[str, Any] = {"__name__": "embedding"}
    for block in blocks():
        if block.section == section:
            # Blank lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec"), namespace)


def test_every_block_checks_something():
    unchecked = [block.line for block in blocks() if not re.search(r"^\s*assert |assert_close\(", block.code, re.M)]
    assert unchecked == []


def test_no_block_is_missed():
    fences = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("```")]
    assert fences == ["```python", "```"] * len(blocks())
    assert len(SECTIONS) == 3


def test_what_the_page_names_exists():
    """Dotted names and paths in backticks, and linked pages."""
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:gatekern|ops)(?:\.\w+)+)", text):
        assert resolve(name) is not None
    paths = re.findall(r"`(tests/[\w./]+)`", text) + [
        f"docs/{link}" for link in re.findall(r"\]\(([\w-]+\.md)\)", text)
    ]
    assert len(paths) >= 2
    for path in paths:
        assert (PAGE.parents[1] / path).is_file(), path


def resolve(name: str) -> Any:
    """The object of a dotted name, `ops` standing for `gatekern.ops`."""
    parts = name.split(".")
    parts = parts if parts[0] == "gatekern" else ["gatekern", *parts]
    found: Any = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 1):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[: at + 1]))
        found = getattr(found, part)
    return found
