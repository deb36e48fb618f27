"""The grammar of a reply that should be a decimal between 0.0 and 1.0, and the tables that every form interprets.

A wrong number is worse than no number: what this grammar does not recognise becomes a status, never a guess.

**Number.** ``[+-] digits [. digits] [e [+-] digits]``, where digits are ASCII and may be missing on one side of the
point (``.8``, ``1.``: a full stop). A decimal comma follows a single 0 or 1 (``0,85``); a comma and exactly three
digits separate thousands and are out of range. A number touches no word character (letter, digit of any script,
``_``, mark, U+FFFD), on either side and beyond a full stop, and no digit beyond ``, : ' . …`` and their like:
``v1``, ``0.8x``, ``1_0``, ``0.8.5``, ``10:30``, ``1'000`` are malformed items, as is a digit behind two points. A dash
is a sign where no number or word stands before it; any negative number is out of range.

**Item.** A number, or several joined by links, with only spaces and markup (``* _ ` " ' ~ $``) between them:

====================================  ==============================================================================
``80%``, ``80 %``, ``80 percent``     a hundredth of the number where percentages are allowed, else malformed
``8/10``, ``8 out of 10``             the quotient, if the denominator is 1, 5, 10 or 100; else malformed
``3 of 4``, ``1/2/2024``              malformed: a count, a date
``0.7-0.8``, ``0.3 or 0.5``           ambiguous; links are dashes, ``+``, ``to``, ``or``, ``and``, a comma between
                                      decimals without a space, and any comma after an opening bracket
``0-1``, ``0.0 to 1.0``, ``[0, 1]``   the scale itself: no item
``0 = no``                            the legend of a scale: no item
``2024-05-06``                        malformed: joined by two hyphens without spaces
``< 0.5``, ``≥ 0.8``                  ambiguous: a bound. A ``>`` after a space counts, except first on its line
====================================  ==============================================================================

**Strength.** *Labelled*: after one of the words `LABELS`, with only spaces, newlines, punctuation, the words `FILLERS`
and the scale between. *Alone*: only spaces and punctuation beside it on its line, and no link that leads nowhere.
*Text*: elsewhere. An integer without point, percent sign or denominator is a count in text (``1 claim``, ``1. First``),
hence malformed if it is not out of range; so is one at the start of a line that a label on an earlier line announces,
when words follow it.

**Decision.** The labelled items decide; without one, the alone items; or else those in text: one value if all are
equal, ambiguous if they differ or one is ambiguous. Items that are out of range or malformed count only where they are
labelled, or where there is no other. Nothing at all is `NO_NUMBER`.

**Thinking.** ``</think>`` discards all before it. A ``<think>`` that is not closed leaves `NO_NUMBER`.

**End.** A reply that was cut (no stop token, or `complete=False`) is `INCOMPLETE` if more characters could continue its
last number, sign or link, a tag, or its thinking. A space after a number ends it.

The grammar is a finite automaton over classes of characters: `gatekern.ops.score_automaton` steps through it and
enumerates its states into one array, so the forms hold no rule. They hold the registers and what the bits of an action
do to them, in this order:

==============  ======================================================================================================
`FORGET`        back to the initial registers
commit          (`STRENGTH`, `READING`) the pending item joins the best ones so far
`SAVE`          first operand = number
`CLEAR`         number = 0
`PUSH`          the digit joins the number: before or after the point, or in a positive or negative exponent
`PERCENT`       number / 100
==============  ======================================================================================================

A number is an exact decimal, mantissa / 10 ** places, whose mantissa has no trailing zero: equal values are equal
pairs. It holds 17 digits; a digit other than 0 beyond them becomes one last digit 1, so that order is kept.
"""

from __future__ import annotations

from enum import IntEnum

LABELS = ("score", "rating", "answer")  # not "confidence" and the like, which often stand beside a score
FILLERS = ("is",)  # not "of": "a score of 1.0 would need ..."


class ParseStatus(IntEnum):
    """What a reply turned out to be.

    Examples
    --------
    >>> ParseStatus(0).name
    'OK'
    """

    OK = 0  #: one value in [0, 1]
    NO_NUMBER = 1  #: nothing that looks like a number
    AMBIGUOUS = 2  #: several values, a range or a bound
    OUT_OF_RANGE = 3  #: a number, but not in [0, 1]
    MALFORMED = 4  #: digits that are no score: version, date, count, other script, percentage where none is allowed
    INCOMPLETE = 5  #: cut off where its last number could continue


# The bits of an action, and above them the next state. csrc/parse_scores.cpp repeats them.
STRENGTH = 0b11  # of a commit: 0 no commit, else text, alone, labelled
READING = 0b111 << 2  # of a commit: a ParseStatus, or how to find it from the number
SAVE, CLEAR = 1 << 5, 1 << 6
PUSH = 0b111 << 7
PERCENT, FORGET = 1 << 10, 1 << 11
STATE_SHIFT = 12

TEXT, ALONE, LABELLED = 1, 2, 3
VALUE, EMPTY, AMBIGUOUS, OUTSIDE, MALFORMED, INCOMPLETE, COUNT, RATIO = (code << 2 for code in range(8))
PUSH_INTEGER, PUSH_FRACTION, PUSH_EXPONENT, PUSH_NEGATIVE_EXPONENT = (code << 7 for code in range(1, 5))
DONE = 1  # the state behind the end of the reply

MAX_DIGITS = 17  # of a mantissa, before the one that stands for all others
MAX_EXPONENT = 10**9  # beyond it, larger is the same
MAX_PLACES = 64  # from here on every mantissa is 0 in float32
