"""The bridge costs at most three times an empty callback, whatever the number of tokens.

    python benchmarks/bridge_overhead.py

One jitted `npu_packed_attention`, with all that touches the device replaced by nothing: views of XLA's buffers, reading
and checking the offsets, and looking up the plan stay. Against it an empty `buffer_callback` with the same operands. Both
at 1 024 and at 32 768 tokens, 8 heads of width 128, bfloat16. Prints microseconds per call, the smallest of many, and ends
with status 1 if a ratio is above 3, or if it is larger at more tokens: XLA maps and unmaps a result of 64 MB in every
call, which makes the empty callback slower too, but the bridge may do nothing per token. Next to it `jax.pure_callback`, JAX's documented callback, on the same work.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from interop import callback, npu_packed_attention, operations
from interop.dlpack import view
from jaxattn import Segments
from npu import simulator

MOST = 3.0
TOKENS = (1024, 32768)
HEADS, WIDTH, SEGMENT_COUNT = 8, 128, 16


def microseconds(*calls: Callable[[], Any], seconds: float = 3.0) -> list[float]:
    """The smallest time of each call that ends with its result there. They take turns, so that all meet the same machine."""
    for call in calls:
        jax.block_until_ready(call())
    best, until = [float("inf")] * len(calls), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for i, call in enumerate(calls):
            for _ in range(20):
                start = time.perf_counter()
                jax.block_until_ready(call())
                best[i] = min(best[i], time.perf_counter() - start)
    return [b * 1e6 for b in best]


def uploaded(buffers: Sequence[Any], _npu: int) -> list[Any]:
    return [view(x) for x in buffers]


def computed(_plan: Any, q: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    return q, None


def stored(*_: Any) -> None:
    pass


def measure(T: int) -> tuple[float, float, float]:
    """The bridge, an empty callback, and `pure_callback`."""
    q, k, v = (jnp.ones((T, HEADS, WIDTH), jnp.bfloat16) for _ in range(3))
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths([T // SEGMENT_COUNT] * SEGMENT_COUNT))
    operands = (q, k, v, segments.cu_seqlens_q, segments.cu_seqlens_k)
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)

    def empty(_context: Any, _result: Any, *_: Any) -> None:
        pass

    def same(q: Any, *_: Any) -> np.ndarray[Any, Any]:
        return np.asarray(q)

    bridge = jax.jit(partial(npu_packed_attention, causal=True))
    floor = jax.jit(lambda *x: buffer_callback(empty, shape)(*x))
    documented = jax.jit(lambda *x: jax.pure_callback(same, shape, *x))
    with (
        mock.patch.object(operations, "_upload", uploaded),
        mock.patch.object(operations, "run", computed),
        mock.patch.object(callback, "_store", stored),
    ):
        ours, least = microseconds(lambda: bridge(q, k, v, segments), lambda: floor(*operands))
    return ours, least, microseconds(lambda: documented(*operands))[0]


def main() -> int:
    simulator.enable()
    print(f"us per call, {HEADS} heads, width {WIDTH}, bfloat16      bridge   empty   ratio   pure_callback")
    ratios: list[float] = []
    for T in TOKENS:
        ours, empty, documented = measure(T)
        ratios.append(ours / empty)
        print(f"T = {T:6}{'':35}{ours:10.0f}{empty:8.0f}{ours / empty:8.2f}{documented:16.0f}")
    print(f"ratios: at most {MOST:g}, and not larger at more tokens")
    return int(max(ratios) > MOST or ratios[-1] > ratios[0])


if __name__ == "__main__":
    sys.exit(main())
