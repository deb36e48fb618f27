"""The grammar of `gatekern.ops.score_grammar` once more, from its prose: regular expressions and exact fractions.

Nothing is shared with the automaton but the statuses. It reads complete replies of the characters that the tests write.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from gatekern.ops.score_grammar import ParseStatus as Status

DIGIT = "0-9²½٠٨８"  # noqa: RUF001
LETTER = "A-Za-zéß分\ufffd"
JOINER = ":'’…·٫。"  # noqa: RUF001
DASH = r"\-–—−"  # noqa: RUF001
SOFT = ' \t*`"~$“”_'
LABELS = ("score", "rating", "answer")

_IN_LIST = re.compile(rf"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+{DASH}]?[0-9]+)?")
_NUMBER = re.compile(rf"[01],[0-9]+|{_IN_LIST.pattern}")
_SPOILT = re.compile(rf"(?:[{LETTER}{DIGIT}_]|[,/{JOINER}{DASH}](?=[{DIGIT}]))*")
_TOUCHES = re.compile(rf"_*[{LETTER}{DIGIT}]|\.[{LETTER}{DIGIT}]|[{JOINER}][{DIGIT}]")
_LINK_WORD = re.compile(r"(to|or|and|of|out[ \t]+of)(?=[ \t*`\"~$“”])", re.IGNORECASE)


@dataclass
class Number:
    value: Fraction
    whole: bool
    begin: int
    end: int
    outside: bool = False


@dataclass
class Item:
    """`kind`: single, percent, ratio, outside, bad, dashed, range or scale."""

    kind: str
    value: Fraction = Fraction(0)
    whole: bool = False


def slow_parse(text: str, percent: bool = False) -> tuple[float, Status]:
    answer = text
    while tag := re.search("<(/?)think>", answer, re.IGNORECASE):
        answer = answer[tag.end() :]
        if not tag[1]:
            close = re.search("</think>", answer, re.IGNORECASE)
            if close is None:
                return math.nan, Status.NO_NUMBER
            answer = answer[close.end() :]
    return _Reader(answer, percent).read()


class _Reader:
    def __init__(self, text: str, percent: bool) -> None:
        self.text, self.percent = text, percent
        self.items: list[tuple[int, Status, Fraction]] = []  # with the strength: 1 text, 2 alone, 3 labelled
        self.place = "clean"  # or text, labelled, above (labelled by an earlier line)
        self.pending: Item | None = None  # it may be alone on its line
        self.touched = -1  # where the last word or malformed item ended
        self.linkable = -1  # where the last item ended, spaces included

    def match(self, pattern: str, i: int) -> re.Match[str] | None:
        return re.compile(pattern, re.IGNORECASE).match(self.text, i)

    def read(self) -> tuple[float, Status]:
        i = 0
        while i < len(self.text):
            i = self.step(i)
        self.end_line()
        return self.decide()

    def step(self, i: int) -> int:
        if self.text[i] in "\n\r":
            self.end_line()
            return i + 1
        if (begin := self.bound(i)) and self.number(begin):
            return self.item(begin, "bound")
        if self.match(rf"[{DASH}+]\.?[0-9]", i) and not self.stands_behind(i, f"[{LETTER}{DIGIT}]"):
            return self.item(i + 1, "negative" if self.text[i] != "+" else "positive")
        if self.match(r"\.?[0-9]", i) and not self.stuck(i):
            return self.item(i, "")
        if self.match(f"[{DIGIT}]|[{LETTER}]+[{DIGIT}]", i):
            self.commit_pending()
            self.commit(Item("bad"))
            self.touched = _SPOILT.match(self.text, i).end()
            return self.touched
        if word := self.match(f"[{LETTER}]+", i):
            self.word(word.group().lower())
            self.touched = word.end()
            return word.end()
        return i + 1

    def stands_behind(self, i: int, pattern: str) -> bool:
        return i > 0 and re.fullmatch(pattern, self.text[i - 1]) is not None

    def stuck(self, i: int) -> bool:
        """A digit here would touch a word through points and underscores, or stands behind two points."""
        run = self.text[len(self.text[:i].rstrip("._")) : i]
        here = run + "." if self.text[i] == "." else run
        behind = here and i - len(run) <= self.touched <= i
        return bool(behind or ".." in here)

    def bound(self, i: int) -> int:
        """Where the number of a bound would begin, or 0."""
        greater = self.text[i] == ">" and i != self.linkable and self.stands_behind(i, "[ \t]")
        if self.match(r"[≤≥]|<(?=[ \t=]|\.?[0-9])", i) or (greater and self.place in ("text", "labelled")):
            return self.match(rf"[{re.escape(SOFT)}=≤≥>+{DASH}]*", i + 1).end()
        return 0

    def number(self, i: int, listed: bool = False) -> Number | None:
        match = (_IN_LIST if listed else _NUMBER).match(self.text, i)
        if not match:
            return None
        text = re.sub(f"[{DASH}]", "-", match.group())
        whole, comma, end = text.isdigit(), "," in text, match.end()
        touches = _TOUCHES.match(self.text, end)
        if not touches and not listed:
            touches = self.match(f",[{DIGIT}]" if whole or comma else f",(?![0-9])[{DIGIT}]", end)
        if touches:
            return Number(Fraction(-1), False, i, _SPOILT.match(self.text, touches.end()).end(), outside=True)
        return Number(Fraction(text.replace(",", ".")), whole, i, end, outside=comma and len(text) == 5)

    def item(self, i: int, mode: str) -> int:
        """Read a number and all that is linked to it."""
        self.commit_pending()
        listed = not mode and self.stands_behind(i, r"[(\[{]")
        number = self.number(i, listed)
        item = Item("range" if mode == "bound" else "outside" if mode == "negative" or number.outside else "single")
        item.value, item.whole = number.value, number.whole
        while True:
            if number.value < 0:
                self.commit(Item("bad"))
                self.touched = number.end
                return number.end
            link, k = self.link(number, item, listed)
            if link == "spoilt":
                self.commit(Item("bad"))
                self.touched = k
                return k
            if not link:
                return self.settle(item, k)
            if link != "comma":
                begin = k
                k = self.match(rf"[{re.escape(SOFT)}{DASH}+]*", k).end()
                if re.search(f"[{DASH}+]", self.text[begin:k]) or (link == "dash" and k > begin):
                    link = "to"
            listed = listed and not link.startswith("word ")
            link = link.removeprefix("word ")
            following = self.number(k, listed)
            if following is None:
                self.commit(item)
                self.linkable = k
                return k
            number = following
            item = self.join(item, "to" if link == "comma" else link, number)

    def link(self, number: Number, item: Item, listed: bool) -> tuple[str, int]:
        """Read percent signs and a link; without one, give where the item ends."""
        j = number.end
        if self.match(r"\.(?!%)", j):
            return "", j
        if self.match(",", j) and not listed:
            return ("comma" if self.match(",[0-9]", j) else ""), j + (self.match(",[0-9]", j) is not None)
        if self.match(f"[{DASH}]", j):
            return "dash", j + 1
        j += self.match(rf"[.{JOINER}]?", j).end() - j
        while True:
            k = self.match(f"[{re.escape(SOFT)}]*", j).end()
            unit = self.match(f"%|percent[{LETTER}]*", k)
            if not unit:
                break
            j = unit.end()
            if unit.group() != "%" and self.match(f"[{DIGIT}]", j):
                return "spoilt", _SPOILT.match(self.text, j).end()
            self.apply_percent(item)
            if unit.group() != "%" and self.match("[._]", j):
                self.touched = j
                return "", j
        if link := self.match(f"[/+{DASH}]", k):
            return ("over" if link.group() == "/" else "to"), k + 1
        if listed and self.match(",", k):
            return "to", k + 1
        if self.match("=", k):
            item.kind = "scale"  # the legend of one
            return "", k + 1
        if link := _LINK_WORD.match(self.text, k):
            word = link[1].lower()
            return "word " + ("over" if word.startswith("out") else "of" if word == "of" else "to"), link.end()
        self.linkable = k
        return "", k

    def apply_percent(self, item: Item) -> None:
        if item.kind == "single":
            item.kind, item.value, item.whole = "percent" if self.percent else "bad", item.value / 100, False
        elif item.kind in ("ratio", "percent"):
            item.kind = "bad"
        elif item.kind in ("dashed", "scale"):
            item.kind = "range"

    def join(self, item: Item, link: str, number: Number) -> Item:
        several = item.kind in ("dashed", "range", "scale")
        if link in ("over", "of"):
            if several:
                return Item("range")
            if item.kind != "single" or link == "of" or number.outside:
                return Item("bad")
            if number.value not in (1, 5, 10, 100):
                return Item("ratio", Fraction(-1))
            return Item("ratio", item.value / number.value)
        if link == "dash" and item.kind in ("dashed", "scale", "bad"):
            return Item("bad")
        if item.kind == "single" and item.value == 0 and number.value == 1 and not number.outside:
            return Item("scale")
        return Item("dashed" if link == "dash" else "range")

    def settle(self, item: Item, end: int) -> int:
        if item.kind == "scale":
            self.place = "labelled" if self.place in ("labelled", "above") else "text"
        elif self.place in ("clean", "above"):
            self.pending = item
        else:
            self.commit(item)
        return end

    def commit_pending(self, line_ends: bool = False) -> None:
        if self.pending:
            self.commit(self.pending, line_ends)
        self.pending = None

    def commit(self, item: Item, line_ends: bool = False) -> None:
        labelled = self.place in ("labelled", "above")
        strength = 3 if labelled else 2 if line_ends and self.place == "clean" else 1
        counts = item.kind == "single" and item.whole and (strength == 1 or (self.place == "above" and not line_ends))
        previous, self.place = self.place, "text"
        if item.kind == "scale":
            self.place = "labelled" if previous in ("labelled", "above") else "text"
            return
        if item.kind in ("range", "dashed"):
            status = Status.AMBIGUOUS
        elif item.kind == "bad" or item.value < 0:
            status = Status.MALFORMED
        elif item.kind == "outside" or item.value > 1:
            status = Status.OUT_OF_RANGE
        else:
            status = Status.MALFORMED if counts else Status.OK
        self.items.append((strength, status, item.value if status == Status.OK else Fraction(0)))

    def word(self, word: str) -> None:
        self.commit_pending()
        keeps = self.place in ("labelled", "above") and word == "is"
        self.place = "labelled" if word in LABELS or keeps else "text"

    def end_line(self) -> None:
        above = self.place in ("labelled", "above") and self.pending is None
        self.commit_pending(line_ends=True)
        self.place = "above" if above else "clean"

    def decide(self) -> tuple[float, Status]:
        noise = (Status.OUT_OF_RANGE, Status.MALFORMED)
        labelled = [item for item in self.items if item[0] == 3]
        serious = [item for item in self.items if item[1] not in noise]
        if labelled or serious:
            strongest = labelled or [item for item in serious if item[0] == max(item[0] for item in serious)]
            _, status, value = strongest[0]
            if len({item[1:] for item in strongest}) > 1:
                status = Status.AMBIGUOUS
        else:
            seen = {status for _, status, _ in self.items}
            status = next((status for status in noise if status in seen), Status.NO_NUMBER)
        return (float(np.float32(float(value))), status) if status == Status.OK else (math.nan, status)
