"""The grammar of `gatekern.ops.score_grammar` once more, from its prose: runs of touching characters, exact fractions.

Nothing is shared with the automaton but the statuses. It reads complete replies of the characters that the tests write.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from gatekern.ops.score_grammar import ParseStatus as Status

ASCII = "0-9"
DIGIT = "0-9²½٠٨８"
LETTER = "A-Za-zéß分\ufffd"
JOINER = ":'’…·٫。"  # noqa: RUF001
DASH = "-–—−"  # noqa: RUF001
SOFT = " \t*`\"~$“”_"
LABELS = {"score", "rating", "confidence", "probability", "support", "answer", "verdict"}

# A run of characters that touch: a number if it is one as a whole.
_NUMERIC = re.compile(rf"(?:[{ASCII}]+(?:,[{DIGIT}]+)+|\.?[{DIGIT}])(?:(?<=[0-9][eE])[+{DASH}](?=[0-9])|_+(?=[{LETTER}{DIGIT}])"
                      rf"|\.(?=[{LETTER}{DIGIT}])|[{JOINER}](?=[{DIGIT}])|[{LETTER}{DIGIT}])*(?:(?<=\d),(?=[{DIGIT}]))?")
