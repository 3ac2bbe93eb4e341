"""The judge: packed attention as a loop over rows in float64, in numpy.

It shares no code with the library, on purpose: a mistake made there cannot be repeated here. It is written to be read
next to the definition, not to be fast.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

Float64 = np.ndarray[Any, np.dtype[np.float64]]


class Wanted(NamedTuple):
    """What every row must be, in float64, and how large the scores behind it are."""

    out: Float[np.ndarray, "Tq N Dv"]
    lse: Float[np.ndarray, "N Tq"]
    largest_score: Float[np.ndarray, " N"]
    """The largest |score| that a row of each head sees, after softcap and without sinks; 0 where nothing is seen.
    Rounding errors grow with it."""


def oracle_attention(
    q: Float[np.ndarray, "Tq N D"],
    k: Float[np.ndarray, "Tk K D"],
    v: Float[np.ndarray, "Tk K Dv"],
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[np.ndarray, " N"] | None = None,
) -> Wanted:
    """out, softmax_lse and score sizes in float64, of inputs of any floating dtype.

    A query row that sees no key has out 0 and lse -inf (with sinks: its sink); tail rows have 0 and -inf. A
    non-finite element of k gives NaN in out and lse of the rows that see it, of v in out only, of q in its own row
    (unless that row is empty), of sinks in every row of its head except tails.

    >>> ones = np.ones((2, 1, 4))
    >>> wanted = oracle_attention(ones, ones, ones, [0, 2], [0, 2], softmax_scale=0.0)
    >>> bool(wanted.lse[0, 0] == math.log(2))
    True
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    Tq, N, D = q.shape
    group = N // k.shape[1]
    scale = 1 / math.sqrt(D) if softmax_scale is None else float(softmax_scale)
    wanted = Wanted(np.zeros((Tq, N, v.shape[2])), np.full((N, Tq), -np.inf), np.zeros(N))
    for row, keys in query_rows(cu_seqlens_q, cu_seqlens_k, causal, window_size):
        for h in range(N):
            sink = None if sinks is None else float(np.asarray(sinks).astype(np.float64)[h])
            out, lse, size = _row(q[row, h], k[keys, h // group], v[keys, h // group], scale, softcap, sink)
            wanted.out[row, h] = out
            wanted.lse[h, row] = lse
            wanted.largest_score[h] = max(wanted.largest_score[h], size)
    return wanted


def query_rows(
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
) -> Iterator[tuple[int, slice]]:
    """Every query row of a segment with the key rows that it sees. Tail rows do not come up.

    >>> [(row, keys.start, keys.stop) for row, keys in query_rows([0, 2], [0, 5], True, None)]
    [(0, 0, 4), (1, 0, 5)]
    """
    left, right = window_size if window_size is not None else (None, None)
    if causal:
        right = 0
    for b in range(len(cu_seqlens_q) - 1):
        q0, q1 = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])
        k0, k1 = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
        shift = (k1 - k0) - (q1 - q0)
        for i in range(q1 - q0):
            first, last = 0, k1 - k0 - 1
            if left is not None and left != -1:
                first = max(first, i + shift - int(left))
            if right is not None and right != -1:
                last = min(last, i + shift + int(right))
            yield q0 + i, slice(k0 + first, k0 + last + 1) if last >= first else slice(0, 0)


def _row(
    query: Float64, keys: Float64, values: Float64, scale: float, softcap: float | None, sink: float | None
) -> tuple[Float64 | float, float, float]:
    """out `[Dv]`, lse and the largest |score| of one query row that sees exactly `keys` and `values`."""
    if sink is not None and not math.isfinite(sink):
        return math.nan, math.nan, 0.0
    if len(keys) == 0:
        return 0.0, -math.inf if sink is None else sink, 0.0
    if not (np.isfinite(query).all() and np.isfinite(keys).all()):
        return math.nan, math.nan, 0.0
    # Elementwise products and numpy's own sums: unlike a BLAS product, their bits do not depend on where the rows lie.
    scores = scale * (query * keys).sum(axis=1)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    logits = scores if sink is None else np.append(scores, sink)
    top = logits.max()
    lse = float(top + math.log(math.fsum(np.exp(logits - top))))
    size = float(np.abs(scores).max())
    if not np.isfinite(values).all():
        return math.nan, lse, size
    return (np.exp(scores - lse)[:, None] * values).sum(axis=0), lse, size
