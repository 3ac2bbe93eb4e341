"""Rows that hold a NaN or an Inf, taken out before every product: a masked NaN would leak through 0 * NaN."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def without_poison(x: Float[Array, "T H D"]) -> tuple[Float[Array, "T H D"], Bool[Array, "T H"]]:
    """`x` with 0 for every row and head that holds a NaN or an Inf, and where those are.

    >>> clean, bad = without_poison(jnp.array([[[1.0, jnp.nan]], [[2.0, 3.0]]]))
    >>> clean.tolist(), bad.tolist()
    ([[[0.0, 0.0]], [[2.0, 3.0]]], [[True], [False]])
    """
    bad = ~jnp.all(jnp.isfinite(x), axis=-1)
    return jnp.where(bad[..., None], 0, x), bad
