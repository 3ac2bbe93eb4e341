"""What the inference operators take, and which of their kernels a packed call goes to.

Limits: operator documents and tiling sources of CANN 8.3 to 8.5, for the chips 910B and 910C.
"""

from enum import Enum

import torch
from torch import Tensor

from npu.simulator.operators.layouts import Rows
from npu.simulator.operators.refusals import BAD_ARGUMENT, BAD_TILING, Operator
from npu.simulator.operators.segments import Span
from npu.simulator.operators.visibility import (
    Visibility,
    band,
    own_mask,
    slip_of_triangle,
)

DTYPES = (torch.float16, torch.bfloat16)


class Route(Enum):
    """The kernels behind one operator. They differ in what they do with calls outside its contract."""

    TEMPLATE = "as many key/value heads as query heads"
    GROUPED = "fewer key/value heads, inner_precise 0, equal head widths up to 256"
    LEGACY = "fewer key/value heads otherwise"


def route(q: Tensor, k: Tensor, v: Tensor, inner_precise: int) -> Route:
    """Where a packed call goes."""
    if q.shape[1] == k.shape[1]:
        return Route.TEMPLATE
    return Route.GROUPED if inner_precise == 0 and q.shape[2] == v.shape[2] <= 256 else Route.LEGACY


def check_inputs(op: Operator, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Contiguous, and one of the two dtypes."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dtype not in DTYPES or t.dtype != query.dtype:
            op.refuse(
                BAD_ARGUMENT, f"{name} has dtype {t.dtype}. query, key and value are all float16 or all bfloat16."
            )
        if not t.is_contiguous():
            op.refuse(BAD_ARGUMENT, f"{name} with strides {tuple(t.stride())} is not contiguous.")


def check_heads(op: Operator, names: tuple[str, str], q: Rows, k: Rows, v: Rows, N: int, K: int) -> None:
    """Shapes agree with each other and with the numbers of heads."""
    shapes = [tuple(rows.x.shape) for rows in (q, k, v)]
    (_, Nq, D), (Tk, Kk, Dk), (Tv, Kv, _) = shapes
    if (Tk, Kk, k.batch) != (Tv, Kv, v.batch) or Dk != D:
        op.refuse(
            BAD_ARGUMENT,
            f"query, key and value have (rows, heads, width) {', '.join(map(str, shapes))}. Key and value share rows "
            f"and heads, query and key the width.",
        )
    if (Nq, Kk) != (N, K):
        op.refuse(BAD_ARGUMENT, f"{names[0]} is {N} for {Nq} heads, {names[1]} {K} for {Kk}. They must agree.")
    if K < 1 or N % K or N // K > 64 or N > 256:
        op.refuse(BAD_TILING, f"{N} query heads over {K} key/value heads. At most 256, a whole ratio of at most 64.")


def check_packed(op: Operator, q: Tensor, k: Tensor, v: Tensor, route: Route) -> None:
    """Head widths and row counts of layout TND."""
    D, Dv = q.shape[2], v.shape[2]
    if (D, Dv) not in ((64, 64), (128, 128), (192, 128)) and route is not Route.GROUPED:
        op.refuse(BAD_ARGUMENT, f"head widths {D} and {Dv}. Layout TND takes 64 and 64, 128 and 128, 192 and 128.")
    if max(q.shape[0], k.shape[0]) > 1_048_576:
        op.refuse(BAD_TILING, f"T is {q.shape[0]} for query and {k.shape[0]} for key. At most 1048576.")


def check_batched(op: Operator, q: Rows, k: Rows, v: Rows, layout: str) -> None:
    """Batch sizes and head widths of the other layouts."""
    if q.batch is None or k.batch is None or q.batch[0] != k.batch[0]:
        op.refuse(BAD_ARGUMENT, f"query and key have (B, S) {q.batch} and {k.batch}. They share B.")
    D, Dv = q.x.shape[2], v.x.shape[2]
    if Dv != D or D > 512 or D % 16:
        op.refuse(BAD_ARGUMENT, f"head widths {D} and {Dv}. Layout {layout} takes equal multiples of 16 up to 512.")


def check_precision(op: Operator, inner_precise: int) -> None:
    """Four values exist."""
    if inner_precise not in (0, 1, 2, 3):
        op.refuse(BAD_ARGUMENT, f"inner_precise is {inner_precise}. It is 0, 1, 2 or 3.")


def visibility(
    op: Operator, sparse_mode: int, mask: Tensor | None, pre: int, next_: int, batch: tuple[int, int, int, int] | None
) -> Visibility:
    """The meaning of the sparse mode. `batch` is `(B, N, Sq, Sk)`, None for packed calls.

    In mode 0 the reach counts from the first key of a segment, in the others from its end.
    """
    if sparse_mode not in (0, 3, 4):
        if batch is not None and sparse_mode in (1, 2):
            op.lacks(f"sparse_mode {sparse_mode}", "0, 3 and 4", "Use mode 0, with the full mask")
        op.refuse(BAD_TILING, f"sparse_mode {sparse_mode}. It is 0, 3 or 4 here.")
    if mask is not None and not mask.is_contiguous():
        op.refuse(BAD_ARGUMENT, f"atten_mask with strides {tuple(mask.stride())} is not contiguous.")
    if sparse_mode == 0:
        if mask is not None and batch is None:
            op.refuse(BAD_TILING, "atten_mask is given with sparse_mode 0 in layout TND. It takes none there.")
        left, right = band(op, ("pre_tokens", "next_tokens"), pre, next_)
        own = None if mask is None or batch is None else own_mask(op, mask, *batch)
        return Visibility(left, right, from_start=True, own=own)
    slip = slip_of_triangle(op, mask, sparse_mode)
    if sparse_mode == 3:
        return Visibility(None, 0, slip=slip)
    left, right = band(op, ("pre_tokens", "next_tokens"), pre, next_)
    return Visibility(left, right, slip=slip)


def check_enough_keys(op: Operator, q_spans: tuple[Span, ...], k_spans: tuple[Span, ...]) -> None:
    """The legacy kernel refuses sparse mode 3 for segments with fewer keys than queries, in these words."""
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(q_spans, k_spans, strict=True)):
        if q1 - q0 > k1 - k0:
            op.refuse(
                BAD_TILING, f"When layout is TND and sparse = 3 ,Batch[{b}], need s1[{q1 - q0}] <= s2[{k1 - k0}]."
            )
