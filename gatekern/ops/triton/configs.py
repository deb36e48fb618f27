"""Launch configurations: one per operator, element size and, where it matters, size of shared memory.

`tests/triton_aot` compiles every entry for every architecture and checks registers, spills and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

# Contraction of a * b + c to one rounding. Pinned, because Triton's default changes with its version and bits with it.
ENABLE_FP_FUSION = True

# Row tiles that share one pass over the vocabulary tiles, so that both operands are found in the L2 cache.
ROW_TILES_PER_BAND = 8

# Tile results that the second stage of vocab_lse reads at once.
PARTIALS_PER_STEP = 1024


@dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes of `prefix_attention` (rows packed with heads, slots of the path) and launch options."""

    block_rows: int
    block_slots: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Config:
    """Tile sizes (rows of hidden, rows of the weight, elements of the hidden width) and launch options."""

    block_rows: int
    block_vocab: int
    block_width: int
    num_warps: int
    num_stages: int


# Compute capabilities with at least 163 KiB of shared memory per thread block (data-centre parts); others have 99 KiB.
_LARGE_SHARED_MEMORY = {(8, 0), (9, 0), (10, 0), (10, 3)}

# Products of float32 operands run on the plain cores (no TF32), where a small tile keeps the operands in registers.
_LABEL_SCORES = {
    (2, 16): Config(block_rows=16, block_vocab=16, block_width=128, num_warps=4, num_stages=4),
    (2, 32): Config(block_rows=16, block_vocab=32, block_width=128, num_warps=4, num_stages=4),
    (2, 64): Config(block_rows=16, block_vocab=64, block_width=128, num_warps=4, num_stages=4),
    (2, 128): Config(block_rows=16, block_vocab=128, block_width=64, num_warps=4, num_stages=4),
    (4, 16): Config(block_rows=16, block_vocab=16, block_width=32, num_warps=4, num_stages=3),
    (4, 32): Config(block_rows=16, block_vocab=32, block_width=32, num_warps=4, num_stages=3),
    (4, 64): Config(block_rows=16, block_vocab=64, block_width=32, num_warps=4, num_stages=3),
    (4, 128): Config(block_rows=16, block_vocab=128, block_width=32, num_warps=4, num_stages=3),
}
_VOCAB_LSE = {
    (2, True): Config(block_rows=128, block_vocab=256, block_width=64, num_warps=8, num_stages=3),
    (2, False): Config(block_rows=128, block_vocab=128, block_width=64, num_warps=8, num_stages=3),
    (4, True): Config(block_rows=64, block_vocab=64, block_width=32, num_warps=4, num_stages=3),
    (4, False): Config(block_rows=64, block_vocab=64, block_width=32, num_warps=4, num_stages=3),
}

# element size, head dimension, size of shared memory
_PREFIX_ATTENTION = {
    (2, 64, True): AttentionConfig(block_rows=128, block_slots=64, num_warps=8, num_stages=3),
    (2, 64, False): AttentionConfig(block_rows=128, block_slots=64, num_warps=8, num_stages=2),
    (2, 128, True): AttentionConfig(block_rows=128, block_slots=64, num_warps=8, num_stages=3),
    (2, 128, False): AttentionConfig(block_rows=64, block_slots=64, num_warps=4, num_stages=2),
    (2, 256, True): AttentionConfig(block_rows=64, block_slots=64, num_warps=8, num_stages=2),
    (2, 256, False): AttentionConfig(block_rows=64, block_slots=32, num_warps=8, num_stages=2),
    (4, 64, True): AttentionConfig(block_rows=64, block_slots=16, num_warps=8, num_stages=2),
    (4, 64, False): AttentionConfig(block_rows=64, block_slots=16, num_warps=8, num_stages=2),
    (4, 128, True): AttentionConfig(block_rows=32, block_slots=16, num_warps=8, num_stages=2),
    (4, 128, False): AttentionConfig(block_rows=32, block_slots=16, num_warps=8, num_stages=2),
    (4, 256, True): AttentionConfig(block_rows=32, block_slots=16, num_warps=8, num_stages=2),
    (4, 256, False): AttentionConfig(block_rows=32, block_slots=16, num_warps=8, num_stages=2),
}

# Rows by elements of the head dimension: 64 of 16 bits are one cache line, whatever the head dimension.
MERGE_ATTENTION = Config(block_rows=32, block_vocab=1, block_width=64, num_warps=4, num_stages=1)

# One row per lane. Small blocks, because a block takes as long as its longest reply.
PARSE_SCORES = Config(block_rows=32, block_vocab=1, block_width=1, num_warps=1, num_stages=1)

MAX_LABELS = max(block_labels for _, block_labels in _LABEL_SCORES)


def label_scores_config(element_size: int, num_labels: int) -> Config:
    """Choose for `label_scores`: 16 rows per program whatever N, and all labels, padded to a power of two."""
    block_labels = max(16, 1 << (num_labels - 1).bit_length())
    return _LABEL_SCORES[element_size, block_labels]


def vocab_lse_config(element_size: int, capability: tuple[int, int]) -> Config:
    """Choose for `vocab_lse`: the wide tile where shared memory holds three stages of it."""
    return _VOCAB_LSE[element_size, capability in _LARGE_SHARED_MEMORY]


def prefix_attention_config(element_size: int, block_dim: int, capability: tuple[int, int]) -> AttentionConfig:
    """Choose for `prefix_attention`, by the larger head dimension padded to a power of two.

    One choice for every length and number of prompts, because a row's bits must not depend on either.
    """
    return _PREFIX_ATTENTION[element_size, max(64, block_dim), capability in _LARGE_SHARED_MEMORY]
