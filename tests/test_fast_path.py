"""The fast path equals the float64 oracle on every case, and gives the same answer under every transform."""

from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from one_shape import QUICK, attend, padded, program

from jaxattn import Segments, packed_attention
from jaxattn.testing import CASES, Case, compare, oracle_attention

LONG = (
    Case("several tiles of keys, grouped heads", (700, 5, 250), heads=(4, 2), q_tail=9, k_tail=3),
    Case("several tiles of keys, causal", (300, 129, 90, 257), heads=(4, 2), causal=True),
    Case("more keys than tiles have, one query", (1, 300), (800, 10), heads=(4, 2), causal=True),
    Case("window over several tiles", (640, 1, 127), (600, 20, 200), window_size=(200, 30)),
    Case("softcap and sinks over several tiles", (333, 60), (500, 30), q_tail=7, causal=True, softcap=2.0, sinks=True),
)


def _program_of(case: Case) -> str:
    return str((case.heads, case.widths, case.sinks, *case.options.values()))


PROGRAMS = [list(cases) for _, cases in groupby(sorted((*CASES, *LONG), key=_program_of), key=_program_of)]


@pytest.mark.parametrize("cases", PROGRAMS, ids=lambda cases: cases[0].name)
def test_fast_path_equals_oracle(cases: list[Case]) -> None:
    problems = {case.name: compare(case, "float32", *attend(case, "float32")).problems for case in cases}
    assert not any(problems.values()), problems


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_fast_path_equals_oracle_in_other_dtypes(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        for case in (LONG[4], *(c for c in CASES if c.name == "sinks in empty rows and tails")):
            case = Case(**{**vars(case), "softcap": 2.0})
            result = compare(case, dtype, *attend(case, dtype))
            assert result.passed, (case.name, result.problems)


@pytest.mark.parametrize("rows", [(0, 0), (0, 3), (3, 0), (3, 3)])
def test_no_segments_give_empty_rows(rows: tuple[int, int]) -> None:
    q, k, v = (jnp.full((rows[side], 2, 4 + side), jnp.nan) for side in (0, 1, 1))
    k = k[:, :, :4]
    attend = program((("causal", True),))
    out, lse = attend(q, k, v, np.ones(2, np.float32), Segments.from_lengths([]))
    assert out.shape == (rows[0], 2, 5)
    assert not np.asarray(out).any()
    assert np.array_equal(lse, np.full((2, rows[0]), -np.inf))


def test_hidden_rows_near_the_largest_number_change_nothing() -> None:
    case = Case("two segments", (9, 70), causal=True)
    (q, k, v, _), segments = padded(case, "float32", fill=0)
    attend = program(tuple(case.options.items()))
    wanted = attend(q, k, v, None, segments)
    huge = [x.at[9:79].set(3e38 * jnp.sign(x[9:79])) for x in (q, k, v)]
    got = attend(*huge, None, segments)
    assert np.array_equal(got[0][:9], wanted[0][:9])
    assert np.array_equal(got[1][:, :9], wanted[1][:, :9])


def test_permuting_segments_permutes_the_output() -> None:
    lengths, order = [5, 70, 1, 33], [2, 0, 3, 1]
    (q, k, v, _), segments = padded(Case("", tuple(lengths)), "float32")
    starts = np.cumsum([0, *lengths])
    rows = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in order])
    attend = program(tuple(Case("", ()).options.items()))
    out, _ = attend(q, k, v, None, segments)
    moved = Segments.from_lengths([lengths[b] for b in order], num_segments=segments.num_segments)
    got, _ = attend(*(x.at[: len(rows)].set(x[rows]) for x in (q, k, v)), None, moved)
    np.testing.assert_allclose(got[: len(rows)], out[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "cu_seqlens",
    [[1, 5, 8, 8], [0, 5, 3, 8], [0, 5, 8, 300], [0, -5, 8, 8]],
    ids=["does not start at 0", "decreases", "past the rows", "negative"],
)
def test_broken_traced_offsets_make_values_and_gradients_nan(cu_seqlens: list[int]) -> None:
    broken = jax.tree.unflatten(jax.tree.structure(Segments.from_lengths([1])), [np.array(cu_seqlens, np.int32)] * 2)
    (q, k, v, _), _ = padded(Case("", (5, 3)), "float32", fill=0)
    sinks = jnp.ones(2)
    values, gradients = _compiled(q, k, v, sinks, broken)
    assert all(bool(jnp.isnan(x).all()) for x in (*values, *gradients))


def _values_and_gradients(q, k, v, sinks, segments):
    values, vjp = jax.vjp(
        lambda *x: packed_attention(*x[:3], segments, sinks=x[3], causal=True, return_softmax_lse=True), q, k, v, sinks
    )
    return values, vjp(jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), jnp.cos(x), 1), values))


_compiled = jax.jit(_values_and_gradients, compiler_options=QUICK)


@pytest.mark.parametrize("batched", ["q, k, v", "segments", "both"])
def test_vmap_equals_separate_calls(batched: str) -> None:
    arrays = [jax.random.normal(key, (3, 40, 2, 8)) for key in jax.random.split(jax.random.key(0), 3)]
    sinks = jnp.ones(2)
    packings = [Segments.from_lengths(n, num_segments=3) for n in ([3, 30], [10, 10, 10], [])]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *packings)
    if batched == "q, k, v":
        packings, segments, axis = [packings[0]] * 3, packings[0], None
    else:
        segments, axis = stacked, 0
    if batched == "segments":
        arrays, axes = [x[0] for x in arrays], None
    else:
        axes = 0
    got = jax.jit(jax.vmap(_values_and_gradients, (axes, axes, axes, None, axis)), compiler_options=QUICK)(
        *arrays, sinks, segments
    )
    wanted = [_compiled(*(x if axes is None else x[i] for x in arrays), sinks, packings[i]) for i in range(3)]
    for x, *ys in zip(jax.tree.leaves(got), *map(jax.tree.leaves, wanted), strict=True):
        np.testing.assert_allclose(x, jnp.stack(ys), rtol=1e-5, atol=1e-6)


def test_scan_checkpoint_and_concrete_offsets_give_the_same() -> None:
    q, k, v = (jax.random.normal(key, (40, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    concrete = Segments.from_lengths([3, 30], num_segments=3)

    def layers(q, segments):
        def layer(x, _):
            return packed_attention(x, k, v, segments, causal=True), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, length=2)[0] ** 2)

    def unrolled(q):
        for _ in range(2):
            q = packed_attention(q, k, v, concrete, causal=True)
        return jnp.sum(q**2)

    got, wanted = (jax.jit(jax.grad(f), compiler_options=QUICK) for f in (layers, unrolled))
    got, wanted = got(q, concrete), wanted(q)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_shard_map_over_heads() -> None:
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v = (jax.random.normal(key, (40, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    segments = Segments.from_lengths([3, 30], num_segments=3)
    heads, all_rows = PartitionSpec(None, "heads", None), PartitionSpec()

    def gradients(q, k, v, segments):
        return jax.vjp(lambda *x: packed_attention(*x, segments, causal=True), q, k, v)[1](q)

    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(heads, heads, heads, all_rows), out_specs=heads)
    on_mesh, wanted = (jax.jit(f, compiler_options=QUICK)(q, k, v, segments) for f in (sharded, gradients))
    for got, want in zip(on_mesh, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_bad_calls_are_refused_like_the_reference() -> None:
    q = jnp.zeros((4, 6, 8))
    with pytest.raises(ValueError, match="6 query heads over 4 key/value heads leaves 2 over"):
        packed_attention(q, q[:, :4], q[:, :4], Segments.from_lengths([4]))


def test_forward_mode_is_refused() -> None:
    q = jnp.zeros((4, 1, 8))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: packed_attention(q, q, q, Segments.from_lengths([4])), (q,), (q,))


@pytest.mark.parametrize("sink", [-200.0, -3e4, -1e38, 60.0])
def test_a_sink_far_from_the_scores_costs_no_digits(sink: float) -> None:
    q, k = (np.random.default_rng(0).standard_normal((n, 2, 8)).astype(np.float32) for n in (5, 7))
    sinks = np.full(2, sink, np.float32)
    segments = Segments.from_lengths([3, 2], [2, 5])
    out, lse = packed_attention(q, k, k, segments, sinks=jnp.asarray(sinks), return_softmax_lse=True)
    wanted = oracle_attention(q, k, k, segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist(), sinks=sinks)
    np.testing.assert_allclose(lse, wanted.lse, rtol=2e-6)
    np.testing.assert_allclose(out, wanted.out, rtol=1e-5, atol=1e-6)
