"""Operators on raw tensors: one module each, with the schema, the checks and the reference.

`native` and `triton` hold the kernels, `dispatch` chooses among them.
"""

from gatekern.ops.dispatch import backends, resolved_name
from gatekern.ops.label_scores import LabelScores, label_scores
from gatekern.ops.prefix_attention import prefix_attention
from gatekern.ops.vocab_lse import vocab_lse

__all__ = [
    "LabelScores",
    "backends",
    "label_scores",
    "prefix_attention",
    "resolved_name",
    "vocab_lse",
]
