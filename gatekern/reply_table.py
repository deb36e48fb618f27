"""How a reply that opens with a score is read, token by token, and how its tokens are spelled.

A reply is read until its score is settled: at two decimals, or at the first token that no longer belongs to the number.
What the characters mean is the grammar's business (`gatekern.ops.score_grammar`); here it becomes a table of states, so
that reading one more token is one look-up, and the states become a trie of tokens, so that all replies can be weighed
in one forward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gatekern.errors import LabelError
from gatekern.layout import IntArray
from gatekern.ops.parse_scores import parse_texts
from gatekern.ops.score_grammar import ParseStatus
from gatekern.planning import TokenTrie, build_trie
from gatekern.prompts import PromptEncoder
from gatekern.results import FloatArray

#: Texts of the states in which a reply goes on; white space before a number is no part of it.
OPEN = ("", ".", "0", "1", "0.", "1.", *(f"0.{digit}" for digit in range(10)), "1.0")
_SPELLED = OPEN[2:]  # those in which models spell scores
#: Scores that a reply can give: two decimals.
VALUES: FloatArray = np.arange(101, dtype=np.float32) / np.float32(100)
_FIRST_VALUE = len(OPEN)
INVALID = _FIRST_VALUE + len(VALUES)  # the state of a reply that did not open with a score


@dataclass(frozen=True)
class ReplyTable:
    """Reading and spelling of scores for one tokenizer and prompt.

    States are ``0 .. len(OPEN) - 1`` while a reply goes on, then one for each of `VALUES`, then `INVALID`.

    Attributes
    ----------
    next_state : uint8 [num_open_states, vocab_rows]
        State after a further token.
    trie : TokenTrie
        The tokens in which this tokenizer spells the open states after the prompt, from "0" on.
    classes : uint8 [1 + num_nodes, vocab_rows]
        At the prompt's end and at each node: what a further token leads to. Class 0 is no score.
    node_after : int64 [1 + num_nodes, num_classes]
        The node that a class leads to (as a row of `classes`), or -1.
    value_after : int64 [1 + num_nodes, num_classes]
        Index into `VALUES` of the score that a class settles, or -1.
    """

    next_state: NDArray[np.uint8]
    trie: TokenTrie
    classes: NDArray[np.uint8]
    node_after: IntArray
    value_after: IntArray

    @property
    def num_classes(self) -> int:
        return int(self.node_after.shape[1])


def is_open(states: IntArray) -> NDArray[np.bool_]:
    """Whether replies in these states go on."""
    return states < _FIRST_VALUE


def values_of(states: IntArray) -> FloatArray:
    """The score that each state stands for, NaN where there is none."""
    values = np.full(INVALID + 1, np.nan, dtype=np.float32)
    values[_FIRST_VALUE:INVALID] = VALUES
    return values[states]


def reply_table(encoder: PromptEncoder, vocab_rows: int) -> ReplyTable:
    """Build the table of a prompt.

    Parameters
    ----------
    encoder : PromptEncoder
        Of the rating prompt.
    vocab_rows : int
        Rows of the output head.

    Raises
    ------
    LabelError
        The tokenizer merges the first digit of a reply with the end of the prompt, or has no tokens that spell scores.
    """
    texts = encoder.token_texts(vocab_rows)
    next_state = np.stack([_after(text, texts) for text in OPEN])
    spelled = _spellings(encoder)
    trie = build_trie(list(spelled.values()))
    states: dict[tuple[int, ...], int] = {(): 0}
    for path in map(tuple, (path.tolist() for path in trie.paths()[1:])):
        above = states[path[:-1]]
        states[path] = int(next_state[above, path[-1]]) if above < _FIRST_VALUE else INVALID
    for text, path in spelled.items():
        if states[path] != OPEN.index(text):
            raise LabelError(
                f"this tokenizer cannot spell scores: the tokens of {text!r} read as "
                f"{[texts[token] for token in path]}; mode='logprob' needs no numbers"
            )
    return _with_classes(next_state, trie, np.array(list(states.values()), dtype=np.int64))


_NUMERIC = re.compile(r"\s*[0-9.,]*")
_SETTLED = re.compile(r"[01]\.[0-9][0-9]")
_DECIMAL = re.compile(r"[01]\.[0-9]")
_PAUSE = re.compile(r"\s*[.,:;\u2026]+")  # may stand inside a time or a version, but after a decimal it ends it


def _after(text: str, tokens: list[str | None]) -> NDArray[np.uint8]:
    """State after each token (None: a control token, which ends the reply) from the state with this text."""
    after = np.full(len(tokens), INVALID, dtype=np.uint8)
    replies = [text + (token or "") for token in tokens]
    complete = np.array([token is None for token in tokens])
    rest = np.array([token != "" for token in tokens])  # a row of the head without a token says nothing
    for at, token in enumerate(tokens):
        if token and _DECIMAL.fullmatch(text) and _PAUSE.fullmatch(token):
            replies[at], complete[at] = text, True
            continue
        if not token or not _NUMERIC.fullmatch(token):
            continue
        number = _normal(replies[at])
        if number in OPEN:
            after[at], rest[at] = OPEN.index(number), False
        elif settled := _SETTLED.match(number):
            replies[at], complete[at] = settled.group(), True
    for whole in (False, True):
        index = np.nonzero(rest & (complete == whole))[0]
        parsed = parse_texts([replies[at] for at in index], complete=whole)
        valid = parsed.status.numpy() == ParseStatus.OK
        hundredths = np.floor(parsed.values.numpy()[valid].astype(np.float64) * 100 + 1e-4).astype(np.int64)
        after[index[valid]] = _FIRST_VALUE + hundredths
    return after


def _normal(reply: str) -> str:
    """Spelling of a number that may go on: no white space before it, a point for a comma, a digit before the point."""
    number = reply.lstrip()
    if number[1:2] == ",":
        number = number[0] + "." + number[2:]
    return "0" + number if number.startswith(".") and number != "." else number


def _spellings(encoder: PromptEncoder) -> dict[str, tuple[int, ...]]:
    """Tokens in which each open state is spelled after the prompt."""
    prompt = encoder.encode_one("a", "a")
    spelled = {}
    for text in _SPELLED:
        joint = encoder.encode_one("a", "a", answer=encoder.answer_lead + text)
        if not np.array_equal(joint[: len(prompt)], prompt) or len(joint) == len(prompt):
            raise LabelError(
                f"the tokenizer merges the reply {text!r} with the end of the prompt; end the template's answer_prefix "
                "without a space, or with a line break"
            )
        spelled[text] = tuple(joint[len(prompt) :].tolist())
    return spelled


def _with_classes(next_state: NDArray[np.uint8], trie: TokenTrie, states: IntArray) -> ReplyTable:
    """Number what can follow each node: 0 for no score, then its children and the scores that are settled there."""
    classes = np.zeros((len(states), next_state.shape[1]), dtype=np.uint8)
    targets: list[list[tuple[int, int]]] = []  # node, value
    for node, state in enumerate(states.tolist()):
        after = next_state[state]
        found = [(-1, -1)]
        for value in np.unique(after[(after >= _FIRST_VALUE) & (after < INVALID)]).tolist():
            classes[node, after == value] = len(found)
            found.append((-1, value - _FIRST_VALUE))
        # Another spelling of an open state has another continuation than the node's: it is not weighed.
        for child in np.nonzero(trie.parent == node - 1)[0].tolist():
            classes[node, trie.tokens[child]] = len(found)
            found.append((child + 1, -1))
        targets.append(found)
    width = max(map(len, targets))
    padded = np.array([found + [(-1, -1)] * (width - len(found)) for found in targets], dtype=np.int64)
    return ReplyTable(next_state, trie, classes, padded[..., 0], padded[..., 1])
