"""Segments: where each sequence of a packed batch begins and ends."""

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Int32

Offsets = Int32[np.ndarray | jax.Array, "B+1"]
Integers = Sequence[int] | np.ndarray | jax.Array

_INT32_MAX = 2**31 - 1


@jax.tree_util.register_pytree_with_keys_class
class Segments:
    """The offsets of the segments of a packed batch, for queries and for keys.

    Segment `b` owns query rows `cu_seqlens_q[b] : cu_seqlens_q[b + 1]` and key rows
    `cu_seqlens_k[b] : cu_seqlens_k[b + 1]`. Rows at or past the last offset are the tail: they belong to no segment.

    Built from host data (lists, numpy) the offsets stay numpy int32 arrays, which are concrete inside `jax.jit` too;
    built from traced arrays, or passed through a jit boundary, they are ordinary traced operands: a new packing of
    the same number of segments does not recompile.

    A pytree with two leaves. It has no hash and no `==`; `a.same_as(b)` compares values.

    >>> Segments.from_lengths([3, 0, 2])
    Segments(q=[3, 0, 2], k=q)
    >>> Segments.from_lengths([1, 2], [4, 2]).cu_seqlens_k
    array([0, 4, 6], dtype=int32)
    """

    __slots__ = ("cu_seqlens_k", "cu_seqlens_q")

    cu_seqlens_q: Offsets
    cu_seqlens_k: Offsets

    def __init__(self) -> None:
        raise TypeError("`Segments` is built by a named constructor. Use Segments.from_lengths or from_cu_seqlens.")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"`{name}`: Segments are immutable. Build new ones with Segments.from_cu_seqlens.")

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("`==` on Segments is ambiguous for arrays. Use a.same_as(b) to compare the offsets.")

    @classmethod
    def _of(cls, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Self:
        self = object.__new__(cls)
        object.__setattr__(self, "cu_seqlens_q", cu_seqlens_q)
        object.__setattr__(self, "cu_seqlens_k", cu_seqlens_k)
        return self

    @classmethod
    def from_lengths(cls, q: Integers, k: Integers | None = None, *, num_segments: int | None = None) -> Self:
        """Segments of the given lengths, in rows.

        Args:
            q: lengths of the query segments, integers `[B]`, each >= 0.
            k: lengths of the key segments, integers `[B]`; None means the same as `q`.
            num_segments: pad with empty segments up to this count, so that programs of one shape compile once.

        Raises:
            ValueError: lengths that are negative, not integers, not one-dimensional, of a different count on the two
                sides, more than `num_segments`, or that sum past the range of int32.

        >>> Segments.from_lengths([5, 3], num_segments=4).cu_seqlens_q
        array([0, 5, 8, 8, 8], dtype=int32)
        """
        return cls._build(q, k, num_segments, lengths=True)

    @classmethod
    def from_cu_seqlens(cls, q: Integers, k: Integers | None = None, *, num_segments: int | None = None) -> Self:
        """Segments from cumulative offsets, as flash-attn, torch, vLLM and sglang pass them.

        Args:
            q: offsets of the query segments, integers `[B + 1]`: start with 0, never decrease.
            k: offsets of the key segments, integers `[B + 1]`; None means the same as `q`.
            num_segments: pad with empty segments up to this count (the last offset repeated).

        Raises:
            ValueError: offsets that do not start with 0, decrease, are not integers or not one-dimensional, or differ
                in count on the two sides. Traced offsets cannot be looked at; where one breaks a rule, every row of
                the attention is NaN.

        >>> Segments.from_cu_seqlens([0, 5, 8])
        Segments(q=[5, 3], k=q)
        """
        return cls._build(q, k, num_segments, lengths=False)

    @classmethod
    def _build(cls, q: Integers, k: Integers | None, num_segments: int | None, *, lengths: bool) -> Self:
        if num_segments is not None and (isinstance(num_segments, bool) or not isinstance(num_segments, int)):
            raise ValueError(f"`num_segments`: {num_segments!r}. It must be an int or None. Pass a Python int.")
        sides = {"q": q} if k is None else {"q": q, "k": k}
        offsets: dict[str, Any] = {}
        problems: list[str] = []
        for name, side in sides.items():
            array, found = _as_offsets(name, side, lengths=lengths)
            problems += found
            offsets[name] = array
        if not problems:
            if len({a.shape for a in offsets.values()}) > 1:
                problems.append(_count_problem(offsets["q"].shape[0] - 1, offsets["k"].shape[0] - 1))
            if num_segments is not None and (most := max(a.shape[0] for a in offsets.values()) - 1) > num_segments:
                problems.append(
                    f"`num_segments`: {num_segments} is less than the {most} segments given. Padding only adds empty "
                    f"segments. Use num_segments={most} or more."
                )
        if problems:
            raise ValueError("\n".join(problems))
        if num_segments is not None:
            offsets = {n: _repeat_last(a, num_segments + 1 - a.shape[0]) for n, a in offsets.items()}
        return cls._of(offsets["q"], offsets.get("k", offsets["q"]))

    @property
    def num_segments(self) -> int:
        """The number of segments `B`, empty ones included."""
        return int(self.cu_seqlens_q.shape[-1]) - 1

    @property
    def is_concrete(self) -> bool:
        """True when the offsets can be read now: numpy or jax arrays, not tracers."""
        return not any(isinstance(a, Tracer) for a in (self.cu_seqlens_q, self.cu_seqlens_k))

    @property
    def q_lengths(self) -> Int32[np.ndarray | jax.Array, " B"]:
        """Rows of each query segment, int32 `[B]`."""
        return self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]

    @property
    def k_lengths(self) -> Int32[np.ndarray | jax.Array, " B"]:
        """Rows of each key segment, int32 `[B]`."""
        return self.cu_seqlens_k[1:] - self.cu_seqlens_k[:-1]

    def same_as(self, other: "Segments") -> bool:
        """True when both have equal offsets on both sides. Needs concrete offsets."""
        return np.array_equal(self.cu_seqlens_q, other.cu_seqlens_q) and np.array_equal(
            self.cu_seqlens_k, other.cu_seqlens_k
        )

    def check(self, Tq: int | None = None, Tk: int | None = None) -> None:
        """Raise if concrete offsets break a rule, or reach past `Tq` query rows or `Tk` key rows.

        The constructors check what they are given; this checks offsets that came another way (through a pytree) and
        their fit to arrays. Traced offsets are not looked at.

        Raises:
            ValueError: every broken rule, one line each.
        """
        if problems := self.problems(Tq, Tk):
            raise ValueError("\n".join(problems))

    def problems(self, Tq: int | None = None, Tk: int | None = None) -> list[str]:
        """The lines that `check` would raise, `[]` when all is well."""
        q, k = self.cu_seqlens_q, self.cu_seqlens_k
        found: list[str] = []
        for name, array, rows in (("cu_seqlens_q", q, Tq), ("cu_seqlens_k", k, Tk)):
            side, lines = _as_offsets(name, array, lengths=False)
            found += lines
            if not lines and rows is not None and not isinstance(side, Tracer) and side[-1] > rows:
                found.append(
                    f"`{name}`: the last offset is {side[-1]}, past the {rows} rows of `{name[-1]}`. Offsets count "
                    f"rows and end at or before the last one. Pass the offsets of this batch."
                )
        if not found and q.shape != k.shape:
            found.append(_count_problem(q.shape[0] - 1, k.shape[0] - 1))
        return found

    def __repr__(self) -> str:
        if not all(isinstance(a, np.ndarray | jax.Array) for a in (self.cu_seqlens_q, self.cu_seqlens_k)):
            return f"Segments(cu_seqlens_q={self.cu_seqlens_q!r}, cu_seqlens_k={self.cu_seqlens_k!r})"
        if not self.is_concrete or self.cu_seqlens_q.ndim != 1 or self.cu_seqlens_k.ndim != 1:
            return f"Segments(num_segments={self.num_segments}, traced or batched offsets)"
        q = _short(self.q_lengths)
        same = np.array_equal(self.cu_seqlens_q, self.cu_seqlens_k)
        return f"Segments(q={q}, k={'q' if same else _short(self.k_lengths)})"

    # Transforms put ints, None and tracers into the leaves, so rebuilding never validates.
    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        key = jax.tree_util.GetAttrKey
        return ((key("cu_seqlens_q"), self.cu_seqlens_q), (key("cu_seqlens_k"), self.cu_seqlens_k)), None

    @classmethod
    def tree_unflatten(cls, _aux: None, leaves: tuple[Any, Any]) -> Self:
        return cls._of(*leaves)


def _as_offsets(name: str, values: Any, *, lengths: bool) -> tuple[Any, list[str]]:
    """`values` as int32 offsets, and what is wrong with them."""
    what = "lengths" if lengths else "offsets"
    array = values if isinstance(values, jax.Array) else np.asarray(values)
    if array.ndim != 1:
        shape = tuple(array.shape)
        return array, [f"`{name}`: {what} of shape {shape}. They must have one dimension. Pass a flat list or array."]
    if array.shape[0] == 0 and not isinstance(values, np.ndarray | jax.Array):
        array = array.astype(np.int32)  # an empty list is float64 to numpy
    if not np.issubdtype(array.dtype, np.integer):
        return array, [f"`{name}`: {what} of dtype {array.dtype}. They must be integers. Use .astype(int32)."]
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


def _count_problem(q: int, k: int) -> str:
    return (
        f"`k`: {k} key segments for {q} query segments. Both sides need the same number. "
        f"Use length 0 for a side that has nothing."
    )


def _repeat_last(offsets: Any, times: int) -> Any:
    pad = jnp.pad if isinstance(offsets, Tracer) else np.pad
    return pad(offsets, (0, times), mode="edge")


def _short(lengths: Any) -> str:
    values = [int(n) for n in lengths[:9]]
    more = f", ... {len(lengths) - 8} more" if len(lengths) > 9 else ""
    return f"[{', '.join(map(str, values[: 8 if more else 9]))}{more}]"
