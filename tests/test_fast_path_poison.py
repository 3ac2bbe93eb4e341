"""A NaN or an Inf reaches exactly the rows that see it; every other value and gradient keeps its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_shape import padded

from jaxattn import packed_attention
from jaxattn.testing import Case
from jaxattn.testing.compare import visible_keys

# Three segments over several tiles, so that the poisoned rows share tiles with rows that do not see them.
CASE = Case(
    "three segments", (150, 40, 70), (150, 0, 100), q_tail=5, k_tail=6, heads=(4, 2), widths=(16, 16), causal=True,
    window_size=(60, 0), sinks=True,
)  # fmt: skip
POISON = {
    "k": [("k", 20, 1, np.nan)],
    "v": [("v", 200, 0, np.inf)],
    "q": [("q", 30, 2, -np.inf)],
    "q of an empty row": [("q", 160, 2, np.nan)],
    "tails": [("q", 262, 0, np.nan), ("k", 252, 0, np.inf), ("v", 255, 1, np.nan)],
    "sinks": [("sinks", 0, 3, np.nan)],
    "several": [("k", 149, 0, np.nan), ("q", 0, 0, np.nan), ("v", 249, 1, -np.inf)],
}


@jax.jit
def values_and_gradients(q, k, v, sinks, segments, d_out, d_lse):
    def attend(q, k, v, sinks):
        return packed_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **CASE.options)

    values, vjp = jax.vjp(attend, q, k, v, sinks)
    return values, vjp((d_out, d_lse))


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_poison_reaches_what_sees_it_and_nothing_else(poison: list[tuple[str, int, int, float]]) -> None:
    arrays, segments = padded(CASE, "float32", fill=1.0)
    names = ("q", "k", "v", "sinks")
    rows, heads = len(arrays[0]), CASE.heads[0]
    cotangents = jax.random.normal(jax.random.key(1), (rows, heads, 16)), jnp.ones((heads, rows))
    clean, poisoned = dict(zip(names, arrays, strict=True)), dict(zip(names, arrays, strict=True))
    for name, row, head, value in poison:
        at = (head,) if name == "sinks" else (row, head, 3)
        clean[name], poisoned[name] = clean[name].at[at].set(0.0), poisoned[name].at[at].set(value)
    wanted, wanted_gradients = values_and_gradients(*clean.values(), segments, *cotangents)
    got, got_gradients = values_and_gradients(*poisoned.values(), segments, *cotangents)

    out_nan, lse_nan, free = reached(poison, rows)
    out, lse = np.asarray(got[0]), np.asarray(got[1])
    assert np.isnan(out[out_nan]).all()
    assert np.isnan(lse.T[lse_nan]).all()
    assert np.array_equal(out[~out_nan], np.asarray(wanted[0])[~out_nan])
    assert np.array_equal(lse.T[~lse_nan], np.asarray(wanted[1]).T[~lse_nan])
    for name, x, y in zip(names, got_gradients, wanted_gradients, strict=True):
        keep = ~free[name]
        assert np.array_equal(np.asarray(x)[keep], np.asarray(y)[keep]), f"d{name}"


def reached(
    poison: list[tuple[str, int, int, float]], rows: int
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Rows and heads whose out and lse are NaN, and the gradients that may be anything."""
    seen = visible_keys(CASE) + [range(0)] * (rows - CASE.rows[0])
    (N, K), in_segment = CASE.heads, int(CASE.segments.cu_seqlens_q[-1])
    out_nan, lse_nan = np.zeros((rows, N), bool), np.zeros((rows, N), bool)
    free = {"q": out_nan, "k": np.zeros((rows, K), bool), "v": np.zeros((rows, K), bool), "sinks": np.zeros(N, bool)}
    for name, at, head, _ in poison:
        for row, keys in enumerate(seen):
            heads = slice(head * N // K, (head + 1) * N // K) if name in "kv" else slice(head, head + 1)
            sees = {"sinks": row < in_segment, "q": row == at and len(keys) > 0}
            hit = sees.get(name, at in keys)
            out_nan[row, heads] |= hit
            lse_nan[row, heads] |= hit and name != "v"
    for row, keys in enumerate(seen):
        for head in np.flatnonzero(out_nan[row]):
            free["sinks"][head] = True
            free["k"][list(keys), head // (N // K)] = free["v"][list(keys), head // (N // K)] = True
    return out_nan, lse_nan, free
