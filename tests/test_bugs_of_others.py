"""What attention has been reported to get wrong in public, each with an input small enough to check by hand.

Each is one example of a kind; the kinds are tested as properties and as the case table elsewhere. Values are asked of
the reference, to which the other implementations are held.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from jaxattn import Segments, draw, merge, packed_attention, reference_attention
from jaxattn.testing import Case, compare

IMPLEMENTATIONS: list[Callable[..., Any]] = [reference_attention, packed_attention]
"""For what is decided without compiling."""


@partial(jax.jit, static_argnames=("causal", "softmax_scale"))
def attention(q, k, v, segments, **options):
    """out and lse, segments traced."""
    return reference_attention(q, k, v, segments, return_softmax_lse=True, **options)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def qkv(Tq: int, Tk: int | None = None, N: int = 1, D: int = 4) -> list[np.ndarray]:
    return [normal(Tq, N, D), normal(Tk or Tq, N, D) + 1, normal(Tk or Tq, N, D) - 1]


def same_bits(a, b) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_rows_before_the_first_key_are_0_with_lse_minus_infinity_and_gradients_without_nan() -> None:
    segments = Segments.from_lengths([5], [2])
    values, pull_back = jax.vjp(lambda *x: attention(*x, segments, causal=True), *qkv(5, 2))
    out, lse = values
    assert not out[:3].any()
    assert lse[0, :3].tolist() == [-np.inf] * 3
    assert np.isfinite(out[3:]).all()
    dq, dk, dv = pull_back((jnp.ones_like(out), jnp.ones_like(lse)))
    assert not dq[:3].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))
    np.testing.assert_allclose(dv.sum(), 2 * 4, rtol=1e-6)  # the weights of two rows


def test_nan_in_the_tail_does_not_reach_the_next_layer() -> None:
    segments = Segments.from_cu_seqlens([0, 5])
    x = normal(8, 1, 4)
    x[5:] = np.nan
    for _ in range(2):
        x, _ = attention(x, x, x, segments)
        assert np.isfinite(x).all()
        assert not x[5:].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_hidden_keys_near_the_largest_number_change_nothing(dtype: str) -> None:
    q, k, v = (jnp.asarray(x, dtype) for x in qkv(6))
    segments, largest = Segments.from_lengths([2, 4]), float(jnp.finfo(dtype).max)
    hidden = np.array([False, False, False, True, True, True])[:, None, None]
    huge = [jnp.where(hidden, largest * jnp.sign(x), x).astype(dtype) for x in (q, k, v)]
    want, want_lse = attention(q, k, v, segments, causal=True)
    got, got_lse = attention(huge[0].at[:3].set(q[:3]), *huge[1:], segments, causal=True)
    assert same_bits(got[:3], want[:3])
    assert same_bits(got_lse[:, :3], want_lse[:, :3])


def test_hidden_keys_near_the_largest_number_change_no_gradient_under_softcap() -> None:
    q, k, v = qkv(6)
    segments, largest = Segments.from_lengths([3, 3]), np.finfo(np.float32).max

    @jax.jit
    def gradients(q, k, v):
        def loss(q, k, v):
            return jnp.sum(reference_attention(q, k, v, segments, softcap=2.0)[:3] ** 2)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    huge = [np.where(np.arange(6)[:, None, None] < 3, x, largest * np.sign(x)) for x in (q, k, v)]
    for got, want in zip(gradients(*huge), gradients(q, k, v), strict=True):
        assert same_bits(got[:3], want[:3])


def test_a_window_and_causal_hold_together_and_a_window_needs_no_mask() -> None:
    segments = Segments.from_lengths([6])
    assert draw(segments, window_size=(2, 0)).splitlines()[-1] == "q5 . . . x x x"
    assert draw(segments, causal=True, window_size=(4, 3)) == draw(segments, window_size=(4, 0))


def test_a_reach_of_two_is_three_keys_also_on_unequal_lengths() -> None:
    assert draw(Segments.from_lengths([2], [6]), window_size=(2, 0)).splitlines()[1:] == [
        "q0 . . x x x .",
        "q1 . . . x x x",
    ]


def test_no_keys_anywhere_give_zeros_of_the_width_of_v() -> None:
    out, lse = attention(normal(3, 2, 4), normal(2, 2, 4), normal(2, 2, 6), Segments.from_lengths([0, 0]))
    assert np.array_equal(out, np.zeros((3, 2, 6)))
    assert np.array_equal(lse, np.full((2, 3), -np.inf))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_in_a_value_leaves_rows_that_do_not_see_it_bit_for_bit(poison: float) -> None:
    q, k, v = qkv(5)
    segments = Segments.from_lengths([3, 2])
    want, want_lse = attention(q, k, v, segments)
    v[4, 0, 1] = poison
    out, lse = attention(q, k, v, segments)
    assert same_bits(out[:3], want[:3])
    assert np.isnan(out[3:]).all()
    assert same_bits(lse, want_lse)


def test_poison_in_the_tail_leaves_everything_bit_for_bit_and_gets_no_gradient() -> None:
    clean, segments = qkv(8), Segments.from_cu_seqlens([0, 5])
    poisoned = [np.where(np.arange(8)[:, None, None] < 5, x, np.nan).astype(np.float32) for x in clean]
    want, pull_back = jax.vjp(lambda *x: attention(*x, segments), *clean)
    got, pull_back_poisoned = jax.vjp(lambda *x: attention(*x, segments), *poisoned)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    cotangent = jnp.ones_like(want[0]).at[5:].set(jnp.nan), jnp.ones_like(want[1]).at[:, 5:].set(jnp.nan)
    for a, b in zip(pull_back_poisoned(cotangent), pull_back(cotangent), strict=True):
        assert same_bits(a, b)
        assert not a[5:].any()


def test_segments_empty_on_one_side_lose_their_turn_and_nothing_else() -> None:
    segments = Segments.from_cu_seqlens([0, 2, 2, 4], [0, 0, 3, 5])
    assert draw(segments).splitlines() == [
        "k  0 1 2 | 3 4",
        "q0 . . . | . .",
        "q1 . . . | . .",
        "-- ----- | ---",
        "q2 . . . | x x",
        "q3 . . . | x x",
    ]


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 4, 8, 12], "the last offset is 12, past the 4 rows of `q`"),
        ([1, 4], "the first offset is 1"),
        ([0, 3, 2, 4], "offset 2 follows 3 at index 2"),
        ([[0, 4]], "offsets of shape (1, 2)"),
        ([0.0, 4.0], "offsets of dtype float"),
    ],
)
def test_impossible_offsets_are_refused_before_anything_runs(offsets, said: str) -> None:
    leaf = np.array(offsets) if isinstance(offsets[0], float) else np.array(offsets, np.int32)
    broken = jax.tree.unflatten(jax.tree.structure(Segments.from_lengths([1])), [leaf, np.array([0, 2, 9], np.int32)])
    x = np.ones((4, 1, 2), np.float32)
    for implementation in IMPLEMENTATIONS:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            implementation(x, x, x, broken)
        first, second = str(caught.value).splitlines()  # all at once
        assert said in first
        assert "`cu_seqlens_k`: the last offset is 9, past the 4 rows of `k`" in second


def test_nobody_is_asked_for_a_longest_length() -> None:
    for name in jaxattn.__all__:
        assert not [p for p in inspect.signature(getattr(jaxattn, name)).parameters if "max" in p and "soft" not in p]


@pytest.mark.parametrize(
    ("q", "k", "rows"),
    [
        ([1], [5], ["x x x x x"]),
        ([2], [5], ["x x x x .", "x x x x x"]),
        ([1, 3], [3, 2], ["x x x | . .", ". . . | . .", ". . . | x .", ". . . | x x"]),
    ],
    ids=["one query", "two queries", "per segment, not by the longest"],
)
def test_the_last_query_lines_up_with_the_last_key(q: list[int], k: list[int], rows: list[str]) -> None:
    drawn = [line[3:] for line in draw(Segments.from_lengths(q, k), causal=True).splitlines() if line[0] == "q"]
    assert drawn == rows


def test_grouped_heads_repeat_and_their_gradients_add_up() -> None:
    q, k = normal(2, 4, 3), normal(2, 2, 3)
    v = np.ones((2, 2, 3), np.float32) * np.arange(2)[:, None]
    segments = Segments.from_lengths([2])
    assert attention(q, k, v, segments)[0][0, :, 0].tolist() == pytest.approx([0, 0, 1, 1])
    grouped = jax.grad(lambda *x: jnp.sum(attention(*x, segments)[0] ** 2), (1, 2))(q, k, v)
    repeated = jax.grad(lambda *x: jnp.sum(attention(*x, segments)[0] ** 2), (1, 2))(
        q, *(x.repeat(2, 1) for x in (k, v))
    )
    for one, each in zip(grouped, repeated, strict=True):
        np.testing.assert_allclose(one, each.reshape(2, 2, 2, 3).sum(2), rtol=1e-5, atol=1e-6)


def test_the_lse_is_a_natural_log_so_that_parts_merge() -> None:
    segments = Segments.from_lengths([1, 1], [1, 4])
    zeros = np.zeros((5, 1, 1), np.float32)
    assert attention(zeros[:2], zeros, zeros, segments)[1][0].tolist() == pytest.approx([0, 1.386294], abs=1e-6)
    many, one = np.zeros((3136, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    a = attention(one, many[:64], many[:64] + 1, Segments.from_lengths([1], [64]))
    b = attention(one, many[64:], many[64:], Segments.from_lengths([1], [3072]))
    assert merge(*a, *b)[0].item() == pytest.approx(64 / 3136, rel=1e-5)


def test_gradients_of_merged_parts_are_those_of_the_whole() -> None:
    q, k, v = qkv(2, 6)
    whole, left, right = (Segments.from_lengths([2], [n]) for n in (6, 2, 4))

    def in_parts(q, k, v):
        return merge(*attention(q, k[:2], v[:2], left), *attention(q, k[2:], v[2:], right))

    cotangent = (normal(2, 1, 4), normal(1, 2))
    got = jax.vjp(in_parts, q, k, v)[1](cotangent)
    want = jax.vjp(lambda *x: attention(*x, whole), q, k, v)[1](cotangent)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_lse_is_float32_with_heads_first(dtype: str) -> None:
    x = jnp.ones((3, 2, 4), dtype)
    out, lse = attention(x, x, x, Segments.from_lengths([3]))
    assert (out.dtype, out.shape) == (dtype, (3, 2, 4))
    assert (lse.dtype, lse.shape) == (jnp.float32, (2, 3))


def test_logits_in_bfloat16_are_not_good_enough() -> None:
    case = Case("one long segment, sharp", (512,), heads=(1, 1), gain=4.0)
    inputs = case.inputs("bfloat16")
    out, lse = attention(inputs.q, inputs.k, inputs.v, case.segments)
    assert compare(case, "bfloat16", np.asarray(out), np.asarray(lse)).passed

    def careless(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) * jnp.bfloat16(q.shape[-1] ** -0.5))
        return jnp.einsum("hqk,khd->qhd", weights, v)

    out = np.asarray(careless(*(jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v))))
    assert not compare(case, "bfloat16", out, np.asarray(lse)).passed


def test_sizes_past_int32_are_ordinary_numbers() -> None:
    T = 46342  # the square is past 2**31
    x = jax.ShapeDtypeStruct((T, 1, 1), jnp.float32)
    for implementation in IMPLEMENTATIONS:
        out = jax.eval_shape(lambda x, f=implementation: f(x, x, x, Segments.from_lengths([T])), x)
        assert out.shape == (T, 1, 1)
    assert draw(Segments.from_lengths([1]), window_size=(2**40, 2**40)) == "k  0\nq0 x"
    assert Segments.from_lengths([2**30, 2**30 - 1]).cu_seqlens_q[-1] == 2**31 - 1


def test_a_width_of_80_keeps_its_own_scale() -> None:
    q, k, v = qkv(4, D=80)
    out, _ = attention(q, k, v, Segments.from_lengths([4]))
    padded = [np.pad(x, ((0, 0), (0, 0), (0, 48))) for x in (q, k, v)]
    want, _ = attention(*padded, Segments.from_lengths([4]), softmax_scale=80**-0.5)
    np.testing.assert_allclose(out, want[..., :80], rtol=1e-5, atol=1e-6)
    other, _ = attention(*padded, Segments.from_lengths([4]))
    assert np.abs(other[..., :80] - out).max() > 0.01
