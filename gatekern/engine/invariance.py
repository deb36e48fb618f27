"""Whether a prompt's result depends on its batch mates, tried on the loaded model and this machine.

Our own kernels add in a fixed order. The matrix products of a model are a library's, which may choose another order for
another number of rows, so invariance is tested and reported, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gatekern.layout import IntArray

_STRANGERS = 64


@dataclass(frozen=True)
class Invariance:
    """What the self-test found.

    Attributes
    ----------
    verified : bool
        Every comparison was equal to the last bit.
    detail : str
        How often it was compared, or the first case that differed and by how much.
    """

    verified: bool
    detail: str

    def __str__(self) -> str:
        return f"{'verified' if self.verified else 'unverified'}: {self.detail}"


def find_invariance(
    rows_of: Callable[[Sequence[IntArray], int | None], Tensor], vocab_rows: int, longest: int
) -> Invariance:
    """Compare one prompt's results alone and in company, bit by bit.

    Parameters
    ----------
    rows_of : callable
        From prompts and a budget of tokens (None: the usual one) to results [num_prompts, ...].
    vocab_rows : int
        Token ids are drawn below this.
    longest : int
        Prompts are no longer than this, tokens.
    """
    prompt, cases = _cases(vocab_rows, longest)
    alone = rows_of([prompt], None)[0]
    count = 0
    for name, prompts, at, budget in cases:
        found = rows_of(prompts, budget)[at]
        if not torch.equal(found, alone):
            difference = (found.double() - alone.double()).abs().max().item()
            return Invariance(False, f"a prompt {name} differs from the same prompt alone by up to {difference:.1e}")
        count += 1
    return Invariance(True, f"the same bits in {count} batches as alone")


def _cases(vocab_rows: int, longest: int) -> tuple[IntArray, Iterator[tuple[str, list[IntArray], int, int | None]]]:
    """A prompt, and batches that hold it: what they are, their prompts, its index, and the budget."""
    rng = np.random.default_rng(0)
    ids = min(vocab_rows, 1000)
    third = ids // 3

    def draw(low: int, high: int, length: int) -> IntArray:
        return rng.integers(low, max(high, low + 1), min(length, longest))

    prompt = draw(third, 2 * third, 29)

    def mates(low: int, high: int) -> list[IntArray]:
        """Half of them share the prompt's beginning. They are short: their number is what matters."""
        lengths = rng.integers(1, 5, _STRANGERS).tolist()
        strangers = [draw(low, high, length) for length in lengths[::2]]
        kin = [np.concatenate([prompt[:20], draw(low, high, length)]) for length in lengths[1::2]]
        return [one[:longest] for one in strangers + kin]

    def cases() -> Iterator[tuple[str, list[IntArray], int, int | None]]:
        # Streams are in the order of ids, so company of higher ids stands behind the prompt, of lower ones before it.
        yield "first among strangers", [prompt, *mates(2 * third, ids)], 0, None
        yield "last among strangers", [prompt, *mates(0, third)], 0, None
        middle = [prompt, *mates(0, ids)]
        yield "among strangers", middle, 0, None
        order = rng.permutation(len(middle)).tolist()
        yield "in a shuffled batch", [middle[at] for at in order], order.index(0), None
        yield "in small forwards", middle, 0, 64
        yield "beside a ten times longer one", [prompt, draw(0, ids, 290), prompt[:10]], 0, None

    return prompt, cases()
