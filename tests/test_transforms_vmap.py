"""npu_packed_attention under vmap: a batch of packed batches is one call, wherever it can be."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_arrays import CAUSAL, LENGTHS, arrays, close, count_calls, loss, reference

from jaxattn import Segments


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many calls reached the NPU so far."""
    return count_calls(monkeypatch)


BATCH = jax.tree.map(lambda *x: np.stack(x), *(Segments.from_lengths(n) for n in ([5, 10, 6], [2, 2, 2], [0, 24, 0])))


def each(attention, q, k, v, segments):
    return jax.vmap(partial(attention, return_softmax_lse=True))(q, k, v, segments)


def each_alike(attention, q, k, v):
    return jax.vmap(lambda *x: attention(*x, LENGTHS, return_softmax_lse=True))(q, k, v)


def each_with_sinks(attention, q, k, v, segments):
    def one(*x):
        return attention(*x, sinks=jnp.arange(4.0), return_softmax_lse=True)

    return jax.vmap(one)(q, k, v, segments)


def each_of_each(attention, q, k, v, segments):
    return jax.vmap(jax.vmap(attention), in_axes=(0, 0, 0, None))(q, k, v, segments)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("program", "operands"),
    [
        (each, (*arrays(3), BATCH)),
        (each_alike, arrays(3)),
        (each_with_sinks, (*arrays(3), BATCH)),
        (each_of_each, (*arrays(2, 3), BATCH)),
    ],
    ids=["a packing for each", "one packing", "sinks keep tails empty", "vmap of vmap"],
)
def test_vmap_is_one_call_for_the_whole_batch(program, operands, jit: bool, calls: dict[str, int]) -> None:
    run = partial(program, CAUSAL)
    got = jax.block_until_ready((jax.jit(run) if jit else run)(*operands))
    assert calls == {"forward": 1, "backward": 0}
    close(got, reference(program, *operands))  # infinities have to agree, too


def gradient_of_each(attention, q, k, v, segments):
    return jax.vmap(jax.grad(partial(loss, attention), (0, 1, 2)))(q, k, v, segments)


def gradient_of_all(attention, q, k, v, segments):
    return jax.grad(lambda *x: jax.vmap(partial(loss, attention))(*x, segments).sum(), (0, 1, 2))(q, k, v)


@pytest.mark.parametrize(
    ("program", "backward"), [(gradient_of_each, "npu"), (gradient_of_all, "npu"), (gradient_of_all, "jax")]
)
def test_gradients_of_a_batch_are_one_call(program, backward: str, calls: dict[str, int]) -> None:
    got = jax.block_until_ready(jax.jit(partial(program, partial(CAUSAL, backward=backward)))(*arrays(3), BATCH))
    assert calls == {"forward": 1, "backward": int(backward == "npu")}
    close(got, reference(program, *arrays(3), BATCH))


@pytest.mark.parametrize(
    "mapped", [{"q"}, {"q", "k", "v", "sinks"}, {"sinks"}], ids=["k and v without", "a sink for each", "only sinks"]
)
def test_vmap_over_less_is_one_call_per_element(mapped: set[str], calls: dict[str, int]) -> None:
    operands = dict(zip("qkv", arrays(3), strict=True)) | {"sinks": jnp.arange(12.0).reshape(3, 4)}
    operands = {name: x if name in mapped else x[0] for name, x in operands.items()}

    def program(attention, operands):
        def one(x):
            return attention(x["q"], x["k"], x["v"], LENGTHS, sinks=x["sinks"])

        return jax.vmap(one, in_axes=({name: 0 if name in mapped else None for name in operands},))(operands)

    got = jax.block_until_ready(program(CAUSAL, operands))
    assert calls == {"forward": 3, "backward": 0}
    close(got, reference(program, operands))


def test_a_sink_shared_by_a_batch_gets_the_sum_of_its_gradients(calls: dict[str, int]) -> None:
    def program(attention, sinks):
        return jax.grad(lambda s: jax.vmap(lambda *x: loss(attention, *x, sinks=s))(*arrays(3)).sum())(sinks)

    got = jax.block_until_ready(program(CAUSAL, jnp.arange(4.0)))
    assert calls == {"forward": 1, "backward": 3}
    close(got, reference(program, jnp.arange(4.0)))


def test_a_jacobian_is_a_batch_of_backward_calls(calls: dict[str, int]) -> None:
    def corner(attention, q):
        return jax.jacrev(lambda q: attention(q, *arrays()[1:], LENGTHS)[:2, 0, :2])(q)

    got = jax.block_until_ready(corner(CAUSAL, arrays()[0]))
    assert calls == {"forward": 1, "backward": 4}
    close(got, reference(corner, arrays()[0]))
