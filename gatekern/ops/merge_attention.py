"""Merge attention over two disjoint sets of keys by the log-sum-exp of their scores.

Attention over a shared prefix and over what follows it are two calls; this makes one result of them, as in Hydragen
(arXiv 2402.05099) and flash-decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gatekern.errors import InputError
from gatekern.ops import dispatch
from gatekern.ops.head import DTYPES, accumulation_dtype


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    r"""Merge two attention results into that over the union of their keys.

    With :math:`m = \max(\ell_a, \ell_b)`,

    .. math::

        o = \frac{e^{\ell_a - m} o_a + e^{\ell_b - m} o_b}{e^{\ell_a - m} + e^{\ell_b - m}}, \qquad
        \ell = m + \log(e^{\ell_a - m} + e^{\ell_b - m}).

    Parameters
    ----------
    out_a : Tensor, float32 | bfloat16 | float16 [rows, heads, dim]
        Attention over one set of keys; any strides.
    lse_a : Tensor, float32 [rows, heads]
        Log-sum-exp of its scores, nats; ``-inf`` where a row sees none of the keys.
    out_b : Tensor, float32 | bfloat16 | float16 [rows, heads, dim]
        Attention over another set of keys, disjoint from the first.
    lse_b : Tensor, float32 [rows, heads]
        As `lse_a`.
    backend : str
        ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns
    -------
    out : Tensor [rows, heads, dim]
        In the dtype of `out_a`, contiguous; computed in float32. Not differentiable.
    lse : Tensor, float32 [rows, heads]
        Contiguous.

    Raises
    ------
    InputError
        If an operand does not fit.
    BackendError
        If an explicit `backend` cannot run here.

    Notes
    -----
    A side whose log-sum-exp is ``-inf`` contributes nothing, whatever its output holds. Where both are, the output is 0
    and the log-sum-exp ``-inf``. NaN and ``+inf`` give NaN, never a plausible number; FlashAttention reports ``+inf``
    for a row that sees no key.

    Examples
    --------
    One row over a key with score 0 and value 3, and over another with score 0 and value 1:

    >>> import torch
    >>> merge_attention(torch.full((1, 1, 1), 3.0), torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1))
    (tensor([[[2.]]]), tensor([[0.6931]]))
    """
    out, lse = torch.ops.gatekern.merge_attention(out_a, lse_a, out_b, lse_b, backend)
    return out, lse


def merge_attention_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `merge_attention` in plain PyTorch: in float64 for float64 log-sum-exps, else in float32.

    Examples
    --------
    >>> import torch
    >>> merge_attention_reference(torch.ones(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1))
    (tensor([[[0.5000]]]), tensor([[0.6931]]))
    """
    dtype = accumulation_dtype(lse_a.dtype)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    maximum = torch.maximum(lse_a, lse_b)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)  # only there: +inf has to become NaN
    total = torch.exp(lse_a - shift) + torch.exp(lse_b - shift)
    share_b = (torch.exp(lse_b - shift) / total).masked_fill(total == 0, 0.0)

    def seen(out: Tensor, lse: Tensor) -> Tensor:
        return torch.where((lse == -torch.inf)[..., None], 0.0, out.to(dtype))

    out = torch.lerp(seen(out_a, lse_a), seen(out_b, lse_b), share_b[..., None])
    # Contiguous whatever the strides of the operands, as the schema's fake promises.
    return out.to(out_a.dtype).contiguous(), (shift + torch.log(total)).contiguous()


def _merge_attention_triton(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    from gatekern.ops.triton.merge_attention import merge_attention as launch

    return launch(out_a, lse_a, out_b, lse_b)


_FORMS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _merge_attention_triton,
    "torch": merge_attention_reference,
}


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if out_a.ndim != 3 or out_b.shape != out_a.shape:
        shapes = f"got {tuple(out_a.shape)} and {tuple(out_b.shape)}"
        raise InputError(f"out_a and out_b must both be [rows, heads, dim]; {shapes}")
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        if out.dtype not in DTYPES:
            raise InputError(f"{name} must be float32, bfloat16 or float16; got {out.dtype}")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.dtype != torch.float32 or lse.shape != out_a.shape[:2]:
            found = f"got {lse.dtype} {tuple(lse.shape)}"
            raise InputError(f"{name} must be float32 [rows, heads] = {tuple(out_a.shape[:2])}; {found}")
    for name, tensor in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if tensor.device != out_a.device:
            raise InputError(f"{name} is on {tensor.device} and out_a on {out_a.device}")


dispatch.LIBRARY.define(  # type: ignore[no-untyped-call]
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, "
    'str backend="auto") -> (Tensor out, Tensor lse)'
)


@torch.library.impl(dispatch.LIBRARY, "merge_attention", "CompositeExplicitAutograd")
def _merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    _check(out_a, lse_a, out_b, lse_b)
    with dispatch.plain_arithmetic(out_a.device):
        return dispatch.run("merge_attention", backend, out_a.device, _FORMS, out_a, lse_a, out_b, lse_b)


# Not differentiable, and nothing is recorded.
dispatch.LIBRARY.impl("merge_attention", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("gatekern::merge_attention")  # type: ignore[untyped-decorator]
def _merge_attention_fake(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    _check(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
