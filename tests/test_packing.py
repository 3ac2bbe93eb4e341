"""Packing keeps every token, its dtype and its gradient, and unpacking is its inverse."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import Segments, pack, pack_padded, reference_attention, unpack, unpack_padded
from jaxattn.testing.strategies import lengths

quick = settings(deadline=None, max_examples=40, derandomize=True)
masks = st.lists(st.booleans(), min_size=12, max_size=12).map(lambda bits: np.array(bits).reshape(3, 4))

BATCH = {"ids": np.arange(12).reshape(3, 4), "x": np.linspace(0, 1, 24, dtype=np.float32).reshape(3, 4, 2)}
HOLES = np.array([[True, False, True, False], [False] * 4, [False, True, True, True]])


def same(a, b) -> bool:
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        type(x) is type(y) and x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs
    )


@quick
@given(lengths(4, 9))
def test_unpack_is_the_inverse_of_pack(sizes: list[int]) -> None:
    sequences = [{"ids": np.arange(n) + 10 * n, "x": np.full((n, 2), n, np.float16)} for n in sizes]
    packed, segments = pack(sequences, total=9, num_segments=5)
    assert segments.q_lengths.tolist() == [*sizes, 0]
    assert not packed["ids"][sum(sizes) :].any()
    assert len(packed["x"]) == 9
    *back, padding = unpack(packed, segments)
    assert all(same(got, want) for got, want in zip(back, sequences, strict=True))
    assert len(padding["ids"]) == 0


@quick
@given(masks, st.integers(0, 2))
def test_unpack_padded_is_the_inverse_of_pack_padded(mask, tail: int) -> None:
    total = int(mask.sum()) + tail
    packed, segments = pack_padded(BATCH, mask, total=total)
    assert segments.q_lengths.tolist() == mask.sum(axis=1).tolist()
    assert packed["ids"].tolist() == BATCH["ids"][mask].tolist() + [0] * tail
    back = unpack_padded(packed, mask, fill=-7)
    assert same(
        back, jax.tree.map(lambda x: np.where(mask.reshape(3, 4, *(1,) * (x.ndim - 2)), x, x.dtype.type(-7)), BATCH)
    )


@jax.jit
def there_and_back(batch, mask):
    packed, segments = pack_padded(batch, mask, total=12)
    return packed, segments, unpack_padded(packed, mask, fill=-7)


@quick
@given(masks)
def test_traced_masks_give_what_masks_of_the_host_give(mask) -> None:
    packed, segments, back = there_and_back(BATCH, mask)
    want, want_segments = pack_padded(BATCH, mask, total=12)
    assert segments.same_as(want_segments)
    for got, wanted in ((packed, want), (back, unpack_padded(want, mask, fill=-7))):
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float16, ml_dtypes.bfloat16, np.float64, bool])
def test_dtypes_stay_and_numpy_stays_numpy(dtype) -> None:
    x = np.ones((3, 4, 1), dtype)
    assert same(pack([x[0], x[1]], total=9)[0], np.concatenate([np.ones((8, 1), dtype), np.zeros((1, 1), dtype)]))
    packed, _ = pack_padded(x, HOLES, total=6)
    assert same(packed, np.array([[1]] * 5 + [[0]], dtype))
    assert same(unpack_padded(packed, HOLES), np.where(HOLES[..., None], x, np.zeros((), dtype)))


def test_jax_arrays_stay_jax_arrays_and_are_packed_inside_jit() -> None:
    @jax.jit
    def packed_twice(a, b):
        packed, segments = pack([a, b], total=6)
        assert segments.is_concrete  # lengths are shapes
        return packed, unpack(packed, segments)

    packed, back = packed_twice(jnp.ones(2, jnp.bfloat16), jnp.zeros((3,), jnp.bfloat16))
    assert (packed.dtype, packed.tolist()) == (jnp.bfloat16, [1, 1, 0, 0, 0, 0])
    assert [x.shape for x in back] == [(2,), (3,)]


def test_padding_is_never_read_and_gets_no_gradient() -> None:
    x = np.where(HOLES[..., None], [2.0, 2.0, 2.0], np.nan).astype(np.float32)

    def loss(x, mask):
        packed, segments = pack_padded(x[:, :, None], mask, total=7)
        return jnp.sum(unpack_padded(reference_attention(packed, packed, packed, segments), mask) ** 2)

    value, gradient = jax.jit(jax.value_and_grad(loss))(x, HOLES)
    assert value == 5 * 3 * 2**2
    assert np.isfinite(gradient).all()
    assert np.array_equal(gradient != 0, np.broadcast_to(HOLES[..., None], x.shape))


def test_nan_cotangents_of_the_tail_and_of_padding_are_never_read() -> None:
    x, mask = jnp.ones((3, 4)), jnp.asarray(HOLES)
    _, back = jax.vjp(lambda x: pack_padded(x, HOLES, total=7)[0], x)
    assert back(jnp.array([1.0] * 5 + [np.nan] * 2))[0].tolist() == HOLES.astype(float).tolist()
    _, back = jax.vjp(lambda x: unpack_padded(x, HOLES), jnp.ones(7))
    assert back(jnp.where(mask, 1, jnp.nan))[0].tolist() == [1.0] * 5 + [0.0] * 2


def test_packed_attention_equals_attention_over_the_padded_batch() -> None:
    @jax.jit
    def both(q, k, v):
        packed, segments = pack_padded((q, k, v), HOLES, total=12)
        got = unpack_padded(reference_attention(*packed, segments), HOLES)
        return got, jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(HOLES)[:, None, None, :])

    got, want = both(*np.random.default_rng(1).standard_normal((3, 3, 4, 1, 8)).astype(np.float32))
    np.testing.assert_allclose(got[HOLES], want[HOLES], rtol=2e-5, atol=2e-6)


def test_more_tokens_than_rows_is_loud_when_traced() -> None:
    @jax.jit
    def run(x, ids, mask):
        (packed, packed_ids), segments = pack_padded((x, ids), mask, total=4)
        out = reference_attention(*(jnp.ones((4, 1, 2)),) * 3, segments)
        return packed, packed_ids, out, unpack_padded(jnp.ones(4), mask)

    for mask, loud in ((HOLES, True), (HOLES & (np.arange(4) > 0), False)):
        packed, ids, out, back = run(BATCH["x"], BATCH["ids"], mask)
        assert [bool(jnp.isnan(x).all()) for x in (packed, out, back)] == [loud] * 3
        assert [bool(jnp.isnan(x).any()) for x in (packed, out, back)] == [loud] * 3
        assert ids.tolist() == BATCH["ids"][mask][:4].tolist()


def test_batches_under_vmap() -> None:
    both = np.stack([HOLES, HOLES[::-1]])
    pack_each = jax.jit(jax.vmap(lambda x, mask: pack_padded(x, mask, total=6)))
    packed, segments = pack_each(np.stack([BATCH["ids"]] * 2), both)
    assert packed.tolist() == [[*BATCH["ids"][mask].tolist(), 0] for mask in both]
    assert segments.cu_seqlens_q.tolist() == [[0, 2, 2, 5], [0, 3, 3, 5]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_batches_without_slots(shape: tuple[int, int]) -> None:
    x, mask = np.ones((*shape, 2), np.float32), np.ones(shape, bool)
    for go in (lambda x, mask: pack_padded(x, mask, total=2), jax.jit(lambda x, mask: pack_padded(x, mask, total=2))):
        packed, segments = go(x, mask)
        assert packed.tolist() == [[0, 0], [0, 0]]
        assert segments.num_segments == shape[0]
        assert unpack_padded(packed, mask).shape == x.shape


def test_the_sides_of_cross_attention_are_packed_apart() -> None:
    _, a = pack([np.ones(2), np.ones(1)])
    _, b = pack([np.ones(5), np.ones(0)])
    both = Segments.from_cu_seqlens(a.cu_seqlens_q, b.cu_seqlens_q)
    assert both.same_as(Segments.from_lengths([2, 1], [5, 0]))
