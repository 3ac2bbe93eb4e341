"""Attention over a sequence that is divided over several devices: a ring of `ppermute` steps and `jaxattn.merge`.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/ring_attention.py

Runs on four CPU devices, each with a (simulated) NPU of its own, and prints how far the ring is from attention over the
whole sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from interop import npu_packed_attention
from jaxattn import Segments, merge, reference_attention
from npu import is_available, simulator


def ring_attention(
    attention: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, *, axis_name: str, causal: bool
) -> jax.Array:
    """Attention over a sequence of which every device holds an equal part: `q, k, v [T/n, heads, width]`.

    The keys and values travel round the ring, one device per step. In each step a device attends to the part that is
    with it, and merges the answer with what it has. With parts of equal length a part of keys is wholly before the
    queries (all visible), their own (causal), or wholly after them (nothing visible: a segment without keys).
    """
    size, here = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    rows = q.shape[0]
    out, lse = attention(q, k, v, Segments.from_lengths([rows]), causal=causal, return_softmax_lse=True)
    send = [(i, (i + 1) % size) for i in range(size)]
    for step in range(1, size):
        k, v = jax.lax.ppermute((k, v), axis_name, send)
        before = here >= step  # these keys are those of device here - step, or wrapped around to later ones
        seen = jnp.where(before, rows, 0) if causal else jnp.full((), rows)
        part = attention(q, k, v, Segments.from_lengths([rows], seen[None]), return_softmax_lse=True)
        out, lse = merge(out, lse, *part)
    return out


def main() -> None:
    """Four parts of 64 tokens, 4 query heads over 2 key/value heads, float32."""
    if not is_available():
        simulator.enable()
        print("No Ascend NPU here: this runs on a simulated one.")
    mesh = Mesh(np.array(jax.devices()), ("ring",))
    q, k, v = (jax.random.normal(jax.random.key(i), (256, heads, 64)) for i, heads in enumerate((4, 2, 2)))
    ring = partial(ring_attention, npu_packed_attention, axis_name="ring", causal=True)
    parts = PartitionSpec("ring")
    out = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=parts, out_specs=parts))(q, k, v)
    whole = reference_attention(q, k, v, Segments.from_lengths([256]), causal=True)
    print(f"{len(mesh.devices)} devices, largest difference from the whole: {float(jnp.abs(out - whole).max()):.1e}")


if __name__ == "__main__":
    main()
