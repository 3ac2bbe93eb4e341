"""The bridge on four JAX CPU devices and four NPUs. Run by tests/test_several_devices.py, in a process of its own."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.ring_attention import ring_attention
from interop import npu_packed_attention, raise_pending
from jaxattn import Segments, packed_attention, reference_attention
from npu.simulator import counters

P = PartitionSpec
T, D = 24, 16
SEGMENTS = Segments.from_lengths([5, 10, 6])
CAUSAL = partial(npu_packed_attention, causal=True)
WANTED = jax.jit(partial(reference_attention, causal=True), static_argnames="return_softmax_lse")  # compiles once


@pytest.fixture
def mesh() -> Mesh:
    assert jax.device_count() == 4
    return Mesh(np.array(jax.devices()), ("x",))


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def loss(attention, q, k, v, segments=SEGMENTS) -> jax.Array:
    out, lse = attention(q, k, v, segments, return_softmax_lse=True)
    return (out**2).sum() + jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0)).sum()


def close(got, want) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), jax.device_get(got), jax.device_get(want))


def told(call, error: type[Exception] = ValueError) -> str:
    """The first line of what a call raises."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value).splitlines()[0]


def uploads() -> list[int]:
    return [counters(i).to_device.count for i in range(4)]


@pytest.mark.parametrize("backward", ["npu", "jax"])
@pytest.mark.parametrize(("jit", "check_vma"), [(True, True), (True, False), (False, True)])
def test_heads_are_sharded(mesh: Mesh, jit: bool, check_vma: bool, backward: str) -> None:
    q, k, v = normal(T, 8, D), normal(T, 4, D, seed=1), normal(T, 4, D, seed=2)

    def total(q, k, v):
        return jax.lax.psum(loss(partial(CAUSAL, backward=backward), q, k, v), "x")

    step = jax.shard_map(total, mesh=mesh, in_specs=P(None, "x"), out_specs=P(), check_vma=check_vma)
    run = jax.value_and_grad(step, (0, 1, 2))
    close((jax.jit(run) if jit else run)(q, k, v), jax.value_and_grad(partial(loss, WANTED), (0, 1, 2))(q, k, v))


def test_keys_that_all_shards_share_get_the_sum_of_their_gradients(mesh: Mesh) -> None:
    q, k, v = normal(T, 8, D), normal(T, 1, D, seed=1), normal(T, 1, D, seed=2)
    step = jax.shard_map(
        lambda *x: jax.lax.psum(loss(CAUSAL, *x), "x"), mesh=mesh, in_specs=(P(None, "x"), P(), P()), out_specs=P()
    )
    close(jax.jit(jax.grad(step, (0, 1, 2)))(q, k, v), jax.grad(partial(loss, WANTED), (0, 1, 2))(q, k, v))


def test_batches_of_packs_are_sharded_and_each_runs_on_its_own_npu(mesh: Mesh) -> None:
    q, k, v = normal(8, T, 4, D), normal(8, T, 2, D, seed=1), normal(8, T, 2, D, seed=2)
    lengths = [[5, 10, 6], [2, 2, 2], [0, 24, 0], [0, 0, 0], [8, 8, 8], [1, 1, 1], [23, 1, 0], [7, 0, 17]]
    segments = jax.tree.map(lambda *x: np.stack(x), *map(Segments.from_lengths, lengths))

    def total(attention, *x):
        return jax.vmap(partial(loss, attention))(*x).sum()

    step = jax.shard_map(lambda *x: jax.lax.psum(total(CAUSAL, *x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    before = uploads()
    got = jax.block_until_ready(jax.jit(step)(q, k, v, segments))
    spent = [after - b for after, b in zip(uploads(), before, strict=True)]
    assert min(spent) >= 3, spent
    close(got, total(WANTED, q, k, v, segments))


def test_the_npu_is_that_of_the_device_and_not_of_its_place_in_the_mesh() -> None:
    mesh = Mesh(np.array(jax.devices())[[2, 0]], ("x",))
    lengths = jnp.array([24, 0], jnp.int32)  # the shard at place 1 has nothing to send but its operands

    def call(q, n):
        return CAUSAL(q[0], q[0], q[0], Segments.from_lengths(n))[None]

    run = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x")))
    before = uploads()
    jax.block_until_ready(run(normal(2, T, 2, D), lengths))
    spent = [after > b for after, b in zip(uploads(), before, strict=True)]
    assert spent == [True, False, True, False]


def test_all_shards_go_to_the_npu_that_is_named(mesh: Mesh) -> None:
    call = partial(CAUSAL, device="npu:3")
    run = jax.jit(
        jax.shard_map(lambda q: call(q, q, q, SEGMENTS), mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))
    )
    before = uploads()
    got = jax.block_until_ready(run(normal(T, 4, D)))
    assert [after > b for after, b in zip(uploads(), before, strict=True)] == [False, False, False, True]
    close(got, WANTED(normal(T, 4, D), normal(T, 4, D), normal(T, 4, D), SEGMENTS))


def test_eager_arrays_run_on_the_npu_of_their_device() -> None:
    x = jax.device_put(normal(T, 2, D), jax.devices()[2])
    before = uploads()
    out = jax.block_until_ready(CAUSAL(x, x, x, SEGMENTS))
    assert out.devices() == {jax.devices()[2]}
    assert [after > b for after, b in zip(uploads(), before, strict=True)] == [False, False, True, False]
    close(out, WANTED(x, x, x, SEGMENTS))


SHARDED = (
    "npu_packed_attention: the program runs on 4 devices without jax.shard_map. JAX cannot divide a callback: every device "
    "would gather all arrays and compute everything. Wrap the call in jax.shard_map and divide heads, or packed batches, "
    "over the mesh."
)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_sharded_arguments_without_shard_map_are_refused(jit: bool, axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    q = jax.device_put(normal(T, 4, D), NamedSharding(mesh, P(None, "x")))
    call = jax.jit(CAUSAL) if jit else CAUSAL
    assert told(lambda: call(q, q, q, SEGMENTS)) == SHARDED
    assert told(lambda: jax.jit(jax.grad(lambda q: CAUSAL(q, q, q, SEGMENTS).sum()))(q)) == SHARDED


def test_axes_that_stay_automatic_inside_shard_map_are_refused() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    call = jax.shard_map(
        lambda q: CAUSAL(q, q, q, SEGMENTS),
        mesh=mesh,
        in_specs=P(None, "data"),
        out_specs=P(None, "data"),
        axis_names={"data"},
    )
    assert told(lambda: jax.jit(call)(normal(T, 4, D))) == (
        "npu_packed_attention: the mesh axes 'model' are automatic inside jax.shard_map. Every device along them would "
        "compute the same. Name all axes of the mesh in `axis_names`, or leave the argument out."
    )


def test_fewer_npus_than_devices_are_refused(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from interop import callback

    monkeypatch.setattr(callback, "device_count", lambda: 2)
    call = jax.shard_map(lambda q: CAUSAL(q, q, q, SEGMENTS), mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))
    assert told(lambda: jax.jit(call)(normal(T, 4, D))) == (
        "`device`: None on JAX's CPU device 2, and there are 2 NPUs. Each JAX device calls the NPU of its own number. Use at "
        "most 2 JAX devices per process, or name one NPU for all, device=0."
    )


def broken_step(mesh: Mesh):
    """A program whose shard 2 gets offsets that start with 7, and whose psum makes all shards wait for each other."""

    def step(q, segments):
        def one(q):
            return CAUSAL(q, q, q, jax.tree.map(lambda x: x[0], segments)).sum()

        value, gradient = jax.value_and_grad(one)(q[0])
        return jax.lax.psum(value, "x"), gradient[None]

    segments = jax.tree.map(lambda x: jnp.stack([x] * 4), SEGMENTS)
    broken = jax.tree.map(lambda x: x.at[2, 0].set(7), segments)
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=(P(), P("x"))))
    return run, normal(4, T, 2, D), segments, broken


MESSAGE = "`cu_seqlens_q`: the first offset is 7. Offsets start with 0. Prepend 0 to the running sums."


def test_a_failing_shard_answers_nan_and_its_error_waits(mesh: Mesh) -> None:
    run, q, segments, broken = broken_step(mesh)
    total, gradient = jax.block_until_ready(run(q, broken))
    assert np.isnan(total)
    assert [bool(np.isnan(g).all()) for g in gradient] == [False, False, True, False]
    assert [bool(np.isfinite(g).all()) for g in gradient] == [True, True, False, True]
    with pytest.raises(ValueError, match=re.escape(MESSAGE)) as caught:
        raise_pending()
    assert caught.value.__notes__[0].startswith("In a shard, at ")
    assert caught.value.__notes__[1].startswith(
        "Another shard, or a later call: ValueError: `cu_seqlens_q`"
    )  # backward
    raise_pending()  # told once
    total, gradient = run(q, segments)
    assert np.isfinite(total)
    assert np.isfinite(gradient).all()


def test_the_next_call_raises_what_is_pending(mesh: Mesh) -> None:
    run, q, _, broken = broken_step(mesh)
    jax.block_until_ready(run(q, broken))
    with pytest.raises(ValueError, match="the first offset is 7"):
        CAUSAL(q[0], q[0], q[0], SEGMENTS)
    CAUSAL(q[0], q[0], q[0], SEGMENTS)


def test_a_pending_error_keeps_no_buffer(mesh: Mesh) -> None:
    from interop import pending
    from npu.simulator.counting import memory_in_use

    run, q, segments, broken = broken_step(mesh)
    jax.block_until_ready(run(q, segments))
    before = [memory_in_use(i) for i in range(4)]
    jax.block_until_ready(run(q, broken))
    assert pending._kept
    assert all(error.__traceback__ is None for error in pending._kept)
    assert [memory_in_use(i) for i in range(4)] == before
    with pytest.raises(ValueError, match="the first offset is 7"):
        raise_pending()


@pytest.mark.parametrize("attention", [npu_packed_attention, packed_attention], ids=["npu", "jax"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_over_four_devices_is_attention_over_the_whole_sequence(mesh: Mesh, attention, causal: bool) -> None:
    q, k, v = normal(64, 4, D), normal(64, 2, D, seed=1), normal(64, 2, D, seed=2)

    def ring(q, k, v):
        return ring_attention(attention, q, k, v, axis_name="x", causal=causal)

    whole = jax.jit(partial(reference_attention, segments=Segments.from_lengths([64]), causal=causal))
    sharded = jax.shard_map(ring, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    out, pull = jax.vjp(jax.jit(sharded), q, k, v)
    want, pull_want = jax.vjp(whole, q, k, v)
    close(out, want)
    cotangent = normal(64, 4, D, seed=3)
    close(jax.jit(pull)(cotangent), pull_want(cotangent))
