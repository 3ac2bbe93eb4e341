"""Many packed batches as one: the token axis takes the batch axis in."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

Offsets = tuple[int, ...]


def one_packing(cu_seqlens: Sequence[tuple[Offsets, Offsets]], Tq: int, Tk: int) -> tuple[Offsets, Offsets]:
    """The offsets of packed batches of `Tq` and `Tk` rows each, laid end to end: for queries, and for keys.

    What is a tail in its own batch lies in the middle of the whole, so it becomes two one-sided segments: queries
    without keys, which see nothing, and keys without queries, which nobody sees.

    Args:
        cu_seqlens: one pair of valid offsets, of queries and of keys, per batch.

    >>> one_packing([((0, 2), (0, 3)), ((0, 1), (0, 4))], 2, 4)
    ((0, 2, 2, 2, 3, 4, 4), (0, 3, 3, 4, 8, 8, 8))
    """
    q_lengths: list[int] = []
    k_lengths: list[int] = []
    for cu_q, cu_k in cu_seqlens:
        q_lengths += [*_lengths(cu_q), Tq - cu_q[-1], 0]
        k_lengths += [*_lengths(cu_k), 0, Tk - cu_k[-1]]
    return tuple(accumulate(q_lengths, initial=0)), tuple(accumulate(k_lengths, initial=0))


def _lengths(offsets: Offsets) -> list[int]:
    return [after - before for before, after in pairwise(offsets)]
