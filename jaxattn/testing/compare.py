"""How far an answer is from the oracle's, in ulps, and whether that is allowed."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxattn.testing.cases import NUMPY_DTYPES, Case, DTypeName, Inputs
from jaxattn.testing.oracle import Wanted, oracle_attention

_MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
_SMALLEST_EXPONENT = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}

Arithmetic = Literal["accumulate", "kernel"]
"""What rounds: "accumulate" keeps everything in float32 (float64 for float64 input) and rounds the result once;
"kernel" also rounds the unnormalised weights to the input dtype before they meet v, as fused attention kernels do."""


class Tolerance(NamedTuple):
    """The largest error allowed, absolute, in float64."""

    out: Float[np.ndarray, " N"]
    lse: Float[np.ndarray, "N Tq"]


@dataclass(frozen=True)
class Comparison:
    """One answer held against the oracle. Emptiness, infinities and NaN are compared exactly, numbers in ulps."""

    max_ulps: float
    """The largest error of out, in ulps of its dtype at the largest wanted value of that head."""
    allowed_ulps: float
    """What that head allows, in the same unit."""
    lse_max_ulps: float
    """The largest error of lse, in float32 (float64 for float64 input) ulps of max(1, |lse|)."""
    lse_allowed_ulps: float
    emptiness_equal: bool
    """Whether exactly the rows that must be 0 and -inf (or the sink) are."""
    worst: str
    """Where the largest error relative to what is allowed sits, as `segment 1, row 3, head 0`; "" when all is exact."""
    problems: tuple[str, ...]
    """What is wrong, one sentence each; empty when the answer passes."""

    @property
    def passed(self) -> bool:
        return not self.problems


def compare(
    case: Case,
    dtype: DTypeName,
    out: Float[np.ndarray, "Tq N Dv"],
    lse: Float[np.ndarray, "N Tq"],
    *,
    arithmetic: Arithmetic = "accumulate",
    poison: Literal["row", "segment"] = "row",
    wanted: Wanted | None = None,
) -> Comparison:
    """Hold `out` and `lse`, computed from `case.inputs(dtype)`, against the float64 oracle.

    Args:
        case: the packing and options that were run.
        dtype: the dtype of the inputs and of out.
        out: `[Tq, N, Dv]`, the answer in `dtype`.
        lse: `[N, Tq]`, float32 (float64 for float64 input).
        arithmetic: which precision the implementation claims; decides the tolerance.
        poison: what the implementation promises of non-finite elements: "row", the specification, or "segment",
            where any row that shares a segment and head group with one may become non-finite.
        wanted: the oracle's answer when it is at hand already.
    """
    inputs = case.inputs(dtype)
    wanted = oracle_for(case, inputs) if wanted is None else wanted
    lse_dtype: DTypeName = "float64" if dtype == "float64" else "float32"
    problems = [
        f"`{name}` is {got.dtype}{list(got.shape)} where {want_dtype}{list(want.shape)} is due."
        for name, got, want, want_dtype in (("out", out, wanted.out, dtype), ("lse", lse, wanted.lse, lse_dtype))
        if got.shape != want.shape or got.dtype != NUMPY_DTYPES[want_dtype]
    ]
    if problems:
        return Comparison(np.inf, 0.0, np.inf, 0.0, False, "", tuple(problems))

    out64, lse64 = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    # A row that sees nothing is empty, unless the sink of its head is poisoned.
    empty = rows_that_see_nothing(case)[:, None] & ~np.isnan(wanted.lse).T
    free = np.zeros((*out.shape[:2],), bool)
    if poison == "segment":
        free = case.poisoned_segments() & ~empty
    allowed = tolerance(case, inputs, wanted, dtype, arithmetic)

    out_error = np.where(free[..., None], 0, _error(out64, wanted.out)).max(axis=-1, initial=0)
    lse_error = np.where(free.T, 0, _error(lse64, wanted.lse))
    with np.errstate(divide="ignore", invalid="ignore"):
        out_share = np.where(out_error == 0, 0, out_error / allowed.out)
        lse_share = np.where(lse_error == 0, 0, lse_error / allowed.lse)

    lse_want_empty = np.isneginf(wanted.lse)
    emptiness_equal = bool(
        (out64[empty] == 0).all() and np.array_equal(np.isneginf(lse64) & ~free.T, lse_want_empty & ~free.T)
    )
    if not emptiness_equal:
        problems.append("Rows that see no key are not exactly those with out 0 and lse -inf.")
    for name, share, got, want in (("out", out_share, out64, wanted.out), ("lse", lse_share.T, lse64, wanted.lse)):
        if share.size and (worst := share.max()) > 1:
            row, head = (int(at) for at in np.unravel_index(share.argmax(), share.shape))
            index = (row, head) if name == "out" else (head, row)
            problems.append(
                f"`{name}` is off by {worst:.3g} times what is allowed at {place(case, row, head)}: "
                f"{_first(got[index], want[index])}."
            )
    head = int(out_share.max(axis=0, initial=0).argmax()) if out_share.size else 0
    unit = ulp(_largest(wanted.out), dtype)
    lse_unit = ulp(np.where(np.isfinite(wanted.lse), np.maximum(1, np.abs(wanted.lse)), 1), lse_dtype)
    worst_share = np.maximum(out_share, lse_share.T)
    worst_at = np.unravel_index(worst_share.argmax(), worst_share.shape) if worst_share.size else (0, 0)
    return Comparison(
        max_ulps=float((out_error / unit).max(initial=0)),
        allowed_ulps=float((allowed.out / unit)[head]) if unit.size else 0.0,
        lse_max_ulps=float((lse_error / lse_unit).max(initial=0)),
        lse_allowed_ulps=float((allowed.lse / lse_unit).max(initial=0)),
        emptiness_equal=emptiness_equal,
        worst=place(case, int(worst_at[0]), int(worst_at[1])) if worst_share.max(initial=0) > 0 else "",
        problems=tuple(problems),
    )


def distance(got: Float[np.ndarray, "Tq N Dv"], want: Float[np.ndarray, "Tq N Dv"], dtype: DTypeName) -> float:
    """The largest difference of two outs, in ulps of `dtype` at the largest value of each head in `want`."""
    got64, want64 = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float((_error(got64, want64).max(axis=-1, initial=0) / ulp(_largest(want64), dtype)).max(initial=0))


def oracle_for(case: Case, inputs: Inputs) -> Wanted:
    """The oracle's answer to a case."""
    segments = case.segments
    return oracle_attention(
        inputs.q, inputs.k, inputs.v,
        segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist(), sinks=inputs.sinks, **case.options,
    )  # fmt: skip


def tolerance(case: Case, inputs: Inputs, wanted: Wanted, dtype: DTypeName, arithmetic: Arithmetic) -> Tolerance:
    """The largest allowed error of a head.

    "accumulate": (16 + max |score|) ulp, of float32 (float64 for float64 input), of the largest wanted value. A score
    of size s is known to s ulp only, and exp turns that absolute error into a relative one; 16 covers the sums.
    float16 and bfloat16 add one ulp of the output for the final rounding.

    "kernel" adds the rounding of the weights to the input dtype: each is off by at most half an ulp of itself, so a
    row is off by at most half an ulp (of 1) times the largest |v| it may see; or twice the error of a plain run that
    rounds there, if that is larger.
    """
    compute: DTypeName = "float64" if dtype == "float64" else "float32"
    largest = _largest(wanted.out)
    steps = 16 + wanted.largest_score
    out = steps * ulp(largest, compute)
    if dtype != compute:
        out = out + ulp(largest, dtype)
        if arithmetic == "kernel":
            K, N = case.heads[1], case.heads[0]
            v = np.abs(np.asarray(inputs.v, np.float64))
            v_largest = np.where(np.isfinite(v), v, 0).max(axis=(0, 2), initial=0).repeat(N // K)
            plain = _error(plain_kernel_run(case, inputs, dtype), wanted.out).max(axis=(0, 2), initial=0)
            plain = np.where(np.isfinite(plain), plain, 0)
            out = out + np.maximum(2 * plain, 0.5 * ulp(np.ones(1), dtype) * v_largest)
    lse_size = np.where(np.isfinite(wanted.lse), np.maximum(1, np.abs(wanted.lse)), 1)
    return Tolerance(out, steps[:, None] * ulp(lse_size, compute))


def plain_kernel_run(case: Case, inputs: Inputs, dtype: DTypeName) -> Float[np.ndarray, "Tq N Dv"]:
    """The case in the kernel's own arithmetic, written plainly: what rounding alone does to a right answer.

    Scores and sums in float32, the unnormalised weights rounded to `dtype` before they meet v, one rounding at the
    end. Returned as float64. Poison is not contained.
    """
    q, k, v = (np.asarray(x, np.float32) for x in (inputs.q, inputs.k, inputs.v))
    (Tq, N, D), K = q.shape, k.shape[1]
    scale = np.float32(D**-0.5 if case.softmax_scale is None else case.softmax_scale)
    k, v = k.repeat(N // K, axis=1), v.repeat(N // K, axis=1)
    out = np.zeros((Tq, N, v.shape[2]), np.float32)
    for row, keys in enumerate(visible_keys(case)):
        if len(keys) == 0:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            s = scale * np.einsum("hd,jhd->hj", q[row], k[keys])
            if case.softcap is not None:
                s = np.float32(case.softcap) * np.tanh(s / np.float32(case.softcap))
            p = np.exp(s - s.max(axis=1, keepdims=True))
            total = p.sum(axis=1)
            if inputs.sinks is not None:
                total = total + np.exp(inputs.sinks - s.max(axis=1))
            weights = p.astype(NUMPY_DTYPES[dtype]).astype(np.float32)
            out[row] = np.einsum("hj,jhd->hd", weights, v[keys]) / total[:, None]
    return out.astype(NUMPY_DTYPES[dtype]).astype(np.float64)


def visible_keys(case: Case) -> list[range]:
    """The key rows that each query row sees; empty ranges for empty and tail rows."""
    segments, (left, right) = case.segments, case.window_size or (None, None)
    if case.causal:
        right = 0
    seen = [range(0)] * case.rows[0]
    offsets = zip(segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist(), strict=True)
    (q0, k0), *ends = offsets
    for q1, k1 in ends:
        for row in range(q0, q1):
            partner = row - q1 + k1
            first = k0 if left in (None, -1) else max(k0, partner - left)
            last = k1 - 1 if right in (None, -1) else min(k1 - 1, partner + right)
            seen[row] = range(first, last + 1)
        q0, k0 = q1, k1
    return seen


def rows_that_see_nothing(case: Case) -> Bool[np.ndarray, " Tq"]:
    """The empty rows and tail rows of q."""
    return np.array([len(keys) == 0 for keys in visible_keys(case)], bool)


def ulp(value: Float[np.ndarray, "..."], dtype: DTypeName) -> Float[np.ndarray, "..."]:
    """The distance between neighbouring numbers of `dtype` at |value|.

    >>> float(ulp(np.array(20.0), "bfloat16"))
    0.125
    """
    exponent = np.frexp(np.abs(value))[1] - 1  # |value| in [2**exponent, 2**(exponent + 1))
    exponent = np.where(np.asarray(value) == 0, _SMALLEST_EXPONENT[dtype], exponent)
    return np.asarray(np.ldexp(1.0, np.maximum(exponent, _SMALLEST_EXPONENT[dtype]) - _MANTISSA_BITS[dtype]))


def place(case: Case, row: int, head: int) -> str:
    """A query row named by segment and the row inside it."""
    cu = case.segments.cu_seqlens_q
    segment = int(np.searchsorted(cu, row, side="right")) - 1
    if segment >= len(cu) - 1:
        return f"tail row {row - int(cu[-1])}, head {head}"
    return f"segment {segment}, row {row - int(cu[segment])}, head {head}"


def _largest(out: Float[np.ndarray, "Tq N Dv"]) -> Float[np.ndarray, " N"]:
    return np.asarray(np.where(np.isfinite(out), np.abs(out), 0).max(axis=(0, 2), initial=0))


def _error(got: Any, want: Any) -> Any:
    """|got - want|, 0 where both are the same infinity or both NaN, inf where only one is."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    return np.where(same, 0, np.where(np.isnan(error), np.inf, error))


def _first(got: Any, want: Any) -> str:
    """The element that is furthest off, as `got 1.0, want 2.0`."""
    got, want = np.atleast_1d(got), np.atleast_1d(want)
    at = int(_error(got, want).argmax())
    return f"got {got[at]:.6g}, want {want[at]:.6g}"
