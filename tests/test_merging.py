"""Parts of the keys, merged, are the whole: in value and in gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from one_shape import QUICK

from jaxattn import Segments, merge, packed_attention

EMPTY = jnp.zeros((3, 2, 4)), jnp.full((2, 3), -jnp.inf)


def part(seed: int) -> tuple[jax.Array, jax.Array]:
    """A part whose first row is empty."""
    out = jax.random.normal(jax.random.key(seed), (3, 2, 4)).at[0].set(0)
    return out, 3 * jax.random.normal(jax.random.key(seed + 100), (2, 3)).at[:, 0].set(-jnp.inf)


def assert_same(got, wanted) -> None:
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_merge_is_associative_and_commutative() -> None:
    a, b, c = part(0), part(1), part(2)
    assert_same(merge(*a, *b), merge(*b, *a))
    assert_same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))


def test_the_empty_part_is_neutral() -> None:
    a = part(0)
    for got in (merge(*a, *EMPTY), merge(*EMPTY, *a)):
        assert all(np.array_equal(x, y) for x, y in zip(got, a, strict=True))


def test_two_empty_rows_give_an_empty_row_with_gradient_zero() -> None:
    (out, lse), vjp = jax.vjp(jax.jit(merge), *EMPTY, *EMPTY)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
    for gradient in vjp((jnp.ones_like(out), jnp.full_like(lse, jnp.nan))):
        assert not np.asarray(gradient).any()


def test_weights_are_natural_exponentials() -> None:
    one = jnp.ones((1, 1, 1))
    out, lse = merge(one, jnp.full((1, 1), jnp.log(3.0)), 5 * one, jnp.zeros((1, 1)))
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(np.log(4.0))


def test_check_grads_in_all_four_arguments() -> None:
    with jax.enable_x64(True):
        parts = [x.astype(jnp.float64)[1:] if x.ndim == 3 else x.astype(jnp.float64)[:, 1:] for x in part(0) + part(1)]
        check_grads(jax.jit(merge), parts, order=1, modes=["fwd", "rev"])


def test_gradients_are_finite_where_one_side_is_empty() -> None:
    a, b = part(0), part(1)
    b = b[0].at[1].set(0), b[1].at[:, 1].set(-jnp.inf)
    (out, lse), vjp = jax.vjp(jax.jit(merge), *a, *b)
    gradients = vjp((jnp.ones_like(out), jnp.ones_like(lse)))
    assert all(np.isfinite(x).all() for x in gradients)
    assert np.array_equal(gradients[0][1], np.ones((2, 4)))
    assert not np.asarray(gradients[2][1]).any()


def test_nan_in_one_part_is_nan_in_the_whole() -> None:
    out, lse = merge(EMPTY[0].at[1].set(jnp.nan), jnp.zeros((2, 3)).at[0, 2].set(jnp.nan), *part(0))
    assert np.isnan(out).any(axis=2).tolist() == [[False, False], [True, True], [True, False]]
    assert np.isnan(lse).tolist() == [[False, False, True], [False, False, False]]


def test_the_parts_keep_their_dtype() -> None:
    a, b = part(0), part(1)
    out, lse = merge(a[0].astype(jnp.bfloat16), a[1], b[0].astype(jnp.bfloat16), b[1])
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_misfits_are_refused_in_one_message() -> None:
    a = part(0)
    with pytest.raises(ValueError, match="Pass parts of one call each") as error:
        merge(*a, a[0][:, :1], a[1])
    assert str(error.value).splitlines() == [
        "`out_a`, `out_b`: float32[3, 2, 4] and float32[3, 1, 4]. Both parts answer the same queries in one dtype. "
        "Pass parts of one call each over the same q.",
        "`out_b`, `lse_b`: shapes (3, 1, 4) and (2, 3). They are [T, N, Dv] and [N, T]. "
        "Pass both results of a call with return_softmax_lse=True.",
    ]


def test_attention_over_chunks_of_keys_merges_to_the_whole() -> None:
    """A causal segment of 40 rows whose keys come in two chunks, of 15 and 25; rows 0-14 see nothing of the second."""
    q, k, v, d_out = (jax.random.normal(key, (40, 2, 8)) for key in jax.random.split(jax.random.key(0), 4))
    cut = 15

    def whole(q, k, v):
        return packed_attention(q, k, v, Segments.from_lengths([40]), causal=True, return_softmax_lse=True)

    def chunked(q, k, v):
        # The last query lines up with the last key of the first chunk, so queries `i` and key `i` are 40 - cut apart.
        first = packed_attention(
            q, k[:cut], v[:cut], Segments.from_lengths([40], [cut]), window_size=(None, 40 - cut),
            return_softmax_lse=True,
        )  # fmt: skip
        second = packed_attention(
            q, k[cut:], v[cut:], Segments.from_lengths([40], [40 - cut]), causal=True, return_softmax_lse=True
        )
        return merge(*first, *second)

    results = []
    for attend in (whole, chunked):

        @partial(jax.jit, compiler_options=QUICK)
        def value_and_gradients(q, k, v, attend=attend):
            values, vjp = jax.vjp(attend, q, k, v)
            return *values, *vjp((d_out, jnp.sin(values[1])))

        results.append(value_and_gradients(q, k, v))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)
