"""Classes of characters: the alphabet of `score_grammar`."""

from __future__ import annotations

import functools
import unicodedata

import numpy as np
from numpy.typing import NDArray

# Classes 0 to 9 are the digits, then come the letters a to z of either case.
LETTER = 10
(SPACE, NEWLINE, DOT, COMMA, HYPHEN, PLUS, PERCENT_SIGN, SLASH, JOINER, UNDERSCORE, LESS, GREATER, BOUND) = range(
    36, 49
)
(EQUALS, OPEN, MARK, PUNCTUATION, WORD, NUMERAL, END, CUT) = range(49, 57)
CLASSES = 64  # columns of a table, a power of two; the last one used, CUT, stands for the end of a reply without END
STOP = END  # the code of a token that ends the reply

_CHARACTERS = {
    NEWLINE: "\n\r\v\f\x85\u2028\u2029",
    SPACE: "\t",
    DOT: ".",
    COMMA: ",",
    # Dash, minus and hyphen are typed for each other: hyphens, dashes, bar, minus signs.
    HYPHEN: "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d",
    PLUS: "+\uff0b",
    PERCENT_SIGN: "%\uff05\ufe6a",
    SLASH: "/\u2044\u2215\uff0f",
    # Separators inside a number of some notation, punctuation elsewhere: colon, apostrophes, ellipsis, middle dot,
    # Arabic separators and comma, ideographic stop and comma, and full-width forms.
    JOINER: ":'\u2019\u2026\u00b7\u066b\u066c\u060c\u3002\u3001\uff0c\uff0e\uff1a\uff07",
    UNDERSCORE: "_\uff3f",
    LESS: "<",
    GREATER: ">",
    BOUND: "\u2264\u2265\u2266\u2267\u226a\u226b\u2260\uff1c\uff1e",  # at most, at least, unlike, full-width < and >
    EQUALS: "=",
    OPEN: "([{",
    MARK: '*`"~$\u2018\u201c\u201d\u201e\u00ab\u00bb',  # markup and quotes
    WORD: "\ufffd\u2030\u2031",  # what could not be decoded; per mille signs, which change a number
}
_CATEGORIES = {"Z": SPACE, "P": PUNCTUATION, "S": PUNCTUATION, "N": NUMERAL}  # all others are word characters
_CLASS_OF = {character: code for code, characters in _CHARACTERS.items() for character in characters}


def class_of(character: str) -> int:
    """Give the class of one character.

    Examples
    --------
    >>> class_of("7"), class_of("B") - LETTER, class_of("\N{ARABIC-INDIC DIGIT SEVEN}") == NUMERAL
    (7, 1, True)
    """
    if character in _CLASS_OF:
        return _CLASS_OF[character]
    if "0" <= character <= "9":
        return ord(character) - ord("0")
    if character.isascii() and character.isalpha():
        return ord(character.lower()) - ord("a") + LETTER
    return _CATEGORIES.get(unicodedata.category(character)[0], WORD)


@functools.cache
def _latin_classes() -> NDArray[np.uint8]:
    return np.array([class_of(chr(point)) for point in range(256)], np.uint8)


def classes_of(text: str) -> NDArray[np.uint8]:
    """Give the class of each character, uint8: by table in Latin-1, elsewhere by look-up of the distinct ones.

    Examples
    --------
    >>> classes_of("0.8").tolist() == [0, DOT, 8]
    True
    """
    try:
        return _latin_classes()[np.frombuffer(text.encode("latin-1"), np.uint8)]
    except UnicodeEncodeError:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    wide = points >= 256
    classes = _latin_classes()[np.where(wide, 0, points)]
    distinct, which = np.unique(points[wide], return_inverse=True)
    classes[wide] = np.array([class_of(chr(point)) for point in distinct], np.uint8)[which]
    return classes
