"""Tiles against the dense mask, and slots that do not depend on the rest of the batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekern.layout import SegmentLayout
from gatekern.planning import build_prefix_tree, build_trie, pack
from gatekern.tiles import Tiles, tiles_of
from tests.ops.test_prefix_attention import layouts, visibility, with_some_rows


def keys_of(tile: list[int], tiles: Tiles) -> dict[int, int]:
    """Slot to key, for the slots that a kernel visits."""
    _, _, prefix_at, prefix_len, own_at, slot_begin, slot_end = tile
    return {
        slot: int(tiles.keys[(prefix_at if slot < prefix_len else own_at) + slot])
        for slot in range(slot_begin, slot_end)
    }


def seen_through(layout: SegmentLayout, tiles: Tiles) -> np.ndarray:
    """How often each row meets each key that it may see, walking the tiles."""
    count = np.zeros((layout.num_rows, layout.num_keys), dtype=int)
    for tile in tiles.table.tolist():
        for key in keys_of(tile, tiles).values():
            rows = np.arange(*tile[:2])
            begin, end = layout.seen[key]
            visible = (begin <= rows) & (rows < end) & (layout.key_positions[key] >= tiles.first_visible[rows])
            count[rows, key] += visible
    return count


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(3, 60),
    rows=st.sampled_from([1, 3, 64]),
    block=st.sampled_from([1, 4, 16]),
    reach=st.sampled_from([(None, None), (3, None), (None, 4)]),
)
def test_every_row_meets_what_it_sees_once(seed, budget, rows, block, reach):
    window, chunk = reach
    for layout in with_some_rows(layouts(seed, 7, 24, budget)):
        tiles = tiles_of(layout, rows=rows, block=block, window=window, chunk=chunk)
        assert (seen_through(layout, tiles) == visibility(layout, window, chunk)).all()
        covered = np.concatenate([np.arange(*tile[:2]) for tile in tiles.table])
        assert sorted(covered) == list(range(layout.num_rows))
        for row_begin, row_end, _, _, _, slot_begin, _ in tiles.table.tolist():
            segment = np.searchsorted(layout.own_offsets, [row_begin, row_end - 1], side="right")
            assert segment[0] == segment[1], "a tile never spans two segments"
            assert row_end - row_begin <= rows
            assert slot_begin % block == 0


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), padding=st.integers(0, 200))
def test_padding_sees_only_itself_and_changes_nothing_else(seed, padding):
    for layout in layouts(seed, 5, 20, 30):
        padded = layout.padded(layout.num_rows + padding)
        before, after = visibility(layout), visibility(padded)
        assert (after[: layout.num_rows, : layout.num_keys] == before).all()
        assert after[: layout.num_rows, layout.num_keys :].sum() == 0
        assert (after[layout.num_rows :, : layout.num_keys] == 0).all()
        assert (after[layout.num_rows :, layout.num_keys :] == np.eye(padding)).all()
        tiles = tiles_of(padded, rows=5, block=4)
        assert (seen_through(padded, tiles) == after).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), trie=st.booleans())
def test_a_key_is_in_the_same_slot_in_every_batch(seed, trie):
    """Where the tree cuts a prompt depends on its mates; the order of its path does not."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 50, 40)
    mates = [np.concatenate([prompt[: rng.integers(0, 41)], rng.integers(0, 50, 9)]) for _ in range(6)]
    below = build_trie([(1, 2), (1, 3), (4,)] if trie else [])

    def path(prompts: list[np.ndarray]) -> list[tuple[int, int]]:
        """Token and position at each slot of the prompt's last row, and of the nodes below it."""
        (forward,) = pack(build_prefix_tree(prompts, trie=below, min_saved=1), 10_000)
        tiles = tiles_of(forward.layout, rows=1, block=1)
        row = {int(read): int(row) for read, row in zip(forward.reads, forward.read_rows, strict=True)}[len(below)]
        (tile,) = [one for one in tiles.table.tolist() if one[0] == row]
        keys = keys_of(tile, tiles)
        return [(int(forward.tokens[key]), int(forward.layout.key_positions[key])) for key in keys.values()]

    assert path([prompt]) == path([prompt, *mates])


def test_the_longest_come_first():
    prompts = [np.arange(30), np.concatenate([np.arange(20), np.arange(50, 90)])]
    (forward,) = pack(build_prefix_tree(prompts), 1000)
    table = tiles_of(forward.layout, rows=8, block=4).table
    lengths = table[:, 6] - table[:, 5]
    assert (np.diff(lengths) <= 0).all()
