"""What makes callbacks that copy their arguments hang. Run by tests/test_no_deadlock.py, in a process of its own.

Each pattern has its own time limit; the process ends with all stacks printed when one hangs.
"""

import faulthandler
import sys
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from interop import npu_packed_attention, raise_pending
from jaxattn import Segments
from npu import simulator

ROUNDS = 20
SECONDS = 60
P = PartitionSpec
T, N, D = 512, 2, 64
SEGMENTS = Segments.from_lengths([128] * 4)
CAUSAL = partial(npu_packed_attention, causal=True)
BOTH = ("npu", "jax")


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float16)


def attend(x: jax.Array, **options) -> jax.Array:
    return CAUSAL(x, x, x, SEGMENTS, **options)


def large_arrays():
    x = normal(8 * T, N, D)
    run = jax.jit(lambda x: CAUSAL(x, x, x, Segments.from_lengths([64] * 64)))
    return lambda: run(x)


def scan_of_many_calls():
    x = normal(T, N, D)
    run = jax.jit(lambda x: jax.lax.scan(lambda c, _: (attend(c), c.sum()), x, None, length=6))
    return lambda: run(x)


def two_threads():
    x = normal(T, N, D)
    run = jax.jit(attend)
    run(x)

    def work():
        for _ in range(3):
            jax.block_until_ready(run(x))

    def both():
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return both


def chained_calls():
    x = normal(T, N, D)
    one, other = jax.jit(attend), jax.jit(lambda x: attend(x) + 1)
    return lambda: other(one(other(one(x))))  # dispatched before the first is done


def eager_gradient():
    x = normal(T, N, D)
    return lambda: jax.grad(lambda x: attend(x).astype(jnp.float32).sum())(x)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def psum_after_the_call():
    x = normal(T, 4 * N, D)
    assert x.nbytes // 4 > 102_400

    def step(x):
        return jax.lax.psum(attend(x).astype(jnp.float32).sum(), "x")

    run = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=P(None, "x"), out_specs=P()))
    return lambda: run(x)


def training_step(backward: str):
    batch, weight = normal(4, T, N * D), normal(N * D, N * D) / 20

    def loss(weight, x):
        @jax.checkpoint
        def block(x):
            return attend((x @ weight).reshape(T, N, D), backward=backward).reshape(T, N * D)

        return (block(x[0]).astype(jnp.float32) ** 2).mean()

    def step(weight, x):
        value, gradient = jax.value_and_grad(loss)(weight, x)
        return jax.lax.pmean(value, "x"), weight - 0.1 * gradient / 4  # summed over shards: the weight is shared

    run = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("x")), out_specs=(P(), P())))
    return lambda: run(weight, batch)


def a_hang():
    return threading.Event().wait


PATTERNS = {
    "large arrays": large_arrays,
    "scan of many calls": scan_of_many_calls,
    "two threads": two_threads,
    "chained calls": chained_calls,
    "eager gradient": eager_gradient,
    "psum after the call": psum_after_the_call,
    **{f"training step, {backward} backward": partial(training_step, backward) for backward in BOTH},
}


def main(patterns: dict, seconds: int) -> None:
    simulator.enable(devices=4)
    assert jax.device_count() == 4
    for name, make in patterns.items():
        faulthandler.dump_traceback_later(seconds, exit=True)
        run, start = make(), time.perf_counter()
        for _ in range(ROUNDS):
            jax.block_until_ready(run())
        raise_pending()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    faulthandler.dump_traceback_later(seconds, exit=True)
    matrix, x = jnp.eye(1000), normal(T, N, D)

    @jax.jit
    def slow(matrix):
        for _ in range(10):
            matrix = matrix @ matrix
        return matrix

    run = jax.jit(lambda matrix, x: attend(x + matrix[0, 0].astype(x.dtype)))
    jax.block_until_ready(run(slow(matrix), x))
    left = run(slow(matrix), x)
    print("leaves with work in flight:", not left.is_ready(), flush=True)
    sys.left = left  # alive until the interpreter is gone


if __name__ == "__main__":
    if sys.argv[1:] == ["hang"]:
        main({"a hang": a_hang}, 1)
    main(PATTERNS, SECONDS)
