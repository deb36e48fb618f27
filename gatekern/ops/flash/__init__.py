"""Attention by FlashAttention's kernels for variable lengths: those of `flash-attn`, or those inside PyTorch.

`varlen` finds one, `plan` turns a layout into a few calls of it, `prefix_attention` makes them and merges the results.
"""

from gatekern.ops.flash.varlen import describe, why_not

__all__ = ["describe", "why_not"]
