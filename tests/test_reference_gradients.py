"""The reference's gradients: the oracle's on the case table, numerical ones in both modes, exact where a row is empty."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxattn import Segments, reference_attention
from jaxattn.testing import CASES, Case, Gradients, cotangents, gradient_problems

# Every program runs once, so what counts is how long it compiles.
COMPILED_ONCE = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(c, "float32") for c in CASES[::2]]
    + [(c, "float64") for c in CASES[1::6]]
    + [(c, "bfloat16") for c in CASES[3::6]],
    ids=lambda x: getattr(x, "name", x),
)
def test_gradients_equal_the_oracle_with_nan_cotangents_where_none_is_read(case: Case, dtype: str) -> None:
    def pull_back(q, k, v, sinks, segments, cotangent):
        def attend(q, k, v, sinks):
            return reference_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **case.options)

        return jax.vjp(attend, q, k, v, sinks)[1](cotangent)

    with jax.enable_x64(dtype == "float64"):
        inputs = case.inputs(dtype)
        arrays = (inputs.q, inputs.k, inputs.v, inputs.sinks)
        run = jax.jit(pull_back, compiler_options=COMPILED_ONCE)
        got = run(*arrays, case.segments, cotangents(case, dtype))
    got = Gradients(*(None if x is None else np.asarray(x) for x in got))
    assert gradient_problems(case, dtype, got) == []


# Empty rows, a key-less and a query-less segment, tails of different length, grouped heads.
SEGMENTS = Segments.from_lengths([4, 2, 0, 1], [2, 0, 1, 3])
OPTIONS = {
    "plain": {},
    "causal window with softcap and sinks": {"causal": True, "window_size": (2, None), "softcap": 1.5},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_numerical_gradients_in_forward_and_reverse_mode(options: str) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal(shape) for shape in ((9, 4, 3), (7, 2, 3), (7, 2, 2)))
        sinks = rng.standard_normal(4) if options != "plain" else np.zeros(4)

        @jax.jit
        def loss(q, k, v, sinks):
            out, lse = reference_attention(
                q,
                k,
                v,
                SEGMENTS,
                sinks=None if options == "plain" else sinks,
                return_softmax_lse=True,
                **OPTIONS[options],
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0)))

        check_grads(loss, (q, k, v, sinks), order=1, modes=("fwd", "rev"), rtol=1e-6, atol=1e-7)


def rows(shape, seed: int = 0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("sinks", [None, np.ones(2, np.float32)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(
    "cu_seqlens",
    [[1, 3, 5], [0, 4, 3], [0, 3, 7], [-1, -1, -1], [0, -2, 5]],
    ids=["no leading 0", "decreasing", "past the end", "refused ids", "negative"],
)
def test_broken_traced_offsets_make_values_and_gradients_nan(cu_seqlens: list[int], sinks) -> None:
    values, gradients = _values_and_gradients(rows((3, 6, 2, 4)), sinks, np.array(cu_seqlens, np.int32))
    assert all(bool(jnp.isnan(x).all()) for x in jax.tree.leaves((values, gradients)))
    values, gradients = _values_and_gradients(rows((3, 6, 2, 4)), sinks, np.array([0, 3, 6], np.int32))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((values, gradients)))


@jax.jit
def _values_and_gradients(qkv, sinks, cu_seqlens):
    def attend(q, k, v, sinks):
        segments = Segments.from_cu_seqlens(cu_seqlens)
        return reference_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True)

    values, pull_back = jax.vjp(attend, *qkv, sinks)
    return values, pull_back(jax.tree.map(jnp.ones_like, values))


def test_transforms_with_traced_segments_give_what_separate_calls_give() -> None:
    q, k, v = rows((3, 3, 6, 2, 4))
    packings = [Segments.from_lengths(n, num_segments=3) for n in ([6], [2, 1, 3], [1, 0, 2])]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *packings)
    attend = partial(reference_attention, causal=True, return_softmax_lse=True)

    def gradient(q, k, v, segments, attend=attend):
        def loss(q, k, v):
            out, lse = attend(q, k, v, segments)
            return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    alone = jax.jit(gradient)
    want = [alone(q[i], k[i], v[i], packings[i]) for i in range(3)]
    want = jax.tree.map(lambda *x: np.stack(x), *want)
    got = {
        "vmap": jax.jit(jax.vmap(gradient))(q, k, v, batch),
        "scan": jax.lax.scan(lambda c, x: (c, gradient(*x)), 0, (q, k, v, batch))[1],
        "checkpoint": jax.jit(jax.vmap(partial(gradient, attend=jax.checkpoint(attend))))(q, k, v, batch),
    }
    for name, result in got.items():
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6, err_msg=name), result, want)
