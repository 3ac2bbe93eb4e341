"""A small Flax model learns the same on the NPU as in JAX: attention forward and backward, twenty steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from interop import npu_packed_attention
from jaxattn import Segments, packed_attention
from jaxattn.nn import PackedMultiHeadAttention
from npu.simulator import counters

VOCABULARY, F, T, STEPS = 11, 32, 32, 20
LEARNING_RATE = 0.3


class Model(nnx.Module):
    """Two layers, grouped heads, rotary positions: predicts a token from those before it in its segment."""

    def __init__(self, attention, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, F, rngs=rngs)
        self.layers = nnx.List(
            PackedMultiHeadAttention(
                4, F, num_kv_heads=2, rotary_base=100.0, normalize_qk=True, causal=True, attention=attention, rngs=rngs
            )
            for _ in range(2)
        )
        self.head = nnx.Linear(F, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array, segments: Segments) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, segments)
        return self.head(x)


def batches() -> tuple[jax.Array, Segments]:
    """Counting sequences of different starts, lengths and step widths, packed: `ids [STEPS, T]` and their segments."""
    rng = np.random.default_rng(0)
    ids, offsets = [], []
    for _ in range(STEPS):
        lengths = rng.multinomial(T - 4, [0.25] * 4)  # the rest is a tail
        parts = [(rng.integers(VOCABULARY) + rng.integers(1, 3) * np.arange(n)) % VOCABULARY for n in lengths]
        ids.append(np.concatenate([*parts, np.zeros(4, int)]))
        offsets.append(Segments.from_lengths(lengths))
    return jnp.asarray(np.stack(ids), jnp.int32), jax.tree.map(lambda *cu: jnp.stack(cu), *offsets)


def losses(attention) -> np.ndarray:
    """The loss of every step of one jitted training loop."""
    graph, parameters = nnx.split(Model(attention, nnx.Rngs(0)))

    def loss(parameters, ids, segments):
        logits = nnx.merge(graph, parameters)(ids[:-1], segments)
        ends = segments.cu_seqlens_q[1:]
        counted = (jnp.arange(T - 1) < ends[-1]) & ~jnp.isin(
            jnp.arange(1, T), ends
        )  # the next row is the same sequence
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[1:, None], axis=1)[:, 0]
        return jnp.where(counted, each, 0).sum() / counted.sum()

    def step(parameters, batch):
        value, gradient = jax.value_and_grad(loss)(parameters, *batch)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, gradient), value

    return np.asarray(jax.jit(lambda p, b: jax.lax.scan(step, p, b))(parameters, batches())[1])


@pytest.fixture(scope="module")
def wanted() -> np.ndarray:
    return losses(packed_attention)


@pytest.mark.parametrize("backward", ["npu", "jax"])
def test_the_loss_curve_is_that_of_jax(backward: str, wanted: np.ndarray) -> None:
    before = counters(0).to_device.count
    got = losses(partial(npu_packed_attention, backward=backward))
    assert counters(0).to_device.count - before >= STEPS * 2 * (9 if backward == "npu" else 3)
    # Float32 on both sides: rounding alone, which twenty steps may enlarge a thousand times.
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
    assert got[-4:].mean() < 0.8 * got[:4].mean()
