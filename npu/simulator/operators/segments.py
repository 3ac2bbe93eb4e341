"""Running sums of lengths, and the groups of equal segments that are computed at once."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from npu.simulator.operators.refusals import BAD_TILING, MISSING, Operator

Span = tuple[int, int]
"""The rows of one segment in a packed tensor, as `(start, stop)`."""


class Group(NamedTuple):
    """Neighbouring segments of equal lengths, `B` of them from number `first`: rows `[start, start + B * L)`."""

    first: int
    B: int
    q_start: int
    Lq: int
    k_start: int
    Lk: int

    def q_rows(self, x: Tensor) -> Tensor:
        """The group's rows of a packed tensor `[Tq, N, D]`, as a view `[B, N, Lq, D]`."""
        return _rows(x, self.q_start, self.B, self.Lq)

    def k_rows(self, x: Tensor) -> Tensor:
        """The group's rows of a packed tensor `[Tk, K, D]`, as a view `[B, K, Lk, D]`."""
        return _rows(x, self.k_start, self.B, self.Lk)


def _rows(x: Tensor, start: int, B: int, L: int) -> Tensor:
    T, N, D = x.stride()
    size = (B, x.shape[1], L, x.shape[2])
    return x.as_strided(size, (L * T, N, T, D), x.storage_offset() + start * T)  # one step: short segments are many


def groups(q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Iterator[Group]:
    """All segments that have queries, those of equal lengths together where they are neighbours in memory."""
    first, count = 0, len(q_spans)
    while first < count:
        (q0, q1), (k0, k1) = q_spans[first], k_spans[first]
        Lq, Lk = q1 - q0, k1 - k0
        stop = first + 1
        while stop < count and q_spans[stop] == (q1, q1 + Lq) and k_spans[stop] == (k1, k1 + Lk):
            q1, k1, stop = q1 + Lq, k1 + Lk, stop + 1
        if Lq:
            yield Group(first, stop - first, q0, Lq, k0, Lk)
        first = stop


def inference_spans(
    op: Operator, name: str, sums: Sequence[int] | None, T: int, *, may_stop_short: bool
) -> tuple[Span, ...]:
    """The segments behind the running sums of an inference call: no leading 0, the last entry is T.

    With `may_stop_short` a last entry below T passes, as it does on the route that only logs it. At most 4096 entries
    (operator documents).
    """
    sums = _given(op, name, sums, most=4096)
    _check_order(op, name, sums)
    last = sums[-1] if sums else 0
    if last > T or (last < T and not may_stop_short):
        op.refuse(BAD_TILING, f"the last entry of {name} is {last} for T = {T}. They must be equal.")
    return tuple(pairwise([0, *sums]))


def training_spans(op: Operator, name: str, sums: Sequence[int] | None, T: int) -> tuple[tuple[Span, ...], bool]:
    """The segments behind the running sums of a training call, and whether the rows past the last are zeroed.

    Zeros at the end mark empty tail sequences, and have those rows zeroed: 2, 5, 9, 0. The last entry may be below T.
    At most 1024 entries, which every release takes; later ones take up to 20000 (operator documents).
    """
    sums = _given(op, name, sums, most=1024)
    if not sums:
        op.refuse(BAD_TILING, f"{name} is empty. It needs at least one entry.")
    kept = len(sums)
    while kept and sums[kept - 1] == 0:
        kept -= 1
    _check_order(op, name, sums[:kept])
    last = sums[kept - 1] if kept else 0
    if last > T:
        op.refuse(BAD_TILING, f"the last entry of {name} is {last} for T = {T}. It must not be above.")
    spans = (*pairwise([0, *sums[:kept]]), *[(last, last)] * (len(sums) - kept))
    return spans, kept < len(sums)


def check_same_count(op: Operator, names: tuple[str, str], counts: tuple[int, int]) -> None:
    """Both lists of lengths describe the same segments."""
    if counts[0] != counts[1]:
        op.refuse(BAD_TILING, f"{names[0]} has {counts[0]} entries, {names[1]} {counts[1]}. They must be as many.")


def _given(op: Operator, name: str, sums: Sequence[int] | None, *, most: int) -> list[int]:
    if sums is None:
        op.refuse(MISSING, f"{name} is missing. Layout TND needs it.")
    if len(sums) > most:
        op.refuse(BAD_TILING, f"{name} has {len(sums)} entries. At most {most}.")
    return [int(each) for each in sums]


def _check_order(op: Operator, name: str, sums: Sequence[int]) -> None:
    if any(after < before for before, after in pairwise([0, *sums])):
        shown = ", ".join(map(str, sums[:8])) + (", ..." if len(sums) > 8 else "")
        op.refuse(BAD_TILING, f"{name} [{shown}] is negative or decreases. It holds running sums.")
