"""Which keys each query sees: one interval `[lo, hi)` of packed key rows per packed query row.

Segments, causal masks, windows, tails and empty rows are all such intervals, so two int32 vectors say everything a
`[Tq, Tk]` mask says.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxattn.segments import Segments


def key_intervals(
    segments: Segments, Tq: int, Tk: int, *, left: int | None = None, right: int | None = None
) -> tuple[Int32[Array, " {Tq}"], Int32[Array, " {Tq}"]]:
    """The first visible key row and the one after the last, for every query row: `lo, hi`, int32 `[Tq]` each.

    `hi <= lo` never happens except as `lo == hi == 0`, the empty row. `left` and `right` are the reach in keys, both
    ends inclusive, None for unlimited.

    Inside a segment of Lq queries and Lk keys, query i sees key j when

        i + d - left <= j <= i + d + right,    d = Lk - Lq

    so that the last query lines up with the last key. In packed rows, with row = start_q + i and key = start_k + j,
    i + d = row - end_q + end_k - start_k: the start of the queries cancels and the ends line up.

    >>> lo, hi = key_intervals(Segments.from_lengths([2, 1], [3, 0]), 4, 3, right=0)
    >>> lo.tolist(), hi.tolist()
    ([0, 0, 0, 0], [2, 3, 0, 0])
    """
    cu_q, cu_k = jnp.asarray(segments.cu_seqlens_q), jnp.asarray(segments.cu_seqlens_k)
    row = jnp.arange(Tq, dtype=jnp.int32)
    segment = query_ids(segments, Tq)
    start_k, end_k = cu_k[segment], cu_k[segment + 1]  # -1, the tail, reads the last and the first: an empty interval
    partner = row - cu_q[segment + 1] + end_k  # the key row that lines up with this query
    lo, hi = start_k, end_k
    reach_max = Tq + Tk  # a longer reach changes nothing, and would overflow int32
    if left is not None:
        lo = jnp.maximum(lo, partner - min(left, reach_max))
    if right is not None:
        hi = jnp.minimum(hi, partner + min(right, reach_max) + 1)
    empty = (hi <= lo) | (segment < 0)
    return jnp.where(empty, 0, lo), jnp.where(empty, 0, hi)


def query_ids(segments: Segments, Tq: int) -> Int32[Array, " {Tq}"]:
    """The segment of every query row, int32 `[Tq]`: 0 .. B-1, and -1 in the tail.

    >>> query_ids(Segments.from_lengths([0, 2, 1]), 4).tolist()
    [1, 1, 2, -1]
    """
    cu_q = jnp.asarray(segments.cu_seqlens_q)
    # The number of offsets at or before a row, less one, is its segment, also where empty segments repeat an offset.
    ids = jnp.searchsorted(cu_q, jnp.arange(Tq, dtype=jnp.int32), side="right").astype(jnp.int32) - 1
    return jnp.where(ids < segments.num_segments, ids, -1)


def dense_mask(
    segments: Segments, Tq: int, Tk: int, *, left: int | None = None, right: int | None = None
) -> Bool[Array, "{Tq} {Tk}"]:
    """The mask as a matrix, bool `[Tq, Tk]`, True where query row i sees key row j. O(Tq * Tk) memory.

    >>> dense_mask(Segments.from_lengths([2, 1]), 3, 3, right=0).astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [0, 0, 1]], dtype=int32)
    """
    lo, hi = key_intervals(segments, Tq, Tk, left=left, right=right)
    key = jnp.arange(Tk, dtype=jnp.int32)
    return (lo[:, None] <= key) & (key < hi[:, None])
