"""Operators on raw tensors: one module each, with the schema, the checks and the reference.

`native` and `triton` hold the kernels, `dispatch` chooses among them.
"""

from gatekern.ops.class_lse import class_lse
from gatekern.ops.dispatch import backends, resolved_name
from gatekern.ops.draw_tokens import draw_tokens
from gatekern.ops.head import HeadSpec
from gatekern.ops.label_scores import LabelScores, label_scores
from gatekern.ops.merge_attention import merge_attention
from gatekern.ops.parse_scores import ParsedScores, TokenTable, parse_scores, parse_texts, token_table
from gatekern.ops.prefix_attention import prefix_attention
from gatekern.ops.score_grammar import ParseStatus
from gatekern.ops.score_rows import RowScores, score_rows
from gatekern.ops.vocab_lse import vocab_lse

__all__ = [
    "HeadSpec",
    "LabelScores",
    "ParseStatus",
    "ParsedScores",
    "RowScores",
    "TokenTable",
    "backends",
    "class_lse",
    "draw_tokens",
    "label_scores",
    "merge_attention",
    "parse_scores",
    "parse_texts",
    "prefix_attention",
    "resolved_name",
    "score_rows",
    "token_table",
    "vocab_lse",
]
