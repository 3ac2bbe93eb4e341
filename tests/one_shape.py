"""Cases run at a few common shapes, so that a table of cases costs few compilations."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import Segments, packed_attention
from jaxattn.testing import Case

SHAPES = (128, 1024)
"""Rows of q and k that a case is padded to: the first that is enough."""
SEGMENTS = 32
QUICK = {"xla_backend_optimization_level": 0}
"""Compiles in half the time; the programs run slower, their meaning is the same."""


@cache
def program(options: tuple[tuple[str, Any], ...]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`packed_attention` with these options, compiled once for every packing of a shape."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: Segments) -> Any:
        return packed_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **dict(options))

    return jax.jit(attend, compiler_options=QUICK)


def padded(case: Case, dtype: Any, fill: float = np.nan) -> tuple[list[Any], Segments]:
    """q, k, v, sinks of a case and its segments, with tails of `fill` up to the common shape: tails are never read."""
    inputs = case.inputs(dtype)
    rows = next(n for n in SHAPES if n >= max(case.rows))
    q, k, v = (
        jnp.asarray(np.pad(x, ((0, rows - len(x)), (0, 0), (0, 0)), constant_values=fill))
        for x in (inputs.q, inputs.k, inputs.v)
    )
    sinks = None if inputs.sinks is None else jnp.asarray(inputs.sinks)
    return [q, k, v, sinks], Segments.from_lengths(case.q_lengths, case.k_lengths, num_segments=SEGMENTS)


def attend(case: Case, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of a case from the fast path, with traced offsets."""
    arrays, segments = padded(case, dtype)
    out, lse = program(tuple(case.options.items()))(*arrays, segments)
    assert not np.asarray(out[case.rows[0] :]).any(), "a tail row is not 0"
    return np.asarray(out[: case.rows[0]]), np.asarray(lse[:, : case.rows[0]])
