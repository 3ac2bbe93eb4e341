"""Segments: where each sequence of a packed batch begins and ends."""

from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Int32

from jaxattn.ids import offsets_of_ids, offsets_of_positions, row_ids, row_positions
from jaxattn.offsets import Integers, Offsets, as_offsets, count_problem, offsets_of


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
        raise TypeError("`Segments` is built by a named constructor. Use Segments.from_lengths, for instance.")

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
    def _fixed(cls, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Self:
        """Segments of offsets that nobody else holds; from here on nobody can write them."""
        for offsets in (cu_seqlens_q, cu_seqlens_k):
            if isinstance(offsets, np.ndarray):
                offsets.setflags(write=False)
        return cls._of(cu_seqlens_q, cu_seqlens_k)

    def __reduce__(self) -> tuple[Any, tuple[Any, Any]]:
        return type(self)._of, (self.cu_seqlens_q, self.cu_seqlens_k)

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
        return cls._fixed(*offsets_of(q, k, num_segments, lengths=True))

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
        return cls._fixed(*offsets_of(q, k, num_segments, lengths=False))

    @classmethod
    def from_segment_ids(
        cls,
        q: Integers,
        k: Integers | None = None,
        *,
        padding_id: int | None = None,
        num_segments: int | None = None,
    ) -> Self:
        """Segments from an id for every row: each run of one id is a segment.

        Ids match by value between q and k; their order and size mean nothing. An id on one side only makes a segment
        with nothing on the other. Padding at the end is the tail. Padding elsewhere sees nothing and is seen by
        nobody: each run becomes a segment of queries without keys and one of keys without queries.

        Args:
            q: ids of the query rows, integers `[Tq]`.
            k: ids of the key rows, integers `[Tk]`; None means the same as `q`.
            padding_id: the id that marks padding, often 0 or -1; None means that no row is padding.
            num_segments: pad with empty segments up to this count. Traced ids require it: it is a shape.

        Raises:
            ValueError: an id that comes back after a change, shared ids that come in another order in k than in q,
                ids that are not integers or not one-dimensional, more than `num_segments` segments. Traced ids cannot
                be looked at; where they break a rule every offset is -1, and every row of the attention is NaN.

        >>> Segments.from_segment_ids([7, 7, 7, 2, 2, 0], padding_id=0)
        Segments(q=[3, 2], k=q)
        >>> Segments.from_segment_ids([0, 0, 1, 0, 2], padding_id=0)
        Segments(q=[2, 0, 1, 1, 0, 1], k=[0, 2, 1, 0, 1, 1])
        """
        return cls._fixed(*offsets_of_ids(q, k, padding_id, num_segments))

    @classmethod
    def from_position_ids(cls, q: Integers, k: Integers | None = None, *, num_segments: int | None = None) -> Self:
        """Segments from the position of every row, as Hugging Face passes packed batches.

        A segment begins where the value does not increase by one, whatever value it begins with. Segments of q and k
        are matched in order. Negative positions at the end are the tail.

        Args:
            q: positions of the query rows, integers `[Tq]`.
            k: positions of the key rows, integers `[Tk]`; None means the same as `q`.
            num_segments: pad with empty segments up to this count. Traced positions require it: it is a shape.

        Raises:
            ValueError: a negative position before the tail, different numbers of segments in q and k, positions that
                are not integers or not one-dimensional, more than `num_segments` segments. Traced positions cannot be
                looked at; where they break a rule every offset is -1, and every row of the attention is NaN.

        >>> Segments.from_position_ids([2, 3, 4, 2, 3])
        Segments(q=[3, 2], k=q)
        """
        return cls._fixed(*offsets_of_positions(q, k, num_segments))

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

    def q_ids(self, T: int) -> Int32[np.ndarray | jax.Array, " {T}"]:
        """The segment of each of `T` query rows, int32 `[T]`: 0 .. B-1, and -1 in the tail.

        numpy where the offsets are numpy. Concrete offsets past row `T` raise ValueError.

        >>> Segments.from_lengths([2, 0, 1]).q_ids(4)
        array([ 0,  0,  2, -1], dtype=int32)
        """
        self._check_rows(Tq=T)
        return row_ids(self.cu_seqlens_q, T)

    def k_ids(self, T: int) -> Int32[np.ndarray | jax.Array, " {T}"]:
        """The segment of each of `T` key rows, as `q_ids`."""
        self._check_rows(Tk=T)
        return row_ids(self.cu_seqlens_k, T)

    def q_positions(self, T: int) -> Int32[np.ndarray | jax.Array, " {T}"]:
        """The place of each of `T` query rows in its segment, int32 `[T]`, from 0, and -1 in the tail.

        numpy where the offsets are numpy. Concrete offsets past row `T` raise ValueError.

        >>> Segments.from_segment_ids([1, 1, 1, 2, 2]).q_positions(6)
        array([ 0,  1,  2,  0,  1, -1], dtype=int32)
        """
        self._check_rows(Tq=T)
        return row_positions(self.cu_seqlens_q, T)

    def k_positions(self, T: int) -> Int32[np.ndarray | jax.Array, " {T}"]:
        """The place of each of `T` key rows in its segment, as `q_positions`."""
        self._check_rows(Tk=T)
        return row_positions(self.cu_seqlens_k, T)

    def _check_rows(self, Tq: int | None = None, Tk: int | None = None) -> None:
        if self.is_concrete:
            self.check(Tq, Tk)

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
            side, lines = as_offsets(name, array, lengths=False)
            found += lines
            if not lines and rows is not None and not isinstance(side, Tracer) and side[-1] > rows:
                found.append(
                    f"`{name}`: the last offset is {side[-1]}, past the {rows} rows of `{name[-1]}`. Offsets count "
                    f"rows and end at or before the last one. Pass the offsets of this batch."
                )
        if not found and q.shape != k.shape:
            found.append(count_problem(q.shape[0] - 1, k.shape[0] - 1))
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


def _short(lengths: Any) -> str:
    values = [int(n) for n in lengths[:9]]
    more = f", ... {len(lengths) - 8} more" if len(lengths) > 9 else ""
    return f"[{', '.join(map(str, values[: 8 if more else 9]))}{more}]"
