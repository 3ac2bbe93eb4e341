"""The executable specification: dense, slow, and defined for every row."""

from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxattn.mask import dense_mask, query_ids
from jaxattn.poison import without_poison
from jaxattn.segments import Segments
from jaxattn.validation import check_call, offsets_are_broken

Out = Float[Array, "Tq N Dv"]
Lse = Float[Array, "N Tq"]


@overload
def reference_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[False] = False,
) -> Out: ...  # fmt: skip
@overload
def reference_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[True],
) -> tuple[Out, Lse]: ...  # fmt: skip
def reference_attention(
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
    """Attention inside each segment of a packed batch; the specification of every row.

    With `causal=True` the last query of a segment lines up with its last key. Two queries, five keys:

        k  0 1 2 3 4
        q0 x x x x .
        q1 x x x x x

    A query that sees no key gives 0, and its softmax_lse is -inf (with sinks: `sinks[h]`). Rows past the last offset
    give 0 and -inf. A NaN or Inf in k or v reaches exactly the rows that see it, one in q its own row.

    Memory is O(N * Tq * Tk): this function says what is right, it is not meant to be fast.

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
    >>> reference_attention(q, q, v, Segments.from_lengths([1, 2]))[:, 0]
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

    mask = dense_mask(segments, Tq, Tk, left=options.left, right=options.right)
    visible = jnp.any(mask, axis=-1)
    in_segment = query_ids(segments, Tq) >= 0

    # A factor on the inputs, and not only NaN in the result: it makes every gradient NaN as well.
    broken = offsets_are_broken(segments, Tq, Tk)
    intact = jnp.where(broken, jnp.nan, 1).astype(accumulate)
    q, k, v = (x.astype(accumulate) * intact for x in (q, k, v))

    # Poisoned rows are computed as if they were 0 and marked afterwards: a masked NaN would leak through 0 * NaN.
    q, q_bad = without_poison(q)
    k, k_bad = without_poison(k)
    v, v_bad = without_poison(v)
    lse_nan = (q_bad & visible[:, None]) | _sees(mask, jnp.repeat(k_bad, N // K, axis=1))
    out_nan = lse_nan | _sees(mask, jnp.repeat(v_bad, N // K, axis=1))

    k, v = jnp.repeat(k, N // K, axis=1), jnp.repeat(v, N // K, axis=1)
    scores = options.softmax_scale * jnp.einsum("qhd,khd->hqk", q, k, precision="highest")
    # Hidden scores may be anything, Inf - Inf included; 0 keeps the derivative of tanh finite there.
    scores = jnp.where(mask, scores, 0)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    scores = jnp.where(mask, scores, -jnp.inf)

    # The maximum only keeps exp in range; the result does not depend on it, so neither does the gradient. While it
    # is -inf (nothing visible) it counts as 0, or -inf - -inf would be NaN.
    top = jnp.max(scores, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        sinks = jnp.asarray(sinks).astype(accumulate) * intact
        sinks_bad = ~jnp.isfinite(sinks)
        sinks = jnp.where(sinks_bad, 0, sinks)[:, None]
        out_nan, lse_nan = (nan | (sinks_bad & in_segment[:, None]) for nan in (out_nan, lse_nan))
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    has_lse = visible
    if sinks is not None:
        total += jnp.exp(sinks - top)
        has_lse = in_segment
    total = jnp.where(has_lse, total, 1)
    out = jnp.einsum("hqk,khd->qhd", weights, v, precision="highest") / total.T[..., None]
    lse = top + jnp.log(total)

    out = jnp.where(visible[:, None, None], out, 0)
    out = jnp.where((out_nan | broken)[..., None], jnp.nan, out).astype(dtype)
    lse = jnp.where(has_lse, lse, -jnp.inf)
    lse = jnp.where((lse_nan | broken).T, jnp.nan, lse)
    return (out, lse) if return_softmax_lse else out


def _sees(mask: Bool[Array, "Tq Tk"], bad: Bool[Array, "Tk N"]) -> Bool[Array, "Tq N"]:
    """Whether each query row sees a poisoned key row, per head."""
    return jnp.einsum("qk,kh->qh", mask.astype(jnp.float32), bad.astype(jnp.float32)) > 0
