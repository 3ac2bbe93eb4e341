"""Values inside `jax.shard_map`: over which axes of the mesh they vary.

Results of a callback carry no such type, and gradients need it: the cotangent of what is equal on all shards is summed
over them.
"""

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` varies inside `jax.shard_map`; none elsewhere."""
    aval = jax.typeof(x)
    return frozenset(aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", ()))


def vary_over(x: Any, axes: frozenset[str]) -> Any:
    """`x`, typed as varying over `axes` too. Its cotangents are summed over them."""
    missing = tuple(sorted(axes - varying_axes(x)))
    if not missing:
        return x
    lax: Any = jax.lax
    return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)  # jax 0.7
