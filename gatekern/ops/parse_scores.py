"""A decimal between 0.0 and 1.0 read from a model's reply, with a status where there is none.

`score_grammar` says what counts. The operator runs its automaton over the characters of token ids, so a batch of
replies needs no detokenizer; a text is a row of one token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gatekern.errors import InputError
from gatekern.ops import dispatch, native
from gatekern.ops import score_grammar as grammar
from gatekern.ops.score_automaton import tables
from gatekern.ops.score_characters import CUT, STOP, classes_of
from gatekern.ops.score_grammar import ParseStatus

# Characters that are held as class codes at once; only a longer single text exceeds it.
_CHUNK = 1 << 22


class ParsedScores(NamedTuple):
    """What `parse_scores` and `parse_texts` return.

    Attributes
    ----------
    values : Tensor, float32 [N]
        In [0, 1]; NaN unless the status is `ParseStatus.OK`.
    status : Tensor, uint8 [N]
        A `ParseStatus` per row.
    """

    values: Tensor
    status: Tensor


class TokenTable(NamedTuple):
    """The characters of every token of a vocabulary, as `token_table` builds it.

    Attributes
    ----------
    codes : Tensor, uint8 [C]
        Character classes of `score_grammar`, token after token.
    offsets : Tensor, int32 [V + 1]
        Where each token's characters begin and end.
    """

    codes: Tensor
    offsets: Tensor

    def to(self, device: torch.device | str) -> TokenTable:
        """Copy the table to a device."""
        return TokenTable(self.codes.to(device), self.offsets.to(device))


def parse_scores(tokens: Tensor, table: TokenTable, *, percent: bool = False, backend: str = "auto") -> ParsedScores:
    """Read a score from each row of token ids.

    Parameters
    ----------
    tokens : Tensor, int64 | int32 [N, T]
        Replies. A row ends at its first stop token; an id of -1 is padding and ends it as cut, as do its T columns.
    table : TokenTable
        Of the tokenizer, on the device of `tokens`.
    percent : bool
        Read ``80%`` as 0.8; otherwise it is malformed.
    backend : str
        ``"auto"``, ``"triton"``, ``"native"`` or ``"torch"``.

    Returns
    -------
    ParsedScores
        ``values`` float32 [N] and ``status`` uint8 [N], on the device of `tokens`. `score_grammar` defines both. The
        value is the decimal rounded to float64, then to float32: the nearest float32 up to 12 decimals.

    Raises
    ------
    InputError
        If an operand does not fit or, on the CPU, an id is outside [-1, V). On other devices looking would stall the
        device: there such an id is padding.
    BackendError
        If an explicit `backend` cannot run here.

    Examples
    --------
    >>> table = token_table(["0", ".", "8", " maybe", "</s>"], stop_ids=[4])
    >>> values, status = parse_scores(torch.tensor([[0, 1, 2, 4], [3, 4, 4, 4], [0, 1, 2, 2]]), table)
    >>> values
    tensor([0.8000,    nan,    nan])
    >>> [ParseStatus(code).name for code in status.tolist()]
    ['OK', 'NO_NUMBER', 'INCOMPLETE']
    """
    return ParsedScores(*torch.ops.gatekern.parse_scores(tokens, *table, percent, backend))


def parse_texts(
    texts: Sequence[str], *, complete: bool = True, percent: bool = False, backend: str = "auto"
) -> ParsedScores:
    """Read a score from each text.

    Parameters
    ----------
    texts : sequence of str [N]
        Replies; lone surrogates are allowed.
    complete : bool
        Whether the replies ended by themselves. A cut reply is incomplete where its last number could go on.
    percent : bool
        Read ``80%`` as 0.8; otherwise it is malformed.
    backend : str
        ``"auto"``, ``"native"`` or ``"torch"``.

    Returns
    -------
    ParsedScores
        ``values`` float32 [N] and ``status`` uint8 [N], on the CPU.

    Raises
    ------
    InputError
        If `texts` is a single string, or one of its elements is none.
    BackendError
        If an explicit `backend` cannot run here.

    Examples
    --------
    >>> parse_texts(["0.8", "Score: 1.0 because 3 of 4 hold", "between 0.2 and 0.4"])
    ParsedScores(values=tensor([0.8000, 1.0000,    nan]), status=tensor([0, 0, 2], dtype=torch.uint8))
    """
    if isinstance(texts, (str, bytes)):
        raise InputError("texts is one string; give a list of strings")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {index} is {type(text).__name__}, not str", index=index)
    values = torch.empty(len(texts), dtype=torch.float32)
    status = torch.empty(len(texts), dtype=torch.uint8)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    for begin, end in _chunks(lengths):
        codes = classes_of("".join(texts[begin:end]))
        # Text i is token i; behind the texts stands one more token, the end.
        offsets = np.zeros(end - begin + 2, np.int64)
        np.cumsum(lengths[begin:end], out=offsets[1:-1])
        offsets[-1] = codes.size + 1
        table = TokenTable(
            torch.from_numpy(np.append(codes, np.uint8(STOP))), torch.from_numpy(offsets.astype(np.int32))
        )
        tokens = torch.arange(end - begin)[:, None]
        if complete:
            tokens = torch.cat([tokens, torch.full_like(tokens, end - begin)], dim=1)
        values[begin:end], status[begin:end] = parse_scores(tokens, table, percent=percent, backend=backend)
    return ParsedScores(values, status)


def token_table(texts: Sequence[str], stop_ids: Collection[int]) -> TokenTable:
    """Classify the characters of every token, once per tokenizer.

    Parameters
    ----------
    texts : sequence of str [V]
        Decoded text of each token id. Pieces of a character decode to U+FFFD, which is a word character.
    stop_ids : collection of int
        Ids that end a reply.

    Returns
    -------
    TokenTable
        On the CPU.

    Raises
    ------
    InputError
        If a text is no string, a stop id is outside [0, V), or the texts hold 2**31 characters or more.

    Examples
    --------
    >>> token_table(["1", "0."], stop_ids=[])
    TokenTable(codes=tensor([ 1,  0, 38], dtype=torch.uint8), offsets=tensor([0, 1, 3], dtype=torch.int32))
    """
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"the text of token {index} is {type(text).__name__}, not str", index=index)
    for stop in stop_ids:
        if not 0 <= stop < len(texts):
            raise InputError(f"stop id {stop} is outside the vocabulary [0, {len(texts)})")
        texts[stop] = ""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    stops = np.array(sorted(set(stop_ids)), np.int64)
    codes = np.insert(classes_of("".join(texts)), np.cumsum(lengths)[stops], STOP)
    lengths[stops] = 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] >= 2**31:
        raise InputError(f"the tokens hold {offsets[-1]} characters; offsets are int32")
    return TokenTable(torch.from_numpy(codes), torch.from_numpy(offsets.astype(np.int32)))


def _chunks(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of texts of about `_CHUNK` characters."""
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(lengths):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + _CHUNK, side="right")))
        yield begin, end
        begin = end


@functools.cache
def automaton(percent: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What the forms interpret: the automaton's table int32 [S, 64], and powers of ten, int64 [19] and float64 [65]."""
    powers = [10**places for places in range(grammar.MAX_DIGITS + 2)]
    floats = [float(10**places) for places in range(grammar.MAX_PLACES + 1)]
    return (
        torch.tensor(tables(percent), device=device),
        torch.tensor(powers, dtype=torch.int64, device=device),
        torch.tensor(floats, dtype=torch.float64, device=device),
    )


def parse_scores_reference(tokens: Tensor, codes: Tensor, offsets: Tensor, percent: bool = False) -> ParsedScores:
    """Compute `parse_scores` in plain PyTorch: all rows step over their characters together.

    Examples
    --------
    >>> parse_scores_reference(torch.tensor([[0, 1]]), *token_table([".5", ""], stop_ids=[1]))
    ParsedScores(values=tensor([0.5000]), status=tensor([0], dtype=torch.uint8))
    """
    table, powers, floats = automaton(percent, tokens.device)
    characters, begins, lengths = _characters(tokens, codes, offsets)
    # Longest first: the rows that still have characters are then a prefix, and short rows cost nothing more.
    order = lengths.argsort(descending=True, stable=True)
    begins, lengths = begins[order], lengths[order]
    state = torch.zeros_like(begins)
    registers = _Registers.initial(begins)
    remaining = (len(lengths) - lengths.bincount().cumsum(0)).tolist() if len(lengths) else []
    for step, active in enumerate([len(lengths), *remaining]):
        if active == 0:
            break
        last = step >= lengths[:active]
        position = (begins[:active] + step).clamp_(max=len(characters) - 1)
        code = characters[position].where(~last, CUT) if len(characters) else last * CUT
        word = table[state[:active], code]
        state[:active] = word >> grammar.STATE_SHIFT
        registers.first(active).act(word, code, powers)
    status = registers.status.to(torch.uint8)
    places = registers.best_places.clamp(0, grammar.MAX_PLACES)
    value = (registers.best_mantissa.double() / floats[places]).float().where(status == ParseStatus.OK, float("nan"))
    back = order.argsort()
    return ParsedScores(value[back], status[back])


def _characters(tokens: Tensor, codes: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out each row's characters: int64 [C], and where each row begins and how many it has, int64 [N]."""
    known = (tokens >= 0) & (tokens < offsets.shape[0] - 1)
    known = known.cumprod(1).bool()  # padding ends a row
    ids = tokens.where(known, 0).long().flatten()
    starts = offsets[ids].long() if offsets.shape[0] > 1 else torch.zeros_like(ids)
    sizes = (offsets[ids + 1].long() - starts if offsets.shape[0] > 1 else starts) * known.flatten()
    total = sizes.cumsum(0)
    size = int(total[-1]) if len(total) else 0
    shift = torch.repeat_interleave(starts - (total - sizes), sizes, output_size=size)
    lengths = sizes.view(tokens.shape).sum(1)
    return codes[torch.arange(size, device=tokens.device) + shift].long(), lengths.cumsum(0) - lengths, lengths


@dataclass
class _Registers:
    """What the automaton keeps for each row, int64 [N] each; `score_grammar` names them and the actions."""

    mantissa: Tensor
    digits: Tensor  # of the mantissa
    zeros: Tensor  # behind it, not yet part of it
    decimals: Tensor
    exponent: Tensor
    first_mantissa: Tensor
    first_places: Tensor
    strength: Tensor
    status: Tensor
    best_mantissa: Tensor
    best_places: Tensor

    @classmethod
    def initial(cls, like: Tensor) -> _Registers:
        registers = cls(*(torch.zeros_like(like) for _ in range(11)))
        registers.status += ParseStatus.NO_NUMBER
        return registers

    def first(self, rows: int) -> _Registers:
        """View the first rows; what is done to the view is done to all."""
        return _Registers(*(tensor[:rows] for tensor in vars(self).values()))

    def act(self, word: Tensor, code: Tensor, powers: Tensor) -> None:
        """Do what the bits of each row's action say, in their order."""
        for bits, action in (
            (grammar.FORGET, self._forget),
            (grammar.STRENGTH, self._commit),
            (grammar.SAVE, self._save),
            (grammar.CLEAR, self._clear),
            (grammar.PUSH, self._push),
            (grammar.PERCENT, self._percent),
        ):
            mask = (word & bits) != 0
            if bool(mask.any()):
                action(mask, word, code, powers)

    def _put(self, mask: Tensor, **values: Tensor | int) -> None:
        for name, value in values.items():
            register = getattr(self, name)
            register.copy_(torch.where(mask, value, register))

    def _forget(self, mask: Tensor, *_: Tensor) -> None:
        self._put(mask, strength=0, status=int(ParseStatus.NO_NUMBER))

    def _save(self, mask: Tensor, *_: Tensor) -> None:
        self._put(mask, first_mantissa=self.mantissa, first_places=self.places)

    def _clear(self, mask: Tensor, *_: Tensor) -> None:
        self._put(mask, mantissa=0, digits=0, zeros=0, decimals=0, exponent=0)

    def _percent(self, mask: Tensor, *_: Tensor) -> None:
        self._put(mask, decimals=self.decimals + 2)

    @property
    def places(self) -> Tensor:
        return (self.decimals - self.zeros - self.exponent) * (self.mantissa != 0)

    def _push(self, mask: Tensor, word: Tensor, code: Tensor, powers: Tensor) -> None:
        kind = word & grammar.PUSH
        exponent = kind > grammar.PUSH_FRACTION
        sign = torch.where(kind == grammar.PUSH_EXPONENT, 1, -1)
        larger = (self.exponent * 10 + sign * code).clamp(-grammar.MAX_EXPONENT, grammar.MAX_EXPONENT)
        self._put(mask & exponent, exponent=larger)

        mask = mask & ~exponent
        zeros = (self.zeros + 1) * ((self.mantissa != 0) | (code != 0))
        fits = self.digits + zeros <= grammar.MAX_DIGITS
        # A first digit needs no room for the zeros before it.
        room = torch.where(fits, zeros, grammar.MAX_DIGITS + 1 - self.digits)
        stored = mask & (code != 0) & (room > 0)
        mantissa = self.mantissa * powers[room.clamp(0, len(powers) - 1)] + code.where(fits, 1)
        self._put(mask, zeros=zeros, decimals=self.decimals + (kind == grammar.PUSH_FRACTION))
        self._put(stored, mantissa=mantissa, digits=self.digits + room, zeros=self.zeros - room)

    def _commit(self, mask: Tensor, word: Tensor, code: Tensor, powers: Tensor) -> None:
        strength, reading = word & grammar.STRENGTH, word & grammar.READING
        mantissa, places = self.mantissa, self.places
        ratio = reading == grammar.RATIO
        fifths = (mantissa == 5) & (places == 0)
        tenths = (mantissa == 1) & (places <= 0) & (places >= -2)
        # x / 5 = 2 x / 10, and an even number of fifths may end in a new zero.
        doubled = self.first_mantissa * 2
        ends_in_zero = doubled % 10 == 0
        over_five = torch.where(ends_in_zero, doubled // 10, doubled), self.first_places + 1 - ends_in_zero.long()
        mantissa = mantissa.where(~ratio, self.first_mantissa.where(~fifths, over_five[0]))
        places = places.where(~ratio, (self.first_places - places).where(~fifths, over_five[1])) * (mantissa != 0)

        inside = (places >= 0) & (mantissa <= powers[places.clamp(0, len(powers) - 1)])
        status = torch.where(inside, int(ParseStatus.OK), int(ParseStatus.OUT_OF_RANGE))
        malformed = (ratio & ~fifths & ~tenths) | ((reading == grammar.COUNT) & inside)
        status = status.where(~malformed, int(ParseStatus.MALFORMED))
        given = (reading != grammar.VALUE) & (reading < grammar.COUNT)
        status = torch.where(given, reading >> 2, status)

        noise = (status == ParseStatus.OUT_OF_RANGE) | (status == ParseStatus.MALFORMED)
        noise &= strength != grammar.LABELLED
        # Where nothing better was seen, say what was: out of range rather than malformed.
        seen = noise & (self.strength == 0) & (self.status != ParseStatus.OUT_OF_RANGE)
        final = (status == ParseStatus.NO_NUMBER) | (status == ParseStatus.INCOMPLETE)  # of the end of the reply
        wins = ~noise & ((strength > self.strength) | final)
        equal = (mantissa == self.best_mantissa) & (places == self.best_places)
        same = (status == self.status) & ((status != ParseStatus.OK) | equal)
        differs = ~noise & ~wins & (strength == self.strength) & ~same
        self._put(mask & (seen | wins), status=status)
        self._put(mask & differs, status=int(ParseStatus.AMBIGUOUS))
        self._put(mask & wins, strength=strength, best_mantissa=mantissa, best_places=places)


def _parse_scores_triton(tokens: Tensor, codes: Tensor, offsets: Tensor, percent: bool) -> tuple[Tensor, Tensor]:
    from gatekern.ops.triton.parse_scores import parse_scores as launch

    return launch(tokens, codes, offsets, *automaton(percent, tokens.device))


def _parse_scores_native(tokens: Tensor, codes: Tensor, offsets: Tensor, percent: bool) -> tuple[Tensor, Tensor]:
    return native.parse_scores(tokens, codes, offsets, *automaton(percent, tokens.device))


_FORMS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _parse_scores_triton,
    "native": _parse_scores_native,
    "torch": parse_scores_reference,
}


def _check(tokens: Tensor, codes: Tensor, offsets: Tensor) -> None:
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(f"tokens must be int64 or int32 [N, T]; got {tokens.dtype} {tuple(tokens.shape)}")
    if codes.ndim != 1 or codes.dtype != torch.uint8:
        raise InputError(f"codes must be uint8 [C]; got {codes.dtype} {tuple(codes.shape)}")
    if offsets.ndim != 1 or offsets.dtype != torch.int32 or offsets.shape[0] < 1:
        raise InputError(f"offsets must be int32 [V + 1]; got {offsets.dtype} {tuple(offsets.shape)}")
    for name, tensor in (("codes", codes), ("offsets", offsets)):
        if tensor.device != tokens.device:
            raise InputError(f"{name} is on {tensor.device} and tokens on {tokens.device}")


def _check_ids(tokens: Tensor, vocab: int) -> None:
    if tokens.device.type != "cpu" or tokens.numel() == 0:
        return
    smallest, largest = (int(end) for end in torch.aminmax(tokens))
    if smallest < -1 or largest >= vocab:
        row, column = ((tokens < -1) | (tokens >= vocab)).nonzero()[0].tolist()
        found = f"row {row}, column {column}: token id {int(tokens[row, column])}"
        raise InputError(f"{found} is outside the vocabulary [0, {vocab}), and only -1 is padding", index=row)


dispatch.LIBRARY.define(  # type: ignore[no-untyped-call]
    "parse_scores(Tensor tokens, Tensor codes, Tensor offsets, bool percent=False, "
    'str backend="auto") -> (Tensor, Tensor)'
)


@torch.library.impl(dispatch.LIBRARY, "parse_scores", "CompositeExplicitAutograd")
def _parse_scores(
    tokens: Tensor, codes: Tensor, offsets: Tensor, percent: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    _check(tokens, codes, offsets)
    _check_ids(tokens, offsets.shape[0] - 1)
    operands = (tokens, codes.contiguous(), offsets.contiguous(), percent)
    return dispatch.run("parse_scores", backend, tokens.device, _FORMS, *operands)


# Integers in, so there is nothing to differentiate.
dispatch.LIBRARY.impl("parse_scores", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("gatekern::parse_scores")  # type: ignore[untyped-decorator]
def _parse_scores_fake(
    tokens: Tensor, codes: Tensor, offsets: Tensor, percent: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    _check(tokens, codes, offsets)
    rows = tokens.shape[0]
    return tokens.new_empty((rows,), dtype=torch.float32), tokens.new_empty((rows,), dtype=torch.uint8)
