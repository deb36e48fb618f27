"""The packed stream against a brute-force reading of who must see what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekern.layout import SegmentLayout
from gatekern.planning import PrefixTree, build_prefix_tree, build_trie, pack

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


def as_arrays(prompts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(prompt) for prompt in prompts]


TRIES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=5).map(build_trie)


def calls(layout: SegmentLayout) -> np.ndarray:
    """How often each row reads each key, [num_rows, num_keys], when it is computed as the layout says."""
    sees = np.zeros((layout.num_rows, layout.num_keys), dtype=int)
    rows = np.arange(layout.num_rows)[:, None]
    allowed = (layout.seen[:, 0] <= rows) & (rows < layout.seen[:, 1])
    for (begin, end), key_ranges in layout.own():
        for k_begin, k_end in key_ranges:
            sees[begin:end, k_begin:k_end] += allowed[begin:end, k_begin:k_end]
    for (begin, end), key_ranges in layout.shared():
        for k_begin, k_end in key_ranges:
            sees[begin:end, k_begin:k_end] += 1
    assert np.array_equal(sees, allowed), "own and shared calls are not the pattern, each key once"
    return sees


def read(layout: SegmentLayout, row: int, keys: list[int]) -> list[int]:
    """The tokens that a row sees, in order of position."""
    visible = np.nonzero(calls(layout)[row])[0]
    visible = visible[np.argsort(layout.key_positions[visible], kind="stable")]
    assert layout.key_positions[visible].tolist() == list(range(len(visible)))
    return [keys[at] for at in visible]


@settings(max_examples=500, deadline=None)
@given(prompts=PROMPTS, trie=TRIES, budget=st.integers(1, 40), min_saved=st.integers(0, 9))
def test_every_prompt_sees_exactly_itself(prompts, trie, budget, min_saved):
    """For each prompt's last token and each node below it, the visible keys are that text, and nothing else."""
    budget = max(budget, len(trie))
    tree = build_prefix_tree(as_arrays(prompts), trie=trie, max_segment=budget, min_saved=min_saved)
    paths = [path.tolist() for path in trie.paths()]
    stored: dict[int, list[int]] = {}
    found = []
    for forward in pack(tree, budget):
        num_rows, layout = len(forward.tokens), forward.layout
        assert 0 < num_rows <= budget
        keys = [token for segment in forward.borrowed for token in stored[segment]] + forward.tokens.tolist()
        assert len(keys) == layout.num_keys
        for at, row in zip(forward.reads.tolist(), forward.read_rows, strict=True):
            prompt, node = divmod(at, 1 + len(trie))
            assert read(layout, row, keys) == prompts[prompt] + paths[node]
            found.append(at)
        stored = {segment: keys[begin:end] for segment, begin, end in forward.kept}
    assert sorted(found) == list(range(len(prompts) * len(paths)))


@settings(max_examples=300, deadline=None)
@given(prompts=PROMPTS, budget=st.integers(1, 40), seed=st.integers(0, 10_000))
def test_every_step_of_a_decode_sees_its_prompt_and_its_own_tokens(prompts, budget, seed):
    rng = np.random.default_rng(seed)
    tree = build_prefix_tree(as_arrays(prompts), max_segment=budget, min_saved=2)
    stored: dict[int, list[int]] = {}
    for forward in pack(tree, budget):
        keys = [token for segment in forward.borrowed for token in stored[segment]] + forward.tokens.tolist()
        stored = {segment: keys[begin:end] for segment, begin, end in forward.kept}
        layout = forward.layout
        texts = {int(row): prompts[at] for at, row in zip(forward.reads, forward.read_rows, strict=True)}
        for _ in range(3):
            choices = sorted(texts)
            parents = np.sort(rng.choice(choices, size=rng.integers(1, 6))) if choices else np.zeros(0, dtype=int)
            tokens = rng.integers(0, 3, len(parents)).tolist()
            layout = layout.extended(parents)
            keys = keys + tokens
            texts = {row: [*texts[parent], tokens[row]] for row, parent in enumerate(parents.tolist())}
            assert {row: read(layout, row, keys) for row in texts} == texts


def test_the_trie_is_the_tail_of_the_last_segment():
    """A trie costs its tokens, and no segment, hence no attention call, of its own."""
    prompts = as_arrays([[1] * 20 + [fact] * 5 for fact in (2, 3)])
    trie = build_trie([(7, 8), (7, 9), (6,)])
    tree = build_prefix_tree(prompts, trie=trie)
    assert np.diff(tree.offsets).tolist() == [20, 9, 9]
    assert tree.tokens[20:29].tolist() == [2] * 5 + [6, 7, 8, 9]
    assert tree.positions[25:29].tolist() == [25, 25, 26, 26]
    assert tree.row_ends[25:29].tolist() == [26, 29, 28, 29]
    assert tree.rows[0].tolist() == [24, 25, 26, 27, 28]


@settings(max_examples=200, deadline=None)
@given(prompts=PROMPTS, seed=st.integers(0, 1000))
def test_layout_does_not_depend_on_the_order_of_the_prompts(prompts, seed):
    order = np.random.default_rng(seed).permutation(len(prompts))
    tree = build_prefix_tree(as_arrays(prompts))
    shuffled = build_prefix_tree([np.array(prompts[at]) for at in order])
    assert np.array_equal(tree.tokens, shuffled.tokens)
    assert np.array_equal(tree.offsets, shuffled.offsets)
    assert np.array_equal(tree.rows[order], shuffled.rows)


def brute_force_tokens(prompts: list[list[int]]) -> int:
    return len({tuple(prompt[: at + 1]) for prompt in prompts for at in range(len(prompt))})


@settings(max_examples=200, deadline=None)
@given(prompts=PROMPTS)
def test_full_sharing_computes_each_distinct_prefix_once(prompts):
    assert len(build_prefix_tree(as_arrays(prompts), min_saved=1).tokens) == brute_force_tokens(prompts)


def test_small_savings_are_not_shared():
    prompts = as_arrays([[1, 2, 3], [1, 2, 4], [1, 2, 5]])
    assert len(build_prefix_tree(prompts, min_saved=4).tokens) == 5
    assert len(build_prefix_tree(prompts, min_saved=5).tokens) == 9


def test_header_contexts_and_facts_are_three_levels():
    header, contexts = [7] * 9, ([1] * 20, [2] * 20)
    prompts = as_arrays([header + context + [fact] for context in contexts for fact in (3, 4, 5)])
    tree = build_prefix_tree(prompts)
    assert tree.parent.tolist() == [-1, 0, 1, 1, 1, 0, 5, 5, 5]
    assert tree.subtree_end.tolist() == [9, 5, 3, 4, 5, 9, 7, 8, 9]
    assert [tree.ancestors(segment) for segment in (0, 1, 8)] == [[], [0], [0, 5]]


def test_equal_prompts_are_computed_once():
    tree = build_prefix_tree(as_arrays([[1, 2, 3], [4], [1, 2, 3]]))
    assert len(tree.tokens) == 4
    assert tree.rows[0].tolist() == tree.rows[2].tolist()


def test_a_prompt_that_is_a_prefix_of_another_reads_an_inner_row():
    tree = build_prefix_tree(as_arrays([[1, 2, 3, 4], [1, 2]]), min_saved=1)
    assert tree.tokens.tolist() == [1, 2, 3, 4]
    assert tree.rows.tolist() == [[3], [1]]


def test_only_the_path_to_the_next_segment_is_kept():
    """A context longer than the budget is cut into a chain; what a later forward borrows is its own path only."""
    context = list(range(100, 130))
    prompts = as_arrays([[*context, fact, fact, fact] for fact in range(8)])
    tree = build_prefix_tree(prompts, max_segment=10)
    forwards = list(pack(tree, 10))
    assert [len(forward.tokens) for forward in forwards] == [10, 10, 10, 9, 9, 6]
    assert forwards[-1].borrowed == (0, 1, 2)
    assert sum(end - begin for _, begin, end in forwards[-2].kept) == 30
    assert forwards[-1].kept == ()


def test_no_prompts_make_no_forwards():
    tree = build_prefix_tree([])
    assert isinstance(tree, PrefixTree)
    assert list(pack(tree, 10)) == []


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_ids_of_any_integer_type_sort_alike(dtype):
    prompts = [np.array(ids, dtype=dtype) for ids in ([300, 1], [5, 2], [300, 2])]
    assert build_prefix_tree(prompts, min_saved=1).tokens.tolist() == [5, 2, 300, 1, 2]


def test_a_nested_segment_takes_the_keys_above_it_into_its_own_call():
    """Five contexts below one header: no row needs more than one call over shared keys."""
    header = [7] * 9
    prompts = as_arrays([[*header, *[context] * 20, 90, fact] for context in range(5) for fact in range(10, 30)])
    (forward,) = pack(build_prefix_tree(prompts), 10_000)
    shared_calls = np.zeros(forward.layout.num_rows, dtype=int)
    for (begin, end), _ in forward.layout.shared():
        shared_calls[begin:end] += 1
    assert shared_calls.max() == 1
