"""Attention over parts of the keys, joined."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def merge(
    out_a: Float[Array, "T N Dv"], lse_a: Float[Array, "N T"], out_b: Float[Array, "T N Dv"], lse_b: Float[Array, "N T"]
) -> tuple[Float[Array, "T N Dv"], Float[Array, "N T"]]:
    """out and softmax_lse of attention over two disjoint sets of keys, from the answers over each.

    With w = exp(lse): out = (w_a out_a + w_b out_b) / (w_a + w_b), lse = log(w_a + w_b).

    Associative and commutative to rounding. A row that sees no key (out 0, lse -inf) is the neutral element, and two
    such rows give such a row. Differentiable in all four arguments, with gradient 0 where a row is empty. NaN in either
    part gives NaN. Of parts that are merged exactly one carries the sinks.

    Args:
        out_a, out_b: `[T, N, Dv]`, of one floating dtype.
        lse_a, lse_b: natural logs of the softmax sums, `[N, T]`, float32 (float64 for float64 parts).

    Returns:
        out `[T, N, Dv]` in the dtype of the parts, weighted in the precision of lse and rounded once; lse `[N, T]`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, one line each.

    >>> out, lse = merge(jnp.ones((1, 1, 2)), jnp.zeros((1, 1)), jnp.zeros((1, 1, 2)), jnp.full((1, 1), -jnp.inf))
    >>> out.tolist(), lse.tolist()
    ([[[1.0, 1.0]]], [[0.0]])
    """
    out_a, lse_a, out_b, lse_b = (jnp.asarray(x) for x in (out_a, lse_a, out_b, lse_b))
    if problems := _problems(out_a, lse_a, out_b, lse_b):
        raise ValueError("\n".join(problems))
    # A part that saw nothing counts as weight 0; its -inf is replaced before the subtraction, or two of them would
    # give NaN in the value and in the gradient.
    empty_a, empty_b = lse_a == -jnp.inf, lse_b == -jnp.inf
    empty = empty_a & empty_b
    # The maximum only keeps exp in range: the result does not depend on it, so neither does the gradient.
    top = lax.stop_gradient(jnp.where(empty, 0, jnp.maximum(lse_a, lse_b)))
    weight_a = jnp.where(empty_a, 0, jnp.exp(jnp.where(empty_a, top, lse_a) - top))
    weight_b = jnp.where(empty_b, 0, jnp.exp(jnp.where(empty_b, top, lse_b) - top))
    total = jnp.where(empty, 1, weight_a + weight_b)
    share_a, share_b = ((weight / total).T[..., None] for weight in (weight_a, weight_b))
    out = jnp.where(empty.T[..., None], 0, share_a * out_a + share_b * out_b)
    return out.astype(out_a.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(total))


def _problems(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> list[str]:
    """What is wrong with the shapes and dtypes of two parts."""
    found = []
    for name, a, b in (("out", out_a, out_b), ("lse", lse_a, lse_b)):
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(
                f"`{name}_a`, `{name}_b`: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}. Both parts answer the "
                f"same queries in one dtype. Pass parts of one call each over the same q."
            )
    for side, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if out.ndim != 3 or lse.shape != (out.shape[1], out.shape[0]):
            found.append(
                f"`out_{side}`, `lse_{side}`: shapes {tuple(out.shape)} and {tuple(lse.shape)}. They are [T, N, Dv] and "
                f"[N, T]. Pass both results of a call with return_softmax_lse=True."
            )
    return found
