"""The cost of the fast path follows the visible area: planned tiles, temporary memory, compilations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_shape import QUICK

from jaxattn import Segments, packed_attention
from jaxattn.blocks import SIZES
from jaxattn.mask import key_intervals
from jaxattn.tiles import plan, planned_area


def area(lengths: list[int], *, left: int | None = None, right: int | None = None) -> tuple[float, int]:
    """Pairs that the tiles of a packing hold, and pairs that are visible."""
    T = -(-sum(lengths) // 128) * 128
    lo, hi = _intervals(Segments.from_lengths(lengths, num_segments=1024), T, left, right)
    return float(_planned_area(lo, hi)), int(jnp.sum(hi - lo))


@partial(jax.jit, static_argnums=(1, 2, 3), compiler_options=QUICK)
def _intervals(segments, T, left, right):
    return key_intervals(segments, T, T, left=left, right=right)


@partial(jax.jit, compiler_options=QUICK)
def _plan(lo, hi):
    return [tiles[1:] for tiles in plan(lo, hi, SIZES)]


@partial(jax.jit, compiler_options=QUICK)
def _planned_area(lo, hi):
    return planned_area(plan(lo, hi, SIZES))


def test_doubling_the_rows_at_a_fixed_segment_length_doubles_the_area() -> None:
    for length in (16, 100, 512):
        once, _ = area([length] * (4096 // length), right=0)
        twice, _ = area([length] * (8192 // length), right=0)
        assert twice == pytest.approx(2 * once, rel=0.05), length


def test_a_window_costs_at_most_a_tenth_of_full_causal() -> None:
    window, _ = area([16384], left=256, right=0)
    full, _ = area([16384], right=0)
    assert window <= full / 10


@pytest.mark.parametrize(
    ("lengths", "most"), [([8192], 1.05), ([512] * 16, 1.01), ([128] * 16, 1.01), ([1000, 500, 250, 60, 30, 8], 1.7)]
)
def test_tiles_hold_little_more_than_the_visible_pairs(lengths: list[int], most: float) -> None:
    held, visible = area(lengths)
    assert visible <= held <= most * visible


def test_one_query_after_each_of_many_caches_holds_only_its_own_keys() -> None:
    lo, hi = _intervals(Segments.from_lengths([1] * 64, [1024] * 64), 128, None, 0)
    assert float(_planned_area(lo, hi)) == int(jnp.sum(hi - lo)) == 64 * 1024


def test_the_plan_covers_every_visible_pair_once() -> None:
    rng = np.random.default_rng(0)
    for lengths in ([1, 100, 2, 70, 0, 150], [64] * 6, [300], [3] * 100):
        Lk = rng.permutation(lengths).tolist()
        T = -(-sum(lengths) // 128) * 128
        lo, hi = _intervals(Segments.from_lengths(lengths, Lk, num_segments=100), T, None, 0)
        covered = np.zeros((T, 2 * T), int)
        for size, (used, block, first, chunks) in zip(SIZES, _plan(lo, hi), strict=True):
            assert all(int(b) == T // size.rows for b in block[int(used) :]), "what is left over is no block of rows"
            for b in block[: int(used)].tolist():
                start = int(first[b])
                rows, keys = slice(b * size.rows, (b + 1) * size.rows), int(chunks[b]) * size.keys
                assert size.repeats or keys <= size.keys
                covered[rows, start : start + keys] += 1
        key = np.arange(2 * T)
        visible = (np.asarray(lo)[:, None] <= key) & (key < np.asarray(hi)[:, None])
        assert (covered[visible] == 1).all()
        assert covered.max() == 1


def test_temporary_memory_is_a_few_times_the_inputs() -> None:
    """Forward and backward at T=16384: at most 4 times the bytes of q, k and v together, in float32 and bfloat16."""
    T, N, D = 16384, 8, 64

    def gradients(q, k, v, segments):
        return jax.vjp(lambda *x: packed_attention(*x, segments, causal=True), q, k, v)[1](q)

    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.ShapeDtypeStruct((T, N, D), dtype)
        segments = Segments.from_lengths([1000] * 16)
        compiled = jax.jit(gradients).lower(x, x, x, segments).compile(compiler_options=QUICK)
        inputs = 3 * T * N * D * jnp.dtype(dtype).itemsize
        assert compiled.memory_analysis().temp_size_in_bytes <= 4 * inputs


def test_one_compilation_serves_every_packing() -> None:
    traces = 0

    @jax.jit
    def attend(q, segments):
        nonlocal traces
        traces += 1
        return packed_attention(q, q, q, segments)

    for lengths in ([40], [1] * 30, [3, 37]):
        attend(jnp.ones((40, 1, 8)), Segments.from_lengths(lengths, num_segments=30))
    assert traces == 1
