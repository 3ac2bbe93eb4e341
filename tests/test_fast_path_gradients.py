"""Gradients of the fast path equal those of the specification, through out and through lse."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from one_shape import QUICK, padded

from jaxattn import Segments, packed_attention, reference_attention
from jaxattn.testing import Case
from jaxattn.testing.compare import rows_that_see_nothing, ulp

CASES = (
    Case("short segments, empty rows, tails", (9, 1, 30), (4, 0, 50), q_tail=3, k_tail=2, heads=(4, 2), causal=True),
    Case("several tiles, grouped heads", (300, 0, 140), q_tail=5, heads=(4, 2), causal=True),
    Case(
        "window, softcap and sinks over several tiles", (290, 40, 5), (420, 20, 0), q_tail=4, k_tail=9, heads=(4, 2),
        widths=(16, 32), window_size=(200, 30), softcap=2.0, sinks=True,
    ),
)  # fmt: skip


def gradients(attention: Any, case: Case, dtype: Any, inputs_dtype: Any, empty: float) -> list[np.ndarray]:
    """dq, dk, dv, dsinks in `dtype`, of inputs and cotangents rounded to `inputs_dtype`; `empty` in empty rows."""
    (q, k, v, sinks), segments = padded(case, inputs_dtype, fill=0)
    rng = np.random.default_rng(1)
    d_out = np.asarray(rng.standard_normal((len(q), case.heads[0], v.shape[2])), q.dtype)
    d_lse = rng.standard_normal((case.heads[0], len(q))).astype(np.float32)
    nothing = np.ones(len(q), bool)
    nothing[: case.rows[0]] = rows_that_see_nothing(case)
    d_out[nothing] = empty
    d_lse[:, nothing] = 0 if case.sinks else empty
    arrays = [x.astype(dtype) for x in (q, k, v)] + ([] if sinks is None else [sinks.astype(jnp.float32)])

    @partial(jax.jit, compiler_options=QUICK)
    def pull_back(arrays, segments, d_out, d_lse):
        def attend(q, k, v, *sinks):
            out, lse = attention(
                q, k, v, segments, sinks=sinks[0] if sinks else None, return_softmax_lse=True, **case.options
            )
            return out, lse

        (_, lse), vjp = jax.vjp(attend, *arrays)
        return vjp((d_out.astype(dtype), d_lse.astype(lse.dtype)))

    return [np.asarray(x, np.float64) for x in pull_back(arrays, segments, d_out, d_lse)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(CASES[0], "float32"), (CASES[1], "float32"), (CASES[2], "float32"), (CASES[1], "bfloat16")],
    ids=lambda x: getattr(x, "name", x),
)
def test_gradients_equal_the_reference(case: Case, dtype: str) -> None:
    """By the tolerance policy: 4 x (16 + max|s|) ulp of float32, and of the rounding of the result."""
    got = gradients(packed_attention, case, dtype, dtype, empty=np.nan)
    with jax.enable_x64(True):
        wanted = gradients(reference_attention, case, "float64", dtype, empty=0.0)
    largest_score = 8
    for name, x, y in zip(("dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        largest = np.abs(y).max()
        allowed = 4 * ((16 + largest_score) * ulp(largest, "float32") + (dtype == "bfloat16") * ulp(largest, dtype))
        assert np.abs(x - y).max() <= allowed, name
        assert np.array_equal(x[np.abs(y) == 0], y[np.abs(y) == 0]), f"{name} is not 0 where it must be"


@pytest.mark.parametrize("attention", [packed_attention, reference_attention])
def test_check_grads_in_float64(attention: Any) -> None:
    """Empty rows, tails, grouped heads, a window, softcap, sinks, and a loss that uses lse."""
    segments = Segments.from_lengths([5, 3, 2], [3, 0, 4])
    with jax.enable_x64(True):
        shapes = (12, 4, 3), (9, 2, 3), (9, 2, 2), (4,)
        arrays = [
            jax.random.normal(key, n) for key, n in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
        ]

        def loss(q, k, v, sinks):
            out, lse = attention(
                q, k, v, segments, sinks=sinks, window_size=(2, 1), softcap=1.5, return_softmax_lse=True
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0))

        modes = ["rev"] if attention is packed_attention else ["fwd", "rev"]
        check_grads(jax.jit(loss), arrays, order=1, modes=modes)


def test_lse_cotangent_of_empty_rows_reaches_the_sink_alone() -> None:
    segments = Segments.from_lengths([3], [0])
    q, k, v = jnp.ones((5, 1, 4)), jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4))

    def lse(q, k, v, sinks):
        return packed_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True)[1]

    def pull_back(*args):
        values, vjp = jax.vjp(lse, *args)
        return values, vjp(jnp.array([[1.0, 2.0, 3.0, np.nan, np.nan]]))

    values, (*others, d_sinks) = jax.jit(pull_back, compiler_options=QUICK)(q, k, v, jnp.array([0.5]))
    assert values.tolist() == [[0.5, 0.5, 0.5, -np.inf, -np.inf]]
    assert d_sinks.tolist() == [6.0]
    assert not any(np.asarray(x).any() for x in others)
