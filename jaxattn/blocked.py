"""The fast path: packed attention in blocks, with work proportional to the visible area and memory O(T)."""

from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxattn.blocks import attend_blocks
from jaxattn.mask import key_intervals, query_ids
from jaxattn.poison import without_poison
from jaxattn.segments import Segments
from jaxattn.validation import check_call, offsets_are_broken

Out = Float[Array, "Tq N Dv"]
Lse = Float[Array, "N Tq"]


@overload
def packed_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[False] = False,
) -> Out: ...  # fmt: skip
@overload
def packed_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[True],
) -> tuple[Out, Lse]: ...  # fmt: skip
def packed_attention(
    q: Float[Array, "Tq N D"],
    k: Float[Array, "Tk K D"],
    v: Float[Array, "Tk K Dv"],
    segments: Segments,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_softmax_lse: bool = False,
) -> Out | tuple[Out, Lse]:
    """Attention inside each segment of a packed batch.

    With `causal=True` the last query of a segment lines up with its last key. Two queries, five keys:

        k  0 1 2 3 4
        q0 x x x x .
        q1 x x x x x

    A query that sees no key gives 0, and its softmax_lse is -inf (with sinks: `sinks[h]`). Rows past the last offset
    give 0 and -inf. A NaN or Inf in k or v reaches exactly the rows that see it, one in q its own row.

    Work is proportional to the number of visible (query, key) pairs and memory to the number of rows, also when the
    offsets are traced: one compilation serves every packing of the same shapes. Differentiable in reverse mode, once;
    for forward mode or second derivatives use `reference_attention`.

    Args:
        q: queries `[Tq, N, D]`, float16, bfloat16, float32 or float64.
        k: keys `[Tk, K, D]`, the dtype of q. `N` must be a multiple of `K`; query head h reads head `h // (N // K)`.
        v: values `[Tk, K, Dv]`, the dtype of q.
        segments: which rows belong together.
        softmax_scale: the factor on `<q, k>`; None means `D ** -0.5`.
        causal: hide keys after the query; the same as a right reach of 0.
        window_size: the reach `(left, right)` in keys, both ends inclusive; None or -1 is unlimited.
        softcap: scores s become `softcap * tanh(s / softcap)`, before masking.
        sinks: one logit per query head, floating `[N]`, added to the softmax sum; neither scaled nor capped.
        return_softmax_lse: also return the natural log of the softmax sum.

    Returns:
        out `[Tq, N, Dv]` in the dtype of q; with `return_softmax_lse=True` also lse `[N, Tq]`, float32 (float64 for
        float64 input). Scores, softmax and sums are taken in that precision; the result is rounded once.

    Raises:
        ValueError: everything that is wrong with the call, one line each.

    >>> q = jnp.ones((3, 1, 2)); v = jnp.arange(6.0).reshape(3, 1, 2)
    >>> packed_attention(q, q, v, Segments.from_lengths([1, 2]))[:, 0]
    Array([[0., 1.],
           [3., 4.],
           [3., 4.]], dtype=float32)
    """
    options = check_call(
        q, k, v, segments,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, sinks=sinks,
        return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
    (Tq, N, _), (Tk, K, _) = q.shape, k.shape
    dtype, accumulate = q.dtype, jnp.promote_types(q.dtype, jnp.float32)

    # A factor on the inputs, and not only NaN in the result: it makes every gradient NaN as well.
    broken = offsets_are_broken(segments, Tq, Tk)
    intact = jnp.where(broken, jnp.nan, 1)
    q, k, v = (jnp.asarray(x) * intact.astype(dtype) for x in (q, k, v))
    lo, hi = (jnp.where(broken, 0, x) for x in key_intervals(segments, Tq, Tk, left=options.left, right=options.right))
    visible = hi > lo

    # Poisoned rows are computed as if they were 0 and marked afterwards: a masked NaN would leak through 0 * NaN.
    q, q_bad = without_poison(q)
    k, k_bad = without_poison(k)
    v, v_bad = without_poison(v)
    lse_nan = (q_bad & visible[:, None]) | jnp.repeat(_sees(k_bad, lo, hi), N // K, axis=1)
    out_nan = lse_nan | jnp.repeat(_sees(v_bad, lo, hi), N // K, axis=1)

    out, lse = attend_blocks(q, k, v, lo, hi, options)

    # The selects below also stop the cotangents of empty and poisoned rows: where the answer is not the blocks', they
    # hand back 0, whatever came in.
    has_lse = visible
    if sinks is not None:
        sinks = jnp.asarray(sinks).astype(accumulate) * intact.astype(accumulate)
        sinks_bad = ~jnp.isfinite(sinks)
        has_lse = query_ids(segments, Tq) >= 0
        out_nan, lse_nan = (nan | (sinks_bad & has_lse[:, None]) for nan in (out_nan, lse_nan))
        out, lse = _with_sinks(out, lse, jnp.where(sinks_bad, 0, sinks)[:, None], visible)
    out = jnp.where(visible[:, None, None], out, 0)
    out = jnp.where((out_nan | broken)[..., None], jnp.nan, out).astype(dtype)
    lse = jnp.where(has_lse, lse, -jnp.inf)
    lse = jnp.where((lse_nan | broken).T, jnp.nan, lse)
    return (out, lse) if return_softmax_lse else out


def _with_sinks(out: Out, lse: Lse, sinks: Float[Array, "N 1"], visible: Bool[Array, " Tq"]) -> tuple[Out, Lse]:
    """`out` and `lse` with one more logit per head in the softmax sum, whose value is 0."""
    lse = jnp.where(visible, lse, sinks)
    out = out * jax.nn.sigmoid(lse - sinks).T[..., None]
    return out, jnp.where(visible, jnp.logaddexp(lse, sinks), sinks)


def _sees(bad: Bool[Array, "Tk K"], lo: Int32[Array, " Tq"], hi: Int32[Array, " Tq"]) -> Bool[Array, "Tq K"]:
    """Whether each query row sees a poisoned key row, per key/value head: more of them before `hi` than before `lo`."""
    before = jnp.pad(jnp.cumsum(bad, axis=0, dtype=jnp.int32), ((1, 0), (0, 0)))
    return before[hi] > before[lo]
