"""From an id or a position for every row to offsets, and back.

Runs of equal ids are segments. Everything here is O(T) plus sorts of the runs, in numpy for host data and in jax for
traced data, by the same code: `xp` is the one or the other, and no step has a shape that depends on values. Host data
that break a rule raise; traced data give offsets of -1, which break a rule themselves and so make the attention NaN.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Int32

from jaxattn.offsets import Integers, Offsets, count_problem, num_segments_problems, read_integers, too_many_problems

Array = Any
"""numpy or jax."""


def row_ids(cu_seqlens: Offsets, T: int) -> Int32[np.ndarray | jax.Array, " {T}"]:
    """The segment of every row: 0 .. B-1, and -1 in the tail. numpy for numpy offsets.

    >>> row_ids(np.array([0, 3, 3, 5], np.int32), 7)
    array([ 0,  0,  0,  2,  2, -1, -1], dtype=int32)
    """
    xp: Any = np if isinstance(cu_seqlens, np.ndarray) else jnp
    # The number of offsets at or before a row, less one, is its segment, also where empty segments repeat an offset.
    ids = xp.searchsorted(cu_seqlens, xp.arange(T, dtype=np.int32), side="right").astype(np.int32) - 1
    ids = xp.where(ids < cu_seqlens.shape[0] - 1, ids, -1)
    return cast(np.ndarray | jax.Array, ids.astype(np.int32))


def row_positions(cu_seqlens: Offsets, T: int) -> Int32[np.ndarray | jax.Array, " {T}"]:
    """The place of every row in its segment, from 0, and -1 in the tail. numpy for numpy offsets.

    >>> row_positions(np.array([0, 3, 3, 5], np.int32), 7)
    array([ 0,  1,  2,  0,  1, -1, -1], dtype=int32)
    """
    xp: Any = np if isinstance(cu_seqlens, np.ndarray) else jnp
    ids = row_ids(cu_seqlens, T)
    positions = xp.where(ids < 0, -1, xp.arange(T, dtype=np.int32) - cu_seqlens[ids])
    return cast(np.ndarray | jax.Array, positions.astype(np.int32))


def offsets_of_ids(
    q: Integers, k: Integers | None, padding_id: int | None, num_segments: int | None
) -> tuple[Array, Array]:
    """The query and key offsets of ids given for every row; what `Segments.from_segment_ids` documents."""
    problems = num_segments_problems(num_segments)
    if padding_id is not None and (isinstance(padding_id, bool) or not isinstance(padding_id, int | np.integer)):
        problems.append(f"`padding_id`: {padding_id!r}. It must be an int or None. Pass the id that marks padding.")
    xp, sides = _read(q, k, num_segments, "ids", problems)
    most = num_segments if xp is jnp else None
    runs, broken = [], np.bool_(False)
    for ids in sides:
        is_padding = _equals(xp, ids, padding_id)
        starts, too_many, count = _starts(xp, ids[1:] != ids[:-1], is_padding, most)
        if ids.shape[0] == 0:
            ids, is_padding = xp.zeros(1, ids.dtype), xp.zeros(1, bool)
        row = xp.minimum(starts[:-1], ids.shape[0] - 1)
        runs.append(_Runs(ids[row], xp.diff(starts), is_padding[row], row))
        broken = broken | too_many
    cu_q, cu_k, count, came_back, out_of_order = _joined(xp, runs[0], runs[-1], most)
    if most is not None:
        broken = broken | jnp.any(came_back >= 0) | jnp.any(out_of_order >= 0) | (count > most)
        return jnp.where(broken, -1, cu_q), jnp.where(broken, -1, cu_k)
    problems = _order_problems(runs, came_back, out_of_order, one_side=k is None)
    if not problems:
        problems = too_many_problems(int(count), num_segments)
    if problems:
        raise ValueError("\n".join(problems))
    return _host(cu_q, num_segments), _host(cu_k, num_segments)


def offsets_of_positions(q: Integers, k: Integers | None, num_segments: int | None) -> tuple[Array, Array]:
    """The query and key offsets of positions given for every row; what `Segments.from_position_ids` documents."""
    problems = num_segments_problems(num_segments)
    xp, sides = _read(q, k, num_segments, "positions", problems)
    most = num_segments if xp is jnp else None
    offsets, counts, broken = [], [], np.bool_(False)
    for name, positions in zip(("q", "k"), sides, strict=False):
        outside = positions < 0
        cu, too_many, count = _starts(xp, positions[1:] - positions[:-1] != 1, outside, most)
        misplaced = outside & (xp.arange(positions.shape[0]) < cu[-1])
        if xp is np and misplaced.any():
            row = int(misplaced.argmax())
            problems.append(
                f"`{name}`: position {positions[row]} at row {row}. Positions count from 0; negative ones mark the "
                f"tail, after the last segment. Use Segments.from_segment_ids for padding elsewhere."
            )
        offsets.append(cu)
        counts.append(count)
        broken = broken | too_many | xp.any(misplaced)
    if most is not None:
        broken = broken | (counts[0] != counts[-1])
        return jnp.where(broken, -1, offsets[0]), jnp.where(broken, -1, offsets[-1])
    if not problems:
        if counts[0] != counts[-1]:
            problems.append(count_problem(int(counts[0]), int(counts[-1])))
        problems += too_many_problems(int(max(counts)), num_segments)
    if problems:
        raise ValueError("\n".join(problems))
    return _host(offsets[0], num_segments), _host(offsets[-1], num_segments)


class _Runs(NamedTuple):
    """The runs of equal ids of one side, `[R]` each. Traced ones are filled up with runs of length 0."""

    ids: Array
    lengths: Array
    padding: Array
    rows: Array
    """The first row of each."""


def _read(q: Any, k: Any, num_segments: int | None, what: str, problems: list[str]) -> tuple[Any, list[Array]]:
    """The module to compute with, and the sides in one dtype: int64 on the host, the widest jax has when traced.

    Raises what is wrong with them, after `problems`.
    """
    sides = []
    for name, values in (("q", q), ("k", k)):
        if values is not None or name == "q":
            array, found = read_integers(name, values, what)
            problems += found
            sides.append(array)
    traced = any(isinstance(side, Tracer) for side in sides)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.int64)) if traced else np.dtype(np.int64)
    if not problems:
        for name, side in zip(("q", "k"), sides, strict=False):
            if isinstance(side, Tracer) and not np.can_cast(side.dtype, dtype):
                problems.append(
                    f"`{name}`: traced {what} of dtype {side.dtype}. They are compared as {dtype}. Use .astype({dtype})."
                )
            elif not isinstance(side, Tracer) and _reaches_past(side, dtype):
                problems.append(
                    f"`{name}`: {what} past the range of {dtype}. They are compared as {dtype}. Renumber them."
                )
    if traced and num_segments is None:
        problems.append(
            f"`num_segments`: None with traced {what}. The number of segments is the shape of the offsets. Pass the "
            f"largest number expected; the rest become empty segments."
        )
    if problems:
        raise ValueError("\n".join(problems))
    xp = jnp if traced else np
    return xp, [xp.asarray(side).astype(dtype) for side in sides]


def _reaches_past(side: Any, dtype: Any) -> bool:
    return bool(side.size) and not np.iinfo(dtype).min <= int(side.min()) <= int(side.max()) <= np.iinfo(dtype).max


def _equals(xp: Any, ids: Array, padding_id: int | None) -> Array:
    """Where ids are padding; nowhere when the dtype of the ids cannot even hold `padding_id`."""
    info = np.iinfo(ids.dtype)
    if padding_id is None or not info.min <= padding_id <= info.max:
        return xp.zeros(ids.shape, bool)
    return ids == int(padding_id)


def _starts(xp: Any, changes: Array, outside: Array, most: int | None) -> tuple[Array, Array, Array]:
    """The first row of every run and the row after the last, whether there are more than `most`, and how many.

    `changes[i]` says that row i + 1 begins a run; rows `outside` at the end belong to none. On the host the result
    has as many entries as there are runs, else `most + 1`, the last one repeated.
    """
    T = outside.shape[0]
    if T == 0:
        return xp.zeros((most or 0) + 1, np.int32), np.bool_(False), np.int32(0)
    row = xp.arange(T, dtype=np.int32)
    end = xp.max(xp.where(outside, 0, row + 1), initial=0)
    begins = xp.concatenate([xp.ones(1, bool), changes]) & (row < end)
    number = xp.cumsum(begins, dtype=np.int32)
    count = number[-1]
    wanted = xp.arange(1, (int(count) if most is None else most) + 2)
    starts = xp.minimum(xp.searchsorted(number, wanted), end).astype(np.int32)
    return starts, np.bool_(False) if most is None else count > most, count


def _joined(xp: Any, q: _Runs, k: _Runs, most: int | None) -> tuple[Array, Array, Array, Array, Array]:
    """Offsets of both sides `[most + 1]` (`[count + 1]` for None), the count of segments, and the entries at fault.

    An entry is a run of q or, after those, of k. Runs with the same id make one segment; a run whose id the other
    side lacks, or of padding, makes one with nothing on the other side. At fault are entries whose id came before on
    their side, and entries of k whose id comes in another order than in q; -1 stands where there is no fault.
    """
    R = q.ids.shape[0]
    ids, lengths, padding = (xp.concatenate([getattr(q, name), getattr(k, name)]) for name in _Runs._fields[:3])
    if ids.shape[0] == 0:
        nothing = xp.zeros(1, np.int32)
        return nothing, nothing, np.int32(0), nothing - 1, nothing - 1
    is_k = xp.arange(ids.shape[0]) >= R

    # Equal ids meet in sorted order: two of one side are a fault, one of each a shared segment.
    unmatched = padding | (lengths == 0)
    order = xp.lexsort((is_k, ids, unmatched))
    equal = (ids[order][1:] == ids[order][:-1]) & ~unmatched[order][1:]
    twice = equal & (is_k[order][1:] == is_k[order][:-1])
    pair = equal & ~twice
    shared = (xp.pad(pair, (1, 0)) | xp.pad(pair, (0, 1)))[xp.argsort(order)]
    ordinal = xp.concatenate([xp.cumsum(shared[:R]), xp.cumsum(shared[R:])])
    crossed = pair & (ordinal[order][1:] != ordinal[order][:-1])
    came_back, out_of_order = (xp.where(fault, order[1:], -1) for fault in (twice, crossed))

    # Shared segments in their common order; between two of them the one-sided ones, by id where ids ascend. The
    # running maximum keeps the order of each side where they do not.
    place = xp.where(lengths == 0, 2 * ids.shape[0] + 2, 2 * ordinal - shared)
    ranks = xp.where(padding, np.iinfo(ids.dtype).min, ids)
    ranks = xp.concatenate([_running_maximum(xp, ranks[:R]), _running_maximum(xp, ranks[R:])])
    ranks = xp.where(shared, 0, ranks)  # the two of a pair have their place to themselves, q first
    order = xp.lexsort((is_k, ranks, place))
    number = xp.cumsum(((lengths > 0) & ~(shared & is_k))[order], dtype=np.int32)
    count = number[-1]
    first = xp.searchsorted(number, xp.arange(1, (int(count) if most is None else most) + 2))
    cu_q, cu_k = (
        xp.pad(xp.cumsum(xp.where(side, lengths, 0)[order], dtype=np.int32), (1, 0))[first] for side in (~is_k, is_k)
    )
    return cu_q, cu_k, count, came_back, out_of_order


def _running_maximum(xp: Any, values: Array) -> Array:
    return np.maximum.accumulate(values) if xp is np else jax.lax.cummax(values)


def _order_problems(runs: list[_Runs], came_back: Array, out_of_order: Array, *, one_side: bool) -> list[str]:
    q, k = runs[0], runs[-1]
    R = q.ids.shape[0]
    found = []
    for name, side, first in (("q", q, 0), ("k", k, R)):
        entries = came_back[(came_back >= first) & (came_back < first + side.ids.shape[0])] - first
        if entries.size and not (one_side and name == "k"):
            at = int(entries.min())
            found.append(
                f"`{name}`: id {side.ids[at]} comes back at row {side.rows[at]} after a change. The rows of a segment "
                f"lie together. Sort the rows by id, or give each run an id of its own."
            )
    if not found and (entries := out_of_order[out_of_order >= 0] - R).size:
        at = int(entries.min())
        found.append(
            f"`k`: id {k.ids[at]} at row {k.rows[at]} comes in another order than in `q`. Shared ids come in the same "
            f"order on both sides. Reorder the segments of one side."
        )
    return found


def _host(offsets: Any, num_segments: int | None) -> Any:
    missing = 0 if num_segments is None else num_segments + 1 - offsets.shape[0]
    return np.pad(offsets, (0, missing), mode="edge").astype(np.int32)
