"""Packed attention for torch users, on tensors that lie on an NPU."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu.kernels import run, run_backward
from npu.offsets import HostOffsets, host_offsets
from npu.plan import Plan, make_plan
from npu.validation import Described, offsets_problems, option_problems, packed_problems, sinks_problems

Window = tuple[int | None, int | None]


def fused_infer_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    cu_seqlens_q_host: Sequence[int] | None = None,
    cu_seqlens_k_host: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    causal: bool = False,
    window_size: Window = (-1, -1),
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside each segment of a packed batch, by the fused inference kernel of the NPU.

    The first nine parameters are those of sglang's function of this name, with the same meaning and defaults. With
    `causal=True` the last query of a segment lines up with its last key. Two queries, five keys:

        k  0 1 2 3 4
        q0 x x x x .
        q1 x x x x x

    A query that sees no key gives 0, and its lse is -inf (with sinks: its sink). Rows past the last offset give 0 and
    -inf. A NaN or Inf stays inside its segment and head group; there any row may become non-finite.

    Args:
        q: queries `[Tq, N, D]` on an NPU, float16, bfloat16 or float32. float32, and heads wider than 192 and 128, run
            on the training kernel, which is documented for training products.
        k: keys `[Tk, K, D]` on the same NPU, same dtype; `N` is a multiple of `K`.
        v: values `[Tk, K, Dv]`, likewise.
        cu_seqlens_q, cu_seqlens_k: int32 offsets `[B + 1]`: start with 0, never decrease, end at or before T. On a
            device they are read once per tensor, which waits for the device.
        cu_seqlens_q_host, cu_seqlens_k_host: the same as host integers; then the tensors are not read, except inside
            `npu.checking()`.
        softmax_scale: the factor on `<q, k>`; None means `D ** -0.5`.
        return_softmax_lse: also return lse, the natural log of the softmax sum.
        causal: hide keys after the query.
        window_size: the reach `(left, right)` in keys, both ends inclusive; None or -1 is unlimited.
        sinks: one logit per query head, floating `[N]` on the same NPU, added to the softmax sum.

    Returns:
        out `[Tq, N, Dv]` in the dtype of q; with `return_softmax_lse=True` also lse float32 `[N, Tq]`. No gradients:
        that is `fusion_attention_varlen`.

    Raises:
        ValueError: everything that is wrong with the call, one line each.
        NotImplementedError: what the kernel lacks, by name, and what to use instead.
        RuntimeError: the device refused or failed.
    """
    plan = _planned(
        (q, k, v),
        (("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q_host), ("cu_seqlens_k", cu_seqlens_k, cu_seqlens_k_host)),
        _Options(softmax_scale, causal, window_size, return_softmax_lse),
        sinks,
        gradient=False,
    )
    out, lse = run(plan, q, k, v, sinks=sinks, return_softmax_lse=return_softmax_lse)
    return out if lse is None else (out, lse)


def fusion_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    cu_seqlens_q_host: Sequence[int] | None = None,
    cu_seqlens_k_host: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    causal: bool = False,
    window_size: Window = (-1, -1),
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same attention by the training kernel of the NPU, differentiable.

    Parameters, results and errors are those of `fused_infer_attention_varlen`. Gradients for q, k, v and sinks flow
    through out and through lse, also where a segment has more queries than keys; those of rows that see nothing are 0.
    The operator takes the gradient of lse in the dtype of q, so in float16 and bfloat16 it is rounded.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as there; heads of width 1 to 768, v at most 767.
    """
    plan = _planned(
        (q, k, v),
        (("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q_host), ("cu_seqlens_k", cu_seqlens_k, cu_seqlens_k_host)),
        _Options(softmax_scale, causal, window_size, return_softmax_lse),
        sinks,
        gradient=True,
    )
    out, lse = _Fusion.apply(plan, q, k, v, sinks)  # type: ignore[no-untyped-call]
    return (out, lse) if return_softmax_lse else out


class _Fusion(torch.autograd.Function):
    """The training kernel and its gradient. The operator's own autograd knows no lse, no sinks and no empty rows."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = run(plan, q, k, v, sinks=sinks, return_softmax_lse=True)
        assert lse is not None
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # a gradient that nobody asked for stays None, and costs nothing
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dsinks = run_backward(ctx.plan, q, k, v, out, lse, dout, dlse, sinks=sinks)
        return None, dq, dk, dv, None if dsinks is None else dsinks.to(sinks.dtype)


_Inputs = tuple[Described, Described, Described, Described | None]


class _Options(NamedTuple):
    softmax_scale: float | None
    causal: bool
    window_size: Window
    return_softmax_lse: bool


def _planned(
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[tuple[str, Tensor, Sequence[int] | None], ...],
    options: _Options,
    sinks: Tensor | None,
    *,
    gradient: bool,
) -> Plan:
    """The plan of a call. Checked and made once per packing; every later call is a lookup.

    Raises:
        ValueError: everything that is wrong with the call, one line each.
        NotImplementedError: what the kernels lack.
    """
    q, k, v = (_describe(x) for x in tensors)
    described = (q, k, v, None if sinks is None else _describe(sinks))
    read = tuple(host_offsets(*each) for each in offsets)
    # Options are looked at in every call: to the cache True and 1 are one key.
    if wrong := option_problems(*options):
        raise ValueError("\n".join(_problems(described, read, wrong)))
    return _plan(
        described, read, options._replace(window_size=(options.window_size[0], options.window_size[1])), gradient
    )


@lru_cache(maxsize=512)
def _plan(described: _Inputs, offsets: tuple[HostOffsets, ...], options: _Options, gradient: bool) -> Plan:
    if problems := _problems(described, offsets, []):
        raise ValueError("\n".join(problems))
    q, k, v, sinks = described
    shapes: Any = (q.shape, k.shape, v.shape)
    left, right = (None if reach == -1 else reach for reach in options.window_size)
    return make_plan(
        *shapes, q.dtype, *(read.values for read in offsets),
        softmax_scale=options.softmax_scale, left=left, right=0 if options.causal else right,
        return_softmax_lse=options.return_softmax_lse or sinks is not None, gradient=gradient,
    )  # fmt: skip


def _problems(described: _Inputs, offsets: tuple[HostOffsets, ...], option_lines: list[str]) -> list[str]:
    """What is wrong with a call, one line each, in a fixed order."""
    q, k, v, sinks = described
    problems = packed_problems(q, k, v) + option_lines
    if len(q.shape) == 3:
        problems += sinks_problems(sinks, q)
    counts = []
    for name, read, tensor in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, (q, k), strict=True):
        values = read.values
        counts.append(len(values) - 1)
        if read.problem:
            problems.append(read.problem)
        elif len(tensor.shape) == 3:
            problems += offsets_problems(name, values, tensor.shape[0])
    if not problems and counts[0] != counts[1]:
        problems.append(
            f"`cu_seqlens_k`: {counts[1]} key segments for {counts[0]} query segments. Both sides need the same number. "
            f"Repeat an offset for a segment that has nothing."
        )
    return problems


def _describe(x: Any) -> Described:
    if not isinstance(x, Tensor):
        return Described((), type(x).__name__, "no device")
    return Described(tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device))
