"""The grammar of `gatekern.ops.score_grammar` as a finite automaton, and its states enumerated into one table."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gatekern.ops.score_characters import (
    BOUND,
    CLASSES,
    COMMA,
    CUT,
    DOT,
    END,
    EQUALS,
    GREATER,
    HYPHEN,
    JOINER,
    LESS,
    LETTER,
    MARK,
    NEWLINE,
    NUMERAL,
    OPEN,
    PERCENT_SIGN,
    PLUS,
    SLASH,
    SPACE,
    UNDERSCORE,
    WORD,
)
from gatekern.ops.score_grammar import (
    ALONE,
    AMBIGUOUS,
    CLEAR,
    COUNT,
    EMPTY,
    FILLERS,
    FORGET,
    INCOMPLETE,
    LABELLED,
    LABELS,
    MALFORMED,
    OUTSIDE,
    PERCENT,
    PUSH_EXPONENT,
    PUSH_FRACTION,
    PUSH_INTEGER,
    PUSH_NEGATIVE_EXPONENT,
    RATIO,
    READING,
    SAVE,
    STATE_SHIFT,
    STRENGTH,
    TEXT,
    VALUE,
)

_LINKS = {"to": "to", "or": "to", "and": "to", "of": "of", "out of": "over"}
_UNIT = "percent"
_CLOSE_THINKING = "</think>"


def _prefixes(*words: str) -> frozenset[str]:
    return frozenset(word[:size] for word in words for size in range(1, len(word) + 1))


_LINK_PREFIXES = _prefixes(*_LINKS, _UNIT)
_WORD_PREFIXES = _prefixes(*LABELS, *FILLERS)
_TAG_PREFIXES = _prefixes("<think", "</think")

_WHOLE = {"digit", "integer", "point", "comma"}  # `at` while a number has no decimals
_NUMBER = _WHOLE | {"fraction", "places1", "places2", "places3", "places4", "e", "exponent", "-exponent"}
_EXPONENT_DIGITS = {"exponent digits", "-exponent digits"}
_NUMBER |= _EXPONENT_DIGITS
_OPEN_ENDED = _NUMBER | {"stop", "under", "joint", "separator", "list", "link", "sign", "dot"}
_SINGLE = {"count", "count zero", "value", "value zero"}
# Kinds of a pending item that differ only in what a link would make of them.
_SETTLED = {"count zero": "count", "value zero": "value", "percent": "value", "dashed": "range"}
_READINGS = {"ratio": RATIO, "outside": OUTSIDE, "bad": MALFORMED, "dashed": AMBIGUOUS, "range": AMBIGUOUS}


class _State(NamedTuple):
    """Where the automaton is.

    `at` is what the last characters belong to. `item` is the pending item: while a number is read, how it is linked to
    what precedes it (``new``, ``bound``, ``over``, ``to``, ``dash``, ``bad``; ``to0``, ``dash0`` after a zero), then
    what it has become. `link` is a link, or ``bound``, that waits for its number. `number` is what the number is as a
    whole (``zero``, ``one``, ``other``, ``outside``). `listed`: an opening bracket stands right before it. `place`:
    what line and label make of an item (``clean``, ``text``, ``labelled``, ``labelled line``: label on a line above).
    """

    at: str = "gap"
    item: str = ""
    link: str = ""
    number: str = ""
    listed: bool = False
    place: str = "clean"


_Step = tuple[_State, int]
_DONE = _State(at="done")


def _is_word(code: int) -> bool:
    return code < SPACE or code in (WORD, NUMERAL)


def _is_digit(code: int) -> bool:
    return code < LETTER or code == NUMERAL


def _letter(code: int) -> str:
    return chr(code - LETTER + ord("a")) if LETTER <= code < SPACE else "?"


def _then(first: _Step, code: int, percent: bool) -> _Step:
    """Read the same character again in the state that it has led to."""
    action = first[1]
    state, more = _step(first[0], code, percent)
    if action & STRENGTH and more & STRENGTH:  # a malformed item of text right behind another item changes nothing
        assert more & (STRENGTH | READING) == TEXT | MALFORMED
        more &= ~(STRENGTH | READING)
    return state, action | more


def _commit(s: _State, line_ends: bool = False) -> _Step:
    """Hand the pending item over; without one, or for a scale, nothing happens and a label stays in force."""
    labelled = s.place.startswith("labelled")
    gap = _State(place="text")
    if not s.item:
        return _State(place=s.place), 0
    if s.item == "scale":
        return _State(place="labelled" if labelled else "text"), 0
    strength = LABELLED if labelled else ALONE if line_ends and s.place == "clean" else TEXT
    reading = _READINGS.get(s.item, VALUE)
    if s.item.startswith("count") and s.place != "labelled" and not (line_ends and s.place != "text"):
        reading = COUNT
    return gap, strength | reading


def _settle(s: _State) -> _Step:
    """End the pending item at punctuation: it may still turn out to be alone on its line."""
    if s.place in ("clean", "labelled line") and s.item not in ("", "scale"):
        return _State(item=_SETTLED.get(s.item, s.item), place=s.place), 0
    return _commit(s)


def _stuck(s: _State) -> _Step:
    """Read a character behind which a digit would begin no number: what it follows ends."""
    state, action = _settle(s)
    return state._replace(at="stuck"), action


def _spoil(s: _State) -> _Step:
    """Digits and word characters touch: a malformed item, with all that it is linked to."""
    state, action = _commit(s._replace(item="bad"))
    return state._replace(at="spoilt"), action


def _close(s: _State) -> _State:
    """End the number that is being read."""
    number = "outside" if s.at == "places3" else s.number
    if s.item == "new":
        item = "count" if s.at in _WHOLE else "value"
        item = "outside" if number == "outside" else f"{item} zero" if number == "zero" else item
    elif s.item == "over":
        item = "bad" if number == "outside" else "ratio"
    elif s.item in ("to0", "dash0") and number == "one":
        item = "scale"
    else:
        item = {"bad": "bad", "dash": "dashed", "dash0": "dashed"}.get(s.item, "range")
    return s._replace(at="after", item=item, number="")


def _join(item: str, link: str) -> str:
    """Say how the next number is linked to an item."""
    if link in ("over", "of"):
        return "to" if item in ("dashed", "range", "scale") else "over" if item in _SINGLE and link == "over" else "bad"
    if link == "dash" and item in ("dashed", "scale", "bad"):
        return "bad"
    return link + ("0" if item.endswith("zero") else "")


def _start(s: _State, push: int, digit: int) -> _Step:
    """Begin a number with its first digit."""
    action = CLEAR | push
    number = s.number or {0: "zero", 1: "one"}.get(digit, "other")
    listed = s.listed or s.at == "open"
    item = "new"
    if s.link == "bound":
        item = "bound"
    elif s.link:
        item = _join(s.item, s.link)
        action |= SAVE
    if s.item and s.link in ("", "bound"):  # another number on the line of a pending one
        s, committed = _commit(s)
        action |= committed
    if push == PUSH_FRACTION:
        at, number = "fraction", "other" if number == "one" else number
    else:
        at = "digit" if digit < 2 else "integer"
    return _narrow(_State(at, item, "", number, listed, s.place)), action


def _lengthen(number: str, push: int, digit: int) -> str:
    """Say what a number is as a whole with one more digit."""
    if number == "outside":
        return number
    if push == PUSH_INTEGER and number == "zero":
        return {0: "zero", 1: "one"}.get(digit, "other")
    return number if push == PUSH_FRACTION and digit == 0 else "other"


def _narrow(s: _State) -> _State:
    """Forget what no longer matters, to keep the states few."""
    kept = {"new": ("zero", "one", "outside"), "over": ("outside",), "to0": ("zero", "one"), "dash0": ("zero", "one")}
    return s if s.number in kept.get(s.item, ()) else s._replace(number="other")


def _read_number(s: _State, code: int, percent: bool) -> _Step:
    at, number = s.at, s.number
    if code < LETTER:
        push = PUSH_FRACTION
        if at in ("digit", "integer"):
            at, push = "integer", PUSH_INTEGER
        elif at in ("point", "fraction"):
            at = "fraction"
        elif at in _WHOLE or at.startswith("places"):
            at = {"comma": "places1", "places1": "places2", "places2": "places3"}.get(at, "places4")
        else:
            sign = "-" if at.startswith("-") else ""
            at, push = f"{sign}exponent digits", PUSH_NEGATIVE_EXPONENT if sign else PUSH_EXPONENT
        return _narrow(s._replace(at=at, number=_lengthen(number, push, code))), push
    if at == "e" and code in (HYPHEN, PLUS):
        return s._replace(at="-exponent" if code == HYPHEN else "exponent"), 0
    if at in ("e", "exponent", "-exponent"):
        spoilt, action = _spoil(s)
        return _then((spoilt._replace(at="spoilt" if at == "e" else "spoilt joint"), action), code, percent)
    if _letter(code) == "e" and at in ("digit", "integer", "fraction"):
        return s._replace(at="e"), 0
    if code == DOT and at in ("digit", "integer"):
        return s._replace(at="point"), 0
    if code == COMMA and at == "digit" and not s.listed:
        return s._replace(at="comma"), 0
    closed = _close(s)
    if _is_word(code) and (at != "comma" or code == NUMERAL):
        return _then(_spoil(closed), code, percent)
    if at == "point" and code == PERCENT_SIGN:
        return _then((closed, 0), code, percent)
    if at == "point" and code == DOT:
        return _stuck(closed)
    if at in ("point", "comma"):
        return _then(_settle(closed), code, percent)
    behind = {DOT: "stop", UNDERSCORE: "under", JOINER: "joint"}
    if code in behind:
        return closed._replace(at=behind[code]), 0
    if code == COMMA and not s.listed:
        return closed._replace(at="list" if at in ("fraction", *_EXPONENT_DIGITS) else "separator"), 0
    if code == HYPHEN:
        return closed._replace(at="link", link="dash"), 0
    return _then((closed, 0), code, percent)


def _read_behind_number(s: _State, code: int, percent: bool) -> _Step:
    """Read what follows a number and the one character in `at` that could have continued it."""
    if s.at == "list" and code < LETTER:
        return _start(s._replace(at="link", link="to"), PUSH_INTEGER, code)
    if _is_digit(code) or (s.at in ("stop", "under") and _is_word(code)):
        return _then(_spoil(s), code, percent)
    if s.at == "under" and code == UNDERSCORE:
        return s, 0
    if s.at == "stop" and code == DOT:
        return _stuck(s)
    if s.at in ("under", "joint") or (s.at == "stop" and code == PERCENT_SIGN):
        return _then((s._replace(at="after"), 0), code, percent)
    return _then(_settle(s), code, percent)


def _read_after(s: _State, code: int, percent: bool) -> _Step:
    """Read what follows an item, where a link is possible."""
    if code in (SPACE, MARK, UNDERSCORE):
        return s, 0
    if code == PERCENT_SIGN:
        return _percentage(s, percent, at="after")
    if code == SLASH:
        return s._replace(at="link", link="over"), 0
    if code in (HYPHEN, PLUS) or (code == COMMA and s.listed):
        return s._replace(at="link", link="to"), 0
    if code == EQUALS:
        return _commit(s._replace(item="scale"))
    if LETTER <= code < SPACE and _letter(code) in _LINK_PREFIXES:
        return s._replace(at=f"word {_letter(code)}", listed=False), 0
    return _then(_settle(s), code, percent)


def _percentage(s: _State, percent: bool, at: str) -> _Step:
    if s.item in _SINGLE:
        return s._replace(at=at, item="percent" if percent else "bad"), PERCENT if percent else 0
    item = {"outside": "outside", "dashed": "range", "range": "range", "scale": "range"}.get(s.item, "bad")
    return s._replace(at=at, item=item), 0


def _read_link(s: _State, code: int, percent: bool) -> _Step:
    """Read what follows a link, or a bound, up to its number."""
    if code < LETTER:
        return _start(s, PUSH_INTEGER, code)
    if code == DOT:
        return s._replace(at="dot", listed=False), 0
    if code in (SPACE, MARK, UNDERSCORE):
        return (s._replace(link="to") if s.link == "dash" else s), 0
    if code in (HYPHEN, PLUS) or (s.link == "bound" and code in (EQUALS, BOUND, GREATER)):
        return (s if s.link == "bound" else s._replace(link="to")), 0
    return _then(_unlink(s), code, percent)


def _unlink(s: _State) -> _Step:
    """No number follows a link: what stands before it is no longer alone on its line."""
    return (s._replace(at="gap", link=""), 0) if s.link in ("", "bound") else _commit(s)


def _read_word(s: _State, code: int, percent: bool) -> _Step:
    """Continue a word, which may link the pending item to a number."""
    word, action = s.at.removeprefix("word "), 0
    if LETTER <= code < SPACE or code == WORD:
        word += _letter(code)
        if s.item and word == _UNIT:
            return _percentage(s, percent, at="unit")
        if s.item and word not in _LINK_PREFIXES:
            s, action = _commit(s)
        if not s.item:
            word = word.split(" ")[-1]
            word = word if word in _WORD_PREFIXES else "?"
        return s._replace(at=f"word {word}"), action
    if s.item:
        if code == SPACE and (word.endswith(" ") or f"{word} " in _LINK_PREFIXES):
            return s._replace(at=f"word {word.rstrip()} "), 0
        if word in _LINKS and code in (SPACE, MARK):
            return s._replace(at="link", link=_LINKS[word]), 0
        s, action = _commit(s)
    if word.endswith(" "):
        return _then((s._replace(place="text"), action), code, percent)
    if _is_digit(code):
        return _then((s._replace(at="gap"), action), NUMERAL, percent)
    labelled = word in LABELS or (word in FILLERS and s.place.startswith("labelled"))
    s = _State(place="labelled" if labelled else "text")
    if code in (DOT, UNDERSCORE):
        return s._replace(at="stuck"), action
    if code in (HYPHEN, PLUS):  # a dash, not a sign
        return s, action
    return _then((s, action), code, percent)


def _read_tag(s: _State, code: int, percent: bool) -> _Step:
    tag = s.at.removeprefix("tag ")
    longer = tag + ("/" if code == SLASH else _letter(code))
    if longer in _TAG_PREFIXES:
        return s._replace(at=f"tag {longer}"), 0
    if code == GREATER and tag == "<think":
        return _State(at="thinking "), 0
    if code == GREATER and tag == "</think":
        return _State(), FORGET
    if tag == "<" and (code < LETTER or code in (SPACE, EQUALS, DOT)):
        return _read_link(s._replace(at="link", link="bound"), code, percent)
    letters = tag.lstrip("</")
    if not letters:
        return _then((s._replace(at="gap"), 0), code, percent)
    s, action = _commit(s)
    return _then((s._replace(at=f"word {letters if letters in _WORD_PREFIXES else '?'}"), action), code, percent)


def _read_thinking(s: _State, code: int) -> _Step:
    character = {LESS: "<", SLASH: "/", GREATER: ">"}.get(code, _letter(code))
    longer = s.at.removeprefix("thinking ") + character
    if longer == _CLOSE_THINKING:
        return _State(), FORGET
    known = longer if _CLOSE_THINKING.startswith(longer) else "<" if code == LESS else ""
    return s._replace(at=f"thinking {known}"), 0


def _end_line(s: _State, code: int) -> _Step:
    """Read a newline or the end of the reply."""
    if s.at.startswith("thinking"):
        return (s._replace(at="thinking "), 0) if code == NEWLINE else (_DONE, LABELLED | EMPTY)
    s, action = _commit(s, line_ends=True)
    if code != NEWLINE:
        return _DONE, action
    return s._replace(place="labelled line" if s.place.startswith("labelled") else "clean"), action


def _step(s: _State, code: int, percent: bool) -> _Step:
    """Read one character."""
    at, kind = s.at, s.at.split(" ")[0]
    if at == "done":
        return s, 0
    if code == CUT and (at in _OPEN_ENDED or kind in ("tag", "thinking") or (kind == "word" and s.item)):
        return _DONE, LABELLED | INCOMPLETE
    if at in _NUMBER:
        return _read_number(s, code, percent)
    if kind == "thinking" and code not in (NEWLINE, END):
        return _read_thinking(s, code)
    if kind == "word":
        return _read_word(s, code, percent)
    if kind == "tag":
        return _read_tag(s, code, percent)
    if at == "link":
        return _read_link(s, code, percent)
    if at in ("stop", "under", "joint", "separator", "list"):
        return _read_behind_number(s, code, percent)
    if at == "unit":
        if code in (DOT, UNDERSCORE):
            return _stuck(s)
        if _is_word(code):
            return (s, 0) if not _is_digit(code) else _then(_spoil(s), code, percent)
        return _then((s._replace(at="after"), 0), code, percent)
    if at == "spoilt":
        if _is_word(code) or code == UNDERSCORE:
            return s, 0
        if code == DOT:
            return s._replace(at="stuck"), 0
        if code in (COMMA, JOINER, HYPHEN, SLASH):
            return s._replace(at="spoilt joint"), 0
        return _then((s._replace(at="gap"), 0), code, percent)
    if at == "spoilt joint":
        return _then((s._replace(at="spoilt" if _is_digit(code) else "gap"), 0), code, percent)
    if at == "stuck":
        if code in (DOT, UNDERSCORE):
            return s, 0
        return _then((s._replace(at="gap"), 0), NUMERAL if code < LETTER else code, percent)
    if at == "dot":
        if code < LETTER:
            return _start(s, PUSH_FRACTION, code)
        s, action = _unlink(s._replace(number="", listed=False))
        return (s._replace(at="stuck"), action) if code == DOT else _then((s, action), code, percent)
    if at == "sign":
        if code < LETTER:
            return _start(s, PUSH_INTEGER, code)
        return (s._replace(at="dot"), 0) if code == DOT else _then((s._replace(at="gap", number=""), 0), code, percent)
    if code in (NEWLINE, END, CUT):
        return _end_line(s, code)
    if at == "after":
        return _read_after(s, code, percent)
    return _read_gap(s, code, percent)


def _read_gap(s: _State, code: int, percent: bool) -> _Step:
    """Read a character that touches nothing before it."""
    if code < LETTER:
        return _start(s, PUSH_INTEGER, code)
    if _is_word(code) and s.item:
        return _then(_commit(s), code, percent)
    if code == NUMERAL:
        return _spoil(s)
    if _is_word(code):
        letter = _letter(code)
        return s._replace(at=f"word {letter if letter in _WORD_PREFIXES else '?'}"), 0
    if code in (HYPHEN, PLUS):
        return s._replace(at="sign", number="outside" if code == HYPHEN else ""), 0
    if code == LESS:
        return s._replace(at="tag <"), 0
    if code == BOUND or (code == GREATER and s.at == "space" and s.place in ("text", "labelled")):
        return s._replace(at="link", link="bound"), 0
    at = {SPACE: "space", OPEN: "open", DOT: "dot"}.get(code, "gap")
    return s._replace(at=at, listed=code == DOT and s.at == "open"), 0


@functools.cache
def tables(percent: bool) -> NDArray[np.int32]:
    """Enumerate the automaton.

    Parameters
    ----------
    percent : bool
        Whether ``80%`` is 0.8; otherwise it is malformed.

    Returns
    -------
    int32 [S, 64]
        For a state and a class, the next state (shifted left by `STATE_SHIFT`) and the bits of the action. State 0 is
        the first, `DONE` the last. Read only.

    Examples
    --------
    >>> tables(False).dtype, tables(False).shape[1]
    (dtype('int32'), 64)
    """
    states = [_State(), _DONE]
    number_of = {state: number for number, state in enumerate(states)}
    rows = []
    for state in states:  # grows while it is walked
        row = np.zeros(CLASSES, np.int32)
        for code in range(CUT + 1):
            after, action = _step(state, code, percent)
            if after not in number_of:
                number_of[after] = len(states)
                states.append(after)
            row[code] = number_of[after] << STATE_SHIFT | action
        rows.append(row)
    table = np.stack(rows)
    table.flags.writeable = False
    return table
