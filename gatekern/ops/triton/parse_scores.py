# ruff: noqa: N803
# mypy: ignore-errors
"""One kernel: every lane owns a row and steps the automaton over its characters, one look-up each.

A lane walks its own tokens, so the lanes of a block take as many steps as its longest row has characters. The tables
are a megabyte, of which replies touch a few kilobytes, and stay in the caches.

Kernel parameters in capitals are constexpr, as everywhere in Triton; mypy cannot read its language.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gatekern.ops import score_characters as characters
from gatekern.ops import score_grammar as grammar
from gatekern.ops.score_grammar import ParseStatus
from gatekern.ops.triton.configs import ENABLE_FP_FUSION, PARSE_SCORES

CLASSES = tl.constexpr(characters.CLASSES)
CUT = tl.constexpr(characters.CUT)
DONE = tl.constexpr(grammar.DONE)
STATE_SHIFT = tl.constexpr(grammar.STATE_SHIFT)
STRENGTH = tl.constexpr(grammar.STRENGTH)
READING = tl.constexpr(grammar.READING)
SAVE = tl.constexpr(grammar.SAVE)
CLEAR = tl.constexpr(grammar.CLEAR)
PUSH = tl.constexpr(grammar.PUSH)
PERCENT = tl.constexpr(grammar.PERCENT)
FORGET = tl.constexpr(grammar.FORGET)
LABELLED = tl.constexpr(grammar.LABELLED)
VALUE = tl.constexpr(grammar.VALUE)
COUNT = tl.constexpr(grammar.COUNT)
RATIO = tl.constexpr(grammar.RATIO)
PUSH_FRACTION = tl.constexpr(grammar.PUSH_FRACTION)
PUSH_EXPONENT = tl.constexpr(grammar.PUSH_EXPONENT)
MAX_DIGITS = tl.constexpr(grammar.MAX_DIGITS)
MAX_EXPONENT = tl.constexpr(grammar.MAX_EXPONENT)
MAX_PLACES = tl.constexpr(grammar.MAX_PLACES)
OK = tl.constexpr(int(ParseStatus.OK))
NO_NUMBER = tl.constexpr(int(ParseStatus.NO_NUMBER))
INCOMPLETE = tl.constexpr(int(ParseStatus.INCOMPLETE))
AMBIGUOUS = tl.constexpr(int(ParseStatus.AMBIGUOUS))
OUT_OF_RANGE = tl.constexpr(int(ParseStatus.OUT_OF_RANGE))
MALFORMED = tl.constexpr(int(ParseStatus.MALFORMED))


# What changes from call to call is not worth a compilation of its own.
@triton.jit(do_not_specialize=["rows", "columns"])
def parse_scores_kernel(
    tokens: tl.tensor,
    codes: tl.tensor,
    offsets: tl.tensor,
    table: tl.tensor,
    powers: tl.tensor,
    floats: tl.tensor,
    values: tl.tensor,
    statuses: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = tokens + row * row_stride
    column = tl.zeros((BLOCK_ROWS,), tl.int32)
    position = tl.zeros((BLOCK_ROWS,), tl.int32)  # the next character of the current token, and where the token ends
    end = tl.zeros((BLOCK_ROWS,), tl.int32)
    state = tl.where(row < rows, 0, DONE)

    zero = tl.zeros((BLOCK_ROWS,), tl.int64)
    mantissa, digits, zeros, decimals, exponent = zero, zero, zero, zero, zero
    first_mantissa, first_places, best_mantissa, best_places = zero, zero, zero, zero
    strength = tl.zeros((BLOCK_ROWS,), tl.int32)
    status = tl.full((BLOCK_ROWS,), NO_NUMBER, tl.int32)

    while tl.max(tl.where(state == DONE, 0, 1), axis=0) > 0:
        # A step reads a character, or moves on to the next token, or finds that there is none: the reply was cut.
        live = state != DONE
        reads = live & (position < end)
        moves = live & (position >= end)
        in_row = moves & (column < columns)
        known = tl.load(token + column, mask=in_row, other=-1).to(tl.int64)
        cut = moves & ((known < 0) | (known >= vocab))
        moves = moves & (known >= 0) & (known < vocab)
        code = tl.load(codes + position, mask=reads, other=CUT).to(tl.int32) % CLASSES
        position = tl.where(moves, tl.load(offsets + known, mask=moves, other=0), position + reads.to(tl.int32))
        end = tl.where(moves, tl.load(offsets + known + 1, mask=moves, other=0), end)
        column += moves.to(tl.int32)

        word = tl.load(table + state * CLASSES + code, mask=reads | cut, other=0)
        state = tl.where(reads | cut, word >> STATE_SHIFT, state)
        places = tl.where(mantissa != 0, decimals - zeros - exponent, 0)

        forget = (word & FORGET) != 0
        strength = tl.where(forget, 0, strength)
        status = tl.where(forget, NO_NUMBER, status)

        new_strength = word & STRENGTH
        reading = word & READING
        ratio = reading == RATIO
        fifths = (mantissa == 5) & (places == 0)
        tenths = (mantissa == 1) & (places <= 0) & (places >= -2)
        # x / 5 is 2 x / 10, whose mantissa may end in a new zero.
        doubled = first_mantissa * 2
        ends_in_zero = doubled % 10 == 0
        by_five = tl.where(ends_in_zero, doubled // 10, doubled)
        by_five_places = first_places + 1 - ends_in_zero.to(tl.int64)
        number = tl.where(ratio, tl.where(fifths, by_five, first_mantissa), mantissa)
        number_places = tl.where(ratio, tl.where(fifths, by_five_places, first_places - places), places)
        number_places = tl.where(number != 0, number_places, 0)
        limit = tl.load(powers + tl.minimum(tl.maximum(number_places, 0), MAX_DIGITS + 1))
        inside = (number_places >= 0) & (number <= limit)
        new_status = tl.where(inside, OK, OUT_OF_RANGE)
        malformed = (ratio & ~fifths & ~tenths) | ((reading == COUNT) & inside)
        new_status = tl.where(malformed, MALFORMED, new_status)
        new_status = tl.where((reading != VALUE) & (reading < COUNT), reading >> 2, new_status)

        commits = new_strength != 0
        noise = ((new_status == OUT_OF_RANGE) | (new_status == MALFORMED)) & (new_strength != LABELLED)
        seen = commits & noise & (strength == 0) & (status != OUT_OF_RANGE)
        final = (new_status == NO_NUMBER) | (new_status == INCOMPLETE)  # of the end of the reply
        wins = commits & ~noise & ((new_strength > strength) | final)
        equal = (number == best_mantissa) & (number_places == best_places)
        same = (new_status == status) & ((status != OK) | equal)
        differs = commits & ~noise & ~wins & (new_strength == strength) & ~same
        status = tl.where(differs, AMBIGUOUS, tl.where(seen | wins, new_status, status))
        strength = tl.where(wins, new_strength, strength)
        best_mantissa = tl.where(wins, number, best_mantissa)
        best_places = tl.where(wins, number_places, best_places)

        save = (word & SAVE) != 0
        first_mantissa = tl.where(save, mantissa, first_mantissa)
        first_places = tl.where(save, places, first_places)
        clear = (word & CLEAR) != 0
        mantissa = tl.where(clear, 0, mantissa)
        digits = tl.where(clear, 0, digits)
        zeros = tl.where(clear, 0, zeros)
        decimals = tl.where(clear, 0, decimals)
        exponent = tl.where(clear, 0, exponent)

        push = word & PUSH
        digit = code.to(tl.int64)
        larger = exponent * 10 + tl.where(push == PUSH_EXPONENT, digit, -digit)
        larger = tl.minimum(tl.maximum(larger, -MAX_EXPONENT), MAX_EXPONENT)
        exponent = tl.where(push >= PUSH_EXPONENT, larger, exponent)
        grows = (push != 0) & (push <= PUSH_FRACTION)
        more_zeros = tl.where((mantissa != 0) | (digit != 0), zeros + 1, 0)
        fits = digits + more_zeros <= MAX_DIGITS
        room = tl.where(fits, more_zeros, MAX_DIGITS + 1 - digits)
        stored = grows & (digit != 0) & (room > 0)
        power = tl.load(powers + tl.minimum(tl.maximum(room, 0), MAX_DIGITS + 1))
        mantissa = tl.where(stored, mantissa * power + tl.where(fits, digit, 1), mantissa)
        digits = tl.where(stored, digits + room, digits)
        zeros = tl.where(grows, more_zeros - tl.where(stored, room, 0), zeros)
        decimals += (push == PUSH_FRACTION).to(tl.int64) + 2 * ((word & PERCENT) != 0).to(tl.int64)

    scale = tl.load(floats + tl.minimum(tl.maximum(best_places, 0), MAX_PLACES))
    value = (best_mantissa.to(tl.float64) / scale).to(tl.float32)
    tl.store(values + row, tl.where(status == OK, value, float("nan")), mask=row < rows)
    tl.store(statuses + row, status.to(tl.uint8), mask=row < rows)


def parse_scores(
    tokens: Tensor, codes: Tensor, offsets: Tensor, table: Tensor, powers: Tensor, floats: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch on operands that `gatekern.ops.parse_scores` has checked."""
    rows, columns = tokens.shape
    tokens = tokens.contiguous()
    values = tokens.new_empty((rows,), dtype=torch.float32)
    status = tokens.new_empty((rows,), dtype=torch.uint8)
    if rows > 0:
        parse_scores_kernel[(triton.cdiv(rows, PARSE_SCORES.block_rows),)](
            tokens,
            codes,
            offsets,
            table,
            powers,
            floats,
            values,
            status,
            rows,
            columns,
            offsets.shape[0] - 1,
            tokens.stride(0),
            BLOCK_ROWS=PARSE_SCORES.block_rows,
            num_warps=PARSE_SCORES.num_warps,
            num_stages=PARSE_SCORES.num_stages,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
    return values, status
