"""Small float32 inputs, where the NPU and the reference differ by rounding only, and what the transform tests share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interop import npu_packed_attention
from interop.operations import Backward, Forward
from jaxattn import Segments, reference_attention

T, N, K, D = 24, 4, 2, 16
LENGTHS = Segments.from_lengths([5, 10, 6])
CAUSAL = partial(npu_packed_attention, causal=True)
WANTED = partial(reference_attention, causal=True)


def arrays(*batch: int) -> list[jax.Array]:
    """q, k, v in float32, where the two sides differ by rounding only."""
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = [(*batch, T, N, D), (*batch, T, K, D), (*batch, T, K, D)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def loss(attention, q, k, v, segments=LENGTHS, sinks=None) -> jax.Array:
    """Depends on out and on lse, on every row that sees a key."""
    out, lse = attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True)
    return (out**2).sum() + jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0)).sum()


def close(got, want) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, want)


def reference(f, *operands):
    """`f(reference_attention, ...)`. It runs once, so what counts is how long it compiles."""
    program = jax.jit(partial(f, WANTED), compiler_options={"xla_backend_optimization_level": 0})
    return program(*operands)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many calls reach the NPU from now on."""
    made = {"forward": 0, "backward": 0}
    for name, operation in (("forward", Forward), ("backward", Backward)):

        def run(self, buffers, npu, name=name, original=operation.run):
            made[name] += 1
            return original(self, buffers, npu)

        monkeypatch.setattr(operation, "run", run)
    return made
