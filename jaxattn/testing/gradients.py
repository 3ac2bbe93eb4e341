"""Gradients held against the oracle: which cotangents to send in, and whether what comes back is allowed."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxattn.testing.cases import NUMPY_DTYPES, Case, DTypeName
from jaxattn.testing.compare import Arithmetic, oracle_for, rows_that_see_nothing, ulp, visible_keys
from jaxattn.testing.gradient_oracle import Gradients, oracle_gradients
from jaxattn.testing.oracle import Wanted
from jaxattn.testing.plain_gradients import plain_kernel_gradients


def cotangents(case: Case, dtype: DTypeName) -> tuple[Float[np.ndarray, "Tq N Dv"], Float[np.ndarray, "N Tq"]]:
    """Standard normal cotangents of out (in `dtype`) and lse (float32, or float64), NaN wherever none may be read.

    Nobody may read those of tail rows and empty rows; that of an empty row's lse only for its sink.
    """
    rng = np.random.default_rng(case.seed + 1)
    (Tq, _), N = case.rows, case.heads[0]
    d_out, d_lse = rng.standard_normal((Tq, N, case.widths[1])), rng.standard_normal((N, Tq))
    d_out[rows_that_see_nothing(case)] = np.nan
    unread = np.arange(Tq) >= sum(case.q_lengths) if case.sinks else rows_that_see_nothing(case)
    d_lse[:, unread] = np.nan
    return d_out.astype(NUMPY_DTYPES[dtype]), d_lse.astype(np.float64 if dtype == "float64" else np.float32)


def gradient_problems(
    case: Case, dtype: DTypeName, got: Gradients, *, arithmetic: Arithmetic = "accumulate"
) -> list[str]:
    """What is wrong with the gradients for `cotangents(case, dtype)`, a sentence per array; [] when all is well.

    Rows of q that see nothing and rows of k and v that nobody sees must be exactly 0. Elsewhere the error of a head
    may be 4 x (16 + max |score|) ulp, of float32 (float64 for float64 input), of the largest wanted value of that
    head: the four products of the backward pass each carry the error of the forward. float16 and bfloat16 add four
    ulps of their own. With `arithmetic="kernel"` an array may be further off by three times the error of a plain run
    that rounds where fused kernels round. What the specification leaves open, around poison, is not looked at.
    """
    inputs = case.inputs(dtype)
    wanted = oracle_for(case, inputs)
    d_out, d_lse = cotangents(case, dtype)
    segments = case.segments
    want = oracle_gradients(
        inputs.q, inputs.k, inputs.v, segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist(), d_out, d_lse,
        sinks=inputs.sinks, **case.options,
    )  # fmt: skip
    compute: DTypeName = "float64" if dtype == "float64" else "float32"
    plain = want
    if arithmetic == "kernel":
        plain = plain_kernel_gradients(case, inputs, dtype, d_out, d_lse)
    steps = 16 + wanted.largest_score
    group_steps = steps.reshape(case.heads[1], -1).max(axis=1)
    unseen = _keys_nobody_sees(case)
    problems = []
    for name, zero, head_steps in (
        ("q", rows_that_see_nothing(case), steps),
        ("k", unseen, group_steps),
        ("v", unseen, group_steps),
    ):
        g, w = getattr(got, name), getattr(want, name)
        if g.shape != w.shape or g.dtype != NUMPY_DTYPES[dtype]:
            problems.append(f"`d{name}` is {g.dtype}{list(g.shape)} where {dtype}{list(w.shape)} is due.")
            continue
        if not (np.asarray(g[zero], np.float64) == 0).all():
            problems.append(f"`d{name}` is not exactly 0 in every row that takes no part.")
        rounding = 3 * np.abs(getattr(plain, name) - w)
        problems += _far(f"d{name}", np.asarray(g, np.float64), w, head_steps, dtype, compute, rounding)
    if want.sinks is not None:
        sinks_dtype: DTypeName = "float32"
        problems += _far(
            "dsinks", np.asarray(got.sinks, np.float64)[None, :, None], want.sinks[None, :, None], steps,
            sinks_dtype, sinks_dtype, _sinks_rounding(case, wanted, d_out, dtype) if arithmetic == "kernel" else np.zeros(1),
        )  # fmt: skip
    return problems


def _sinks_rounding(case: Case, wanted: Wanted, d_out: Any, dtype: DTypeName) -> Any:
    """What dsinks may be off by where out is rounded to `dtype` twice before it: without its sink, and with it.

    dsinks adds p_sink * (dlse - <d_out, out>) over the rows, and each rounding is half an ulp of out.
    """
    rows = ~rows_that_see_nothing(case)
    sinks = case.inputs(dtype).sinks
    assert sinks is not None
    share = np.exp(sinks[:, None] - wanted.lse[:, rows])
    through_out = np.abs(np.asarray(d_out[rows], np.float64) * wanted.out[rows]).sum(axis=-1)
    return ulp(np.ones(1), dtype) * (share * through_out.T).sum(axis=1)[None, :, None]


def _far(name: str, got: Any, want: Any, steps: Any, dtype: DTypeName, compute: DTypeName, rounding: Any) -> list[str]:
    specified = ~np.isnan(want)
    largest = np.where(specified, np.abs(want), 0).max(axis=(0, 2), initial=0)
    allowed = 4 * (steps * ulp(largest, compute) + (ulp(largest, dtype) if dtype != compute else 0))
    allowed = allowed + np.where(specified & np.isfinite(rounding), rounding, 0).max(axis=(0, 2), initial=0)
    error = np.where(specified, np.abs(got - want), 0)
    error = np.where(np.isnan(error), np.inf, error)
    share = error / allowed[:, None]
    if not share.size or share.max() <= 1:
        return []
    row, head, i = (int(at) for at in np.unravel_index(share.argmax(), share.shape))
    return [
        f"`{name}` is off by {share.max():.3g} times what is allowed at row {row}, head {head}: "
        f"got {got[row, head, i]:.6g}, want {want[row, head, i]:.6g}."
    ]


def _keys_nobody_sees(case: Case) -> Bool[np.ndarray, " Tk"]:
    unseen = np.ones(case.rows[1], bool)
    for keys in visible_keys(case):
        unseen[keys.start : keys.stop] = False
    return unseen
