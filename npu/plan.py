"""From the plain facts of one call to the exact kernel calls: which rows, which keyword arguments, which fix-ups.

Everything here is host integers. Nothing touches a device, so a plan can be printed, compared and tested anywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

Runs = tuple[tuple[int, int], ...]
"""Rows of a packed tensor as half-open ranges `(start, stop)`, in order, without gaps of length 0."""

MOST_SEGMENTS = 4096
"""Entries of actual_seq_lengths that one call takes (operator documents of the fused inference kernel)."""
MOST_ROWS = 1_048_576
"""Rows T of q or of k and v that one call takes (the same documents)."""
MOST_HEADS = 256
MOST_GROUP = 64
"""Query heads N, and query heads per key/value head, that one call takes (the same documents)."""
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class KernelCall:
    """One call of the operator: the rows of the caller's tensors that go in, and its keyword arguments.

    With `mask` the 2048 x 2048 triangle goes in as `atten_mask`.
    """

    q_rows: Runs
    k_rows: Runs
    mask: bool
    kwargs: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        arguments = [f"{name}={_brief(value)}" for name, value in self.kwargs]
        arguments += ["atten_mask=triangle(2048, 2048)"] if self.mask else []
        return f"q rows {_ranges(self.q_rows)}, k rows {_ranges(self.k_rows)}: {', '.join(arguments)}"


@dataclass(frozen=True)
class Plan:
    """Every kernel call of one packed attention, and what is done around them.

    Rows of q in no call see no key, or are a tail: their out is 0. Their lse is -inf, and with sinks the sink of the
    head, except in the tail, which begins at `tail_start`.
    """

    operator: str
    shape: tuple[int, int, int]
    """The shape of out, `(Tq, N, Dv)`."""
    widths: tuple[int, int]
    """The head widths that the kernel is called with; q and k, and v, are zero-padded to them."""
    tail_start: int
    calls: tuple[KernelCall, ...]

    def __str__(self) -> str:
        Tq, N, Dv = self.shape
        head = f"{self.operator}: out [{Tq}, {N}, {Dv}], head widths padded to {self.widths[0]} and {self.widths[1]}"
        calls = [f"  call {i}: {call}" for i, call in enumerate(self.calls)] or ["  no call: no row sees a key"]
        return "\n".join([head, *calls])


@lru_cache(maxsize=512)
def make_plan(
    q_shape: tuple[int, int, int],
    k_shape: tuple[int, int, int],
    v_shape: tuple[int, int, int],
    dtype: str,
    cu_seqlens_q: tuple[int, ...],
    cu_seqlens_k: tuple[int, ...],
    *,
    softmax_scale: float | None = None,
    left: int | None = None,
    right: int | None = None,
    return_softmax_lse: bool = False,
) -> Plan:
    """The plan of a valid call; cached, so that a model of many layers plans once per batch.

    Args:
        q_shape, k_shape, v_shape: `(Tq, N, D)`, `(Tk, K, D)`, `(Tk, K, Dv)`.
        dtype: name of the shared dtype.
        cu_seqlens_q, cu_seqlens_k: offsets with the leading 0; the last may be below T (a tail).
        softmax_scale: None means `D ** -0.5` of the caller's D, also where the width is padded.
        left, right: the reach in keys, both ends inclusive, None for unlimited; causal is `right=0`.
        return_softmax_lse: whether the kernel must return its lse.

    Raises:
        NotImplementedError: what the kernel cannot do, by name, and what to use instead.
    """
    (Tq, N, D), (_, K, _), (_, _, Dv) = q_shape, k_shape, v_shape
    _check_kernel_has(dtype, N, K)
    widths = kernel_widths(D, Dv)
    kept = list(_rows_with_keys(cu_seqlens_q, cu_seqlens_k, right))
    for q_rows, k_rows in kept:
        if (most := max(q_rows[1] - q_rows[0], k_rows[1] - k_rows[0])) > MOST_ROWS:
            raise NotImplementedError(
                f"One segment has {most} rows. One kernel call takes {MOST_ROWS}, and a segment cannot be divided over "
                f"calls. Use jaxattn.reference_attention, or shorter segments."
            )
    common: dict[str, Any] = {
        "num_heads": N,
        "num_key_value_heads": K,
        "scale": D**-0.5 if softmax_scale is None else softmax_scale,
        "input_layout": "TND",
        "softmax_lse_flag": return_softmax_lse,
    }
    return Plan(
        operator="npu_fused_infer_attention_score",
        shape=(Tq, N, Dv),
        widths=widths,
        tail_start=cu_seqlens_q[-1],
        calls=tuple(_call(batch, left, right, common) for batch in _batches(kept)),
    )


def kernel_widths(D: int, Dv: int) -> tuple[int, int]:
    """The smallest head widths that every route of the inference kernel takes, at least `D` and `Dv`.

    Sure are 64 and 128 with equal widths, and 192 for q and k with 128 for v (operator documents and tiling sources
    of CANN 8.3 to 8.5). Zero columns change no score and add zero columns to out.

    Raises:
        NotImplementedError: wider heads.
    """
    for width_qk, width_v in ((64, 64), (128, 128), (192, 128)):
        if width_qk >= D and width_v >= Dv:
            return width_qk, width_v
    raise NotImplementedError(
        f"Head widths {D} (q, k) and {Dv} (v). The inference kernel takes up to 192 for q and k with 128 for v in packed "
        f"layout. Use jaxattn.reference_attention for wider heads."
    )


def _check_kernel_has(dtype: str, N: int, K: int) -> None:
    if dtype not in DTYPES:
        raise NotImplementedError(
            f"dtype {dtype}. The inference kernel takes {' and '.join(DTYPES)}. Cast q, k and v, or use "
            f"jaxattn.reference_attention, which takes float32 and float64."
        )
    if N > MOST_HEADS or N // K > MOST_GROUP:
        raise NotImplementedError(
            f"{N} query heads over {K} key/value heads. One kernel call takes {MOST_HEADS} query heads, {MOST_GROUP} per "
            f"key/value head. Split the query heads over several calls, or use jaxattn.reference_attention."
        )


def _rows_with_keys(
    cu_seqlens_q: tuple[int, ...], cu_seqlens_k: tuple[int, ...], right: int | None
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The rows of q and of k that go into a call, per segment that has both.

    Query i sees a key only if j = 0 is within its right reach: 0 <= i + Lk - Lq + right. So exactly the first
    max(0, Lq - Lk - right) rows of a segment with keys see nothing, and no row after them. The routes of the kernel
    disagree about such rows, so they stay out. The cut is at the front, and queries are aligned with keys at the end:
    nothing moves.
    """
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
        if q1 == q0 or k1 == k0:
            continue
        hidden = 0 if right is None else max(0, (q1 - q0) - (k1 - k0) - right)
        yield (q0 + hidden, q1), (k0, k1)


Segment = tuple[tuple[int, int], tuple[int, int]]


def _batches(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Consecutive runs of segments that one call takes."""
    batch: list[Segment] = []
    rows_q = rows_k = 0
    for q_rows, k_rows in segments:
        add_q, add_k = q_rows[1] - q_rows[0], k_rows[1] - k_rows[0]
        if batch and (len(batch) == MOST_SEGMENTS or rows_q + add_q > MOST_ROWS or rows_k + add_k > MOST_ROWS):
            yield batch
            batch, rows_q, rows_k = [], 0, 0
        batch.append((q_rows, k_rows))
        rows_q, rows_k = rows_q + add_q, rows_k + add_k
    if batch:
        yield batch


def _call(batch: list[Segment], left: int | None, right: int | None, common: dict[str, Any]) -> KernelCall:
    q_rows, k_rows = [q for q, _ in batch], [k for _, k in batch]
    kwargs = dict(common)
    kwargs["actual_seq_lengths"] = _running_sums(q_rows)
    kwargs["actual_seq_lengths_kv"] = _running_sums(k_rows)
    if left is None and right is None:
        kwargs["sparse_mode"] = 0
    elif left is None and right == 0:
        kwargs["sparse_mode"] = 3
    else:
        # A reach past the longest segment is unlimited, and the kernel's integers are of unknown width.
        longest = max(stop - start for start, stop in (*q_rows, *k_rows))
        kwargs["sparse_mode"] = 4
        kwargs["pre_tokens"] = longest if left is None else min(left, longest)
        kwargs["next_tokens"] = longest if right is None else min(right, longest)
    return KernelCall(
        q_rows=_merge_runs(q_rows),
        k_rows=_merge_runs(k_rows),
        mask=kwargs["sparse_mode"] != 0,
        kwargs=tuple(sorted(kwargs.items())),
    )


def _running_sums(rows: list[tuple[int, int]]) -> tuple[int, ...]:
    """The lengths as the operator wants them: running sums without the leading 0."""
    total, sums = 0, []
    for start, stop in rows:
        total += stop - start
        sums.append(total)
    return tuple(sums)


def _merge_runs(rows: list[tuple[int, int]]) -> Runs:
    runs: list[tuple[int, int]] = []
    for start, stop in rows:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)


def _ranges(runs: Runs) -> str:
    shown = ", ".join(f"{start}:{stop}" for start, stop in runs[:4])
    return shown + (f", ... {len(runs)} runs" if len(runs) > 4 else "")


def _brief(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 8:
        return f"[{', '.join(map(str, value[:4]))}, ... {value[-1]}] ({len(value)})"
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
