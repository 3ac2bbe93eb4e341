"""What runs on the NPU in one call, from host buffers to tensors on the device. No JAX in here.

The functions run inside XLA, on any thread, where a JAX call could wait for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.dlpack import view
from interop.packs import Offsets, one_packing
from npu.kernels import run, run_backward
from npu.plan import Plan, make_plan
from npu.validation import offsets_problems

ShapeDtype = tuple[tuple[int, ...], str]
"""The shape of a result and the name of its dtype."""


@dataclass(frozen=True)
class Options:
    """The options of attention, resolved. `left` and `right` are the reach in keys, None for unlimited."""

    softmax_scale: float
    left: int | None
    right: int | None


@dataclass(frozen=True)
class Forward:
    """out, and lse if it is wanted, of `q, k, v, cu_seqlens_q, cu_seqlens_k[, sinks]`.

    Every operand but sinks may have a batch axis in front, offsets too; then every result has one.
    """

    options: Options
    with_lse: bool

    ranks = (3, 3, 3, 1, 1)
    """The ranks of the operands that may have a batch axis in front: the first ones."""

    def results(self, q: Any, k: Any, v: Any, *_: Any) -> tuple[ShapeDtype, ...]:  # noqa: ARG002
        *batch, Tq, N, _ = q.shape
        out = (*batch, Tq, N, v.shape[-1]), q.dtype.name
        return (out, ((*batch, N, Tq), "float32")) if self.with_lse else (out,)

    def run(self, buffers: Sequence[Any], npu: int) -> list[Tensor]:
        """The results, on the NPU, of host buffers."""
        q, k, v, cu_q, cu_k, *sinks = buffers
        packing, plan = _plan(self.options, q, k, v, cu_q, cu_k, lse=self.with_lse or bool(sinks), gradient=False)
        tensors = [packing.fold(x) for x in _upload((q, k, v), npu)]
        out, lse = run(
            plan, *tensors, sinks=_upload(sinks, npu)[0] if sinks else None, return_softmax_lse=self.with_lse
        )
        if lse is None:
            return [packing.unfold(out)]
        lse = packing.unfold_lse(lse)
        if packing.batch and sinks:  # inside the one packing a tail is a segment without keys, whose lse is the sink
            for row, (cu, _) in zip(lse, packing.cu_seqlens, strict=True):
                row[:, cu[-1] :] = -torch.inf
        return [packing.unfold(out), lse]


@dataclass(frozen=True)
class Backward:
    """dq, dk, dv[, dsinks] of `q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, dout[, dlse][, sinks]`.

    Every operand but sinks may have a batch axis in front; with sinks none has.
    """

    options: Options
    with_dlse: bool
    with_sinks: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return () if self.with_sinks else (3, 3, 3, 1, 1, 3, 2, 3, 2)

    def results(self, q: Any, k: Any, v: Any, *more: Any) -> tuple[ShapeDtype, ...]:
        found = [(tuple(x.shape), x.dtype.name) for x in (q, k, v)]
        return (*found, (tuple(more[-1].shape), "float32")) if self.with_sinks else tuple(found)

    def run(self, buffers: Sequence[Any], npu: int) -> list[Tensor]:
        """The results, on the NPU, of host buffers."""
        q, k, v, cu_q, cu_k, out, lse, dout, *more = buffers
        packing, plan = _plan(self.options, q, k, v, cu_q, cu_k, lse=True, gradient=True)
        arrays = [packing.fold(x) for x in _upload((q, k, v, out, dout), npu)]
        rows = [packing.fold_lse(x) for x in _upload((lse, *more[: self.with_dlse]), npu)]
        sinks = _upload(more[-1:], npu)[0] if self.with_sinks else None
        q, k, v, out, dout = arrays
        dq, dk, dv, dsinks = run_backward(
            plan, q, k, v, out, rows[0], dout, rows[1] if self.with_dlse else None, sinks=sinks
        )
        found = [packing.unfold(x) for x in (dq, dk, dv)]
        return found if dsinks is None else [*found, dsinks]


@dataclass(frozen=True)
class _Packing:
    """The offsets of a call, one pair per element of the batch. `batch` is 0 without a batch axis."""

    batch: int
    cu_seqlens: tuple[tuple[Offsets, Offsets], ...]
    Tq: int

    def fold(self, x: Tensor) -> Tensor:
        """`[G, T, heads, width]` as `[G T, heads, width]`: the same memory."""
        return x.flatten(0, 1) if self.batch else x

    def unfold(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, x.shape[0] // self.batch)) if self.batch else x

    def fold_lse(self, x: Tensor) -> Tensor:
        """`[G, N, Tq]` as `[N, G Tq]`."""
        return x.transpose(0, 1).flatten(1, 2) if self.batch else x

    def unfold_lse(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.batch, self.Tq)).transpose(0, 1).contiguous() if self.batch else x


def _plan(
    options: Options, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *, lse: bool, gradient: bool
) -> "tuple[_Packing, Plan]":
    """The packing and the plan of host buffers."""
    # The bytes of int32 hash faster than a tuple of ints.
    offsets = [np.asarray(cu).astype(np.int32, copy=False).tobytes() for cu in (cu_q, cu_k)]
    return _planned(options, lse, gradient, q.shape, k.shape, v.shape, q.dtype, *offsets)


@lru_cache(maxsize=512)  # a model of many layers checks and plans once per batch
def _planned(
    options: Options, with_lse: bool, gradient: bool, q_shape: tuple[int, ...], k_shape: tuple[int, ...],
    v_shape: tuple[int, ...], dtype: np.dtype[Any], cu_q: bytes, cu_k: bytes,
) -> tuple[_Packing, Plan]:  # fmt: skip
    """The packing, checked, and its plan. The offsets are `[B + 1]` each, or `[G, B + 1]` for a batch of G.

    Raises:
        ValueError: every broken rule, one line each.
    """
    batch, Tq, Tk = q_shape[0] if len(q_shape) == 4 else 0, q_shape[-3], k_shape[-3]
    calls = max(batch, 1)
    sides = [[tuple(row) for row in np.frombuffer(cu, np.int32).reshape(calls, -1).tolist()] for cu in (cu_q, cu_k)]
    cu_seqlens = tuple(zip(*sides, strict=True))
    problems = []
    for element, (q, k) in enumerate(cu_seqlens):
        found = offsets_problems("cu_seqlens_q", q, Tq) + offsets_problems("cu_seqlens_k", k, Tk)
        problems += [f"Element {element} of the batch: {line}" for line in found] if batch else found
    if problems:
        raise ValueError("\n".join(problems))
    plan = make_plan(
        *((calls * shape[-3], *shape[-2:]) for shape in (q_shape, k_shape, v_shape)), dtype.name,
        *(one_packing(cu_seqlens, Tq, Tk) if batch else cu_seqlens[0]),
        softmax_scale=options.softmax_scale, left=options.left, right=options.right,
        return_softmax_lse=with_lse, gradient=gradient,
    )  # fmt: skip
    return _Packing(batch, cu_seqlens, Tq), plan


def _upload(buffers: Sequence[Any], npu: int) -> list[Tensor]:
    """One host-to-device copy of each. No view leaves this function: its memory is XLA's, and immutable."""
    return [view(x).to(f"npu:{npu}") for x in buffers]
