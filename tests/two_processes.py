"""One of two JAX processes that share a mesh of four devices, two each. Run by tests/test_several_devices.py."""

import sys
from functools import partial


def main(address: str, rank: int) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank)

    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from interop import npu_packed_attention, raise_pending
    from jaxattn import Segments, reference_attention
    from npu import simulator

    simulator.enable(devices=4)
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    by_batch = PartitionSpec("x")
    lengths = np.array([[5, 10, 6], [2, 2, 2], [0, 24, 0], [8, 8, 8]], np.int32)
    x = np.random.default_rng(0).standard_normal((4, 24, 2, 16)).astype(np.float32)

    def one(attention, x, n):
        return (attention(x, x, x, Segments.from_lengths(n), causal=True) ** 2).sum()

    def step(x, n):
        value, gradient = jax.value_and_grad(partial(one, npu_packed_attention))(x[0], n[0])
        return jax.lax.psum(value, "x"), gradient[None]

    def spread(array):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, by_batch), lambda at: array[at])

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=by_batch, out_specs=(PartitionSpec(), by_batch)))
    value, gradient = jax.block_until_ready(run(spread(x), spread(lengths)))
    raise_pending()
    want = jax.jit(
        jax.value_and_grad(lambda x: sum(one(reference_attention, x[i], jnp.asarray(lengths[i])) for i in range(4)))
    )
    want_value, want_gradient = jax.device_get(want(x))
    np.testing.assert_allclose(value.addressable_data(0), want_value, rtol=1e-4)
    for shard in gradient.addressable_shards:
        np.testing.assert_allclose(shard.data, want_gradient[shard.index], rtol=1e-4, atol=1e-4)
    used = [simulator.counters(i).to_device.count > 0 for i in range(4)]
    print(f"process {rank}: value and gradient agree, NPUs used: {used}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
