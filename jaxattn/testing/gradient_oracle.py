"""The judge of gradients: the derivative of every row of packed attention, row by row in float64, in numpy."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxattn.testing.oracle import query_rows


class Gradients(NamedTuple):
    """The derivatives by q, k, v and sinks (None without sinks)."""

    q: Float[np.ndarray, "Tq N D"]
    k: Float[np.ndarray, "Tk K D"]
    v: Float[np.ndarray, "Tk K Dv"]
    sinks: Float[np.ndarray, " N"] | None


def oracle_gradients(
    q: Float[np.ndarray, "Tq N D"],
    k: Float[np.ndarray, "Tk K D"],
    v: Float[np.ndarray, "Tk K Dv"],
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    d_out: Float[np.ndarray, "Tq N Dv"],
    d_lse: Float[np.ndarray, "N Tq"],
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[np.ndarray, " N"] | None = None,
) -> Gradients:
    """The gradients of sum(out * d_out) + sum(lse * d_lse), in float64; NaN marks what is unspecified.

    With p = exp(s - lse) for each visible key, and out = sum p v:

        dv = p d_out        ds = p (<d_out, v> - <d_out, out> + d_lse)        dsink = p_sink (d_lse - <d_out, out>)

    Rows that see no key, and tails, get exactly 0, and their cotangents are never read, except that the lse of an
    empty row is its sink, if there is one. Unspecified are dq of a poisoned row (one whose out or lse is NaN), dk and
    dv of the keys that it sees, and dsinks of its head. Every other gradient is that with the poisoned element 0.

    >>> one = np.ones((1, 1, 1))
    >>> oracle_gradients(one, one, one, [0, 1], [0, 1], one, np.ones((1, 1))).k.item()  # the lse is the score, q k
    1.0
    """
    q, k, v, d_out, d_lse = (np.asarray(x).astype(np.float64) for x in (q, k, v, d_out, d_lse))
    (_, N, D), K = q.shape, k.shape[1]
    scale = 1 / math.sqrt(D) if softmax_scale is None else float(softmax_scale)
    got = Gradients(np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), None if sinks is None else np.zeros(N))
    logits = np.zeros(N) if sinks is None else np.asarray(sinks).astype(np.float64)
    open_q, open_k, open_sinks = np.zeros(q.shape[:2], bool), np.zeros(k.shape[:2], bool), np.zeros(N, bool)

    for row, keys in query_rows(cu_seqlens_q, cu_seqlens_k, causal, window_size):
        for h in range(N):
            g = h // (N // K)
            sink = [] if sinks is None else [logits[h]]
            query, key, value = q[row, h], k[keys, g], v[keys, g]
            seen = [query, key, value] if len(key) else []
            if not all(np.isfinite(x).all() for x in [*seen, sink]):
                open_q[row, h] = open_k[keys, g] = open_sinks[h] = True
                continue
            if len(key) == 0:
                if got.sinks is not None:
                    got.sinks[h] += d_lse[h, row]
                continue
            scores, slope = scale * (key @ query), np.ones(len(key))
            if softcap is not None:
                bent = np.tanh(scores / softcap)
                scores, slope = softcap * bent, 1 - bent**2
            lse = _log_sum_exp(np.append(scores, sink))
            p = np.exp(scores - lse)
            through_out = d_out[row, h] @ (p @ value)
            ds = scale * slope * p * (value @ d_out[row, h] - through_out + d_lse[h, row])
            got.q[row, h] = ds @ key
            got.k[keys, g] += np.outer(ds, query)
            got.v[keys, g] += np.outer(p, d_out[row, h])
            if got.sinks is not None:
                got.sinks[h] += math.exp(float(logits[h]) - lse) * (d_lse[h, row] - through_out)
    got.q[open_q] = got.k[open_k] = got.v[open_k] = np.nan
    if got.sinks is not None:
        got.sinks[open_sinks] = np.nan
    return got


def _log_sum_exp(x: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    top = float(x.max())
    return top + math.log(math.fsum(np.exp(x - top)))
