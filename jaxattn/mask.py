"""Which keys each query sees: one interval `[lo, hi)` of packed key rows per packed query row.

Segments, causal masks, windows, tails and empty rows are all such intervals, so two int32 vectors say everything a
`[Tq, Tk]` mask says.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxattn.ids import row_ids
from jaxattn.offsets import Offsets
from jaxattn.segments import Segments
from jaxattn.validation import option_problems, resolve_options

MOST_DRAWN = 64
"""Rows and columns that `draw` still makes readable text of."""


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
    return jnp.asarray(row_ids(jnp.asarray(segments.cu_seqlens_q), Tq))


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


def draw(
    segments: Segments,
    Tq: int | None = None,
    Tk: int | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
) -> str:
    """The mask as text: a row per query, a column per key, `x` where the query sees the key.

    Lines part the segments, and the tail from the last of them.

    Args:
        segments: concrete offsets, at most 64 rows on each side.
        Tq, Tk: the rows of q and k, tails included; None means no tail.
        causal, window_size: as in `reference_attention`.

    Raises:
        ValueError: offsets that are traced or do not fit, too many rows for text, options that are not valid.

    >>> print(draw(Segments.from_lengths([1, 3], [3, 2]), Tk=6, causal=True))
    k  0 1 2 | 3 4 | 5
    q0 x x x | . . | .
    -- ----- | --- | -
    q1 . . . | . . | .
    q2 . . . | x . | .
    q3 . . . | x x | .
    """
    problems = option_problems(None, causal, window_size, None, False)
    if not segments.is_concrete:
        problems.append("`segments`: traced offsets. Only concrete ones can be drawn. Draw outside of jit and vmap.")
    else:
        problems += segments.problems(Tq, Tk)
    if problems:
        raise ValueError("\n".join(problems))
    Tq, Tk = (
        int(cu[-1]) if rows is None else rows for cu, rows in ((segments.cu_seqlens_q, Tq), (segments.cu_seqlens_k, Tk))
    )
    if max(Tq, Tk) > MOST_DRAWN:
        raise ValueError(
            f"`segments`: {Tq} query rows and {Tk} key rows. At most {MOST_DRAWN} of each make readable text. Draw a few "
            f"segments alone."
        )
    options = resolve_options(1, None, causal, window_size, None)
    with jax.ensure_compile_time_eval():  # always of one shape, which is compiled once
        mask = dense_mask(segments, MOST_DRAWN, MOST_DRAWN, left=options.left, right=options.right)[:Tq, :Tk].tolist()
    name, column = len(f"q{max(Tq - 1, 0)}"), len(str(max(Tk - 1, 0)))
    groups = [range(first, last) for first, last in pairwise(_cuts(segments.cu_seqlens_k, Tk))]

    def line(label: str, cells: list[str]) -> str:
        return f"{label:<{name}} " + " | ".join(" ".join(f"{cells[j]:>{column}}" for j in group) for group in groups)

    part = f"{'-' * name} " + " | ".join("-" * (len(group) * (column + 1) - 1) for group in groups)
    lines = [line("k", [str(j) for j in range(Tk)])]
    for i, row in enumerate(mask):
        lines += [part] if i and i in _cuts(segments.cu_seqlens_q, Tq) else []
        lines.append(line(f"q{i}", [".x"[seen] for seen in row]))
    return "\n".join(text.rstrip() for text in lines)


def _cuts(cu_seqlens: Offsets, T: int) -> list[int]:
    """Where a line is due: at every offset and at both ends, once each."""
    return sorted({0, T, *(int(c) for c in cu_seqlens)})
