"""The offsets of both sides, int32 and checked, from lengths or offsets that a caller gave."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Int32

Offsets = Int32[np.ndarray | jax.Array, "B+1"]
Integers = Sequence[int] | np.ndarray | jax.Array

_INT32_MAX = 2**31 - 1


def offsets_of(
    q: Integers, k: Integers | None, num_segments: int | None, *, lengths: bool
) -> tuple[np.ndarray | jax.Array, np.ndarray | jax.Array]:
    """The query and key offsets, from lengths `[B]` or from offsets `[B + 1]`; `k=None` means those of q.

    Raises:
        ValueError: what is wrong with either side or with `num_segments`, one line each.
    """
    problems = num_segments_problems(num_segments)
    offsets: dict[str, Any] = {}
    for name, side in (("q", q), ("k", k)):
        if side is not None or name == "q":
            offsets[name], found = as_offsets(name, side, lengths=lengths)
            problems += found
    if not problems:
        if len({a.shape for a in offsets.values()}) > 1:
            problems.append(count_problem(offsets["q"].shape[0] - 1, offsets["k"].shape[0] - 1))
        problems += too_many_problems(max(a.shape[0] for a in offsets.values()) - 1, num_segments)
    if problems:
        raise ValueError("\n".join(problems))
    if num_segments is not None:
        offsets = {n: _repeat_last(a, num_segments + 1 - a.shape[0]) for n, a in offsets.items()}
    return offsets["q"], offsets.get("k", offsets["q"])


def as_offsets(name: str, values: Any, *, lengths: bool) -> tuple[Any, list[str]]:
    """`values` as int32 offsets, and what is wrong with them."""
    what = "lengths" if lengths else "offsets"
    array, problems = read_integers(name, values, what)
    if problems:
        return array, problems
    if not lengths and array.shape[0] == 0:
        return array, [f"`{name}`: no offsets. They must start with 0. Pass [0] for no segments."]
    if isinstance(array, Tracer):
        # The sum is taken in int32 whatever the dtype was: int8 running sums would wrap.
        array = array.astype(jnp.int32)
        if lengths:
            array = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(array, dtype=jnp.int32)])
        return array, []
    host = np.asarray(array).astype(object if array.dtype == np.uint64 else np.int64)
    if lengths:
        if (bad := np.flatnonzero(host < 0)).size:
            i = int(bad[0])
            return array, [f"`{name}`: length {host[i]} at segment {i}. Lengths count rows, from 0. Remove the sign."]
        if host.size and (most := host.max()) > _INT32_MAX:  # sums of such could wrap
            return array, [f"`{name}`: length {most}, past int32 ({_INT32_MAX}). Split the batch."]
        host = np.concatenate([[0], np.cumsum(host)])
    if host[0] != 0:
        return array, [f"`{name}`: the first offset is {host[0]}. Offsets start with 0. Prepend 0 to the running sums."]
    if (bad := np.flatnonzero(host[1:] < host[:-1])).size:
        i = int(bad[0])
        return array, [
            f"`{name}`: offset {host[i + 1]} follows {host[i]} at index {i + 1}. Offsets never decrease. "
            f"Pass running sums, or use Segments.from_lengths for lengths."
        ]
    if host[-1] > _INT32_MAX:
        return array, [f"`{name}`: {what} reach row {host[-1]}, past int32 ({_INT32_MAX}). Split the batch."]
    return host.astype(np.int32), []


def read_integers(name: str, values: Any, what: str) -> tuple[Any, list[str]]:
    """`values` as a one-dimensional integer array, and what is wrong with them. Concrete ones come back as numpy."""
    traced = isinstance(values, Tracer)
    array: Any = values if traced else np.asarray(values)
    if array.ndim != 1:
        shape = tuple(array.shape)
        return array, [f"`{name}`: {what} of shape {shape}. They must have one dimension. Pass a flat list or array."]
    if array.shape[0] == 0 and not isinstance(values, np.ndarray | jax.Array):
        array = array.astype(np.int32)  # an empty list is float64 to numpy
    if not np.issubdtype(array.dtype, np.integer):
        return array, [f"`{name}`: {what} of dtype {array.dtype}. They must be integers. Use .astype(int32)."]
    return array, []


def num_segments_problems(num_segments: Any) -> list[str]:
    """What is wrong with `num_segments`, which is an int or None."""
    is_int = isinstance(num_segments, int) and not isinstance(num_segments, bool)
    if num_segments is None or (is_int and num_segments >= 0):
        return []
    return [f"`num_segments`: {num_segments!r}. It must be an int >= 0 or None. Pass a Python int."]


def too_many_problems(count: int, num_segments: int | None) -> list[str]:
    """What is wrong when `count` segments were given."""
    if num_segments is None or count <= num_segments:
        return []
    return [
        f"`num_segments`: {num_segments} is less than the {count} segments given. Padding only adds empty segments. "
        f"Use num_segments={count} or more."
    ]


def count_problem(q: int, k: int) -> str:
    """The line about sides with different numbers of segments."""
    return (
        f"`k`: {k} key segments for {q} query segments. Both sides need the same number. "
        f"Use length 0 for a side that has nothing."
    )


def _repeat_last(offsets: Any, times: int) -> Any:
    pad = jnp.pad if isinstance(offsets, Tracer) else np.pad
    return pad(offsets, (0, times), mode="edge")
