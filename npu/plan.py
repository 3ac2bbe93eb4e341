"""From the plain facts of one call to the exact kernel calls: which rows, which keyword arguments, which fix-ups.

Everything here is host integers. Nothing touches a device, so a plan can be printed, compared and tested anywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from npu.contract import DEFAULT, INFERENCE, TRAINING, Limit, Operator, Profile

Runs = tuple[tuple[int, int], ...]
"""Rows of a packed tensor as half-open ranges `(start, stop)`, in order, none empty, none touching the next."""
Segment = tuple[tuple[int, int], tuple[int, int]]
"""The rows of q and the rows of k of one segment."""


@dataclass(frozen=True)
class KernelCall:
    """One call of the operator: what of the caller's tensors goes in, and the keyword arguments.

    `kv_heads` are the key/value heads that go in, `group` the query heads of each of them, as `(start, stop)`; None
    is all. With `mask` the 2048 x 2048 triangle goes in as `atten_mask`.
    """

    q_rows: Runs
    k_rows: Runs
    mask: bool
    kwargs: tuple[tuple[str, Any], ...]
    kv_heads: tuple[int, int] | None = None
    group: tuple[int, int] | None = None

    def __str__(self) -> str:
        arguments = [f"{name}={_brief(value)}" for name, value in self.kwargs]
        arguments += ["atten_mask=triangle(2048, 2048)"] if self.mask else []
        heads = ""
        if self.kv_heads is not None and self.group is not None:
            heads = f", k heads {_ranges((self.kv_heads,))}, their query heads {_ranges((self.group,))}"
        return f"q rows {_ranges(self.q_rows)}, k rows {_ranges(self.k_rows)}{heads}: {', '.join(arguments)}"


@dataclass(frozen=True)
class Plan:
    """Every kernel call of one packed attention, and what is done around them.

    Rows of q in no call see no key, or are a tail: their out is 0. Their lse is -inf, and with sinks the sink of the
    head, except in the tail, which begins at `tail_start`. That is set from the plan, never by looking at values: a
    row that sees an overflow may truly have an infinite lse.
    """

    operator: Operator
    shape: tuple[int, int, int]
    """The shape of out, `(Tq, N, Dv)`."""
    kv_heads: int
    widths: tuple[int, int]
    """The head widths that the kernel is called with; q and k, and v, are zero-padded to them."""
    tail_start: int
    calls: tuple[KernelCall, ...]
    decided_by: tuple[Limit, ...]
    """The rows of the contract that chose the operator, the widths and the number of calls."""

    def __str__(self) -> str:
        Tq, N, Dv = self.shape
        head = f"{self.operator}: out [{Tq}, {N}, {Dv}], head widths padded to {self.widths[0]} and {self.widths[1]}"
        calls = [f"  call {i}: {call}" for i, call in enumerate(self.calls)] or ["  no call: no row sees a key"]
        reasons = [f"  by {limit}" for limit in self.decided_by]
        return "\n".join([head, *calls, *reasons])


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
    gradient: bool = False,
    profile: Profile = DEFAULT,
) -> Plan:
    """The plan of a valid call; cached, so that a model of many layers plans once per batch.

    Args:
        q_shape, k_shape, v_shape: `(Tq, N, D)`, `(Tk, K, D)`, `(Tk, K, Dv)`.
        dtype: name of the shared dtype.
        cu_seqlens_q, cu_seqlens_k: offsets with the leading 0; the last may be below T (a tail).
        softmax_scale: None means `D ** -0.5` of the caller's D, also where the width is padded.
        left, right: the reach in keys, both ends inclusive, None for unlimited; causal is `right=0`.
        return_softmax_lse: whether lse is wanted, or needed for a fix-up.
        gradient: plan for the training operator and its gradient, `npu.kernels.run_backward`; there one spare column
            of v carries the cotangent of lse.
        profile: the chip and the CANN release.

    Raises:
        NotImplementedError: what the kernels cannot do, by name, and what to use instead.
    """
    (Tq, N, D), (_, K, _), (_, _, Dv) = q_shape, k_shape, v_shape
    operator, widths, decided_by = _choose(D, Dv, dtype, gradient, profile)
    kept = tuple(_rows_with_keys(cu_seqlens_q, cu_seqlens_k, right))
    batches = list(_batches(kept, operator, profile))
    heads = list(_head_chunks(N, K, operator, profile))
    if len(batches) > 1:
        decided_by += tuple(profile[operator, name] for name in ("most_segments", "most_rows"))
    if len(heads) > 1:
        per_call = ("most_heads", "most_group") if operator == INFERENCE else ("most_heads",)
        decided_by += tuple(profile[operator, name] for name in per_call)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    calls = []
    for batch in batches:
        call = _call(operator, batch, left, right, scale, return_softmax_lse)
        for kv_heads, group in heads:
            calls.append(_on_heads(call, operator, kv_heads, group, whole=len(heads) == 1))
    return Plan(operator, (Tq, N, Dv), K, widths, cu_seqlens_q[-1], tuple(calls), decided_by)


def _choose(
    D: int, Dv: int, dtype: str, gradient: bool, profile: Profile
) -> tuple[Operator, tuple[int, int], tuple[Limit, ...]]:
    """The operator, the head widths to call it with, and the rows of the contract that decided.

    The inference operator where it takes the widths and the dtype, else the training operator, which takes more. Zero
    columns change no score and add zero columns to out.
    """
    dtypes, widths = profile[INFERENCE, "dtypes"], profile[INFERENCE, "widths"]
    if not gradient and dtype in _names(dtypes):
        for pair in widths.value if isinstance(widths.value, tuple) else ():
            if isinstance(pair, tuple) and pair[0] >= D and pair[1] >= Dv:
                return INFERENCE, pair, (dtypes, widths)
    training, most = profile[TRAINING, "dtypes"], profile[TRAINING, "most_width"]
    if dtype not in _names(training):
        raise NotImplementedError(
            f"dtype {dtype}. The fused kernels take {', '.join(_names(training))}. Cast q, k and v, for float64 to float32, "
            f"or use jaxattn.packed_attention, which takes float64."
        )
    # q and k must be at least as wide as v; the gradient wants all equal, and one more column for lse.
    width = max(D, Dv + 1) if gradient else max(D, Dv)
    if width > most.number:
        spare = " and one spare column" if gradient else ""
        raise NotImplementedError(
            f"Head widths {D} (q, k) and {Dv} (v){spare}. The widest that a fused kernel takes is {most.value}. Use "
            f"jaxattn.packed_attention for wider heads."
        )
    return TRAINING, (width, width if gradient else Dv), (dtypes, widths, profile[TRAINING, "products"], training, most)


def _names(limit: Limit) -> tuple[str, ...]:
    return tuple(str(name) for name in limit.value) if isinstance(limit.value, tuple) else ()


def _rows_with_keys(
    cu_seqlens_q: tuple[int, ...], cu_seqlens_k: tuple[int, ...], right: int | None
) -> Iterator[Segment]:
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


def _batches(segments: tuple[Segment, ...], operator: Operator, profile: Profile) -> Iterator[tuple[Segment, ...]]:
    """Consecutive runs of segments that one call takes."""
    most_segments = profile[operator, "most_segments"].number
    most_rows = profile[operator, "most_rows"].number
    begin = rows_q = rows_k = 0
    for end, ((q0, q1), (k0, k1)) in enumerate(segments):
        if (longest := max(q1 - q0, k1 - k0)) > most_rows:
            raise NotImplementedError(
                f"One segment has {longest} rows. One kernel call takes {most_rows}, and a segment cannot be divided over "
                f"calls. Use jaxattn.packed_attention, or shorter segments."
            )
        if end - begin == most_segments or rows_q + q1 - q0 > most_rows or rows_k + k1 - k0 > most_rows:
            yield segments[begin:end]
            begin, rows_q, rows_k = end, 0, 0
        rows_q, rows_k = rows_q + q1 - q0, rows_k + k1 - k0
    if segments:
        yield segments[begin:]


def _head_chunks(
    N: int, K: int, operator: Operator, profile: Profile
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Key/value heads and, inside each, query heads that one call takes.

    Query heads are divided inside their key/value head first, which copies no k and v; key/value heads are divided only
    where they alone are too many.
    """
    most = profile[operator, "most_heads"].number
    R = N // K
    K_step = min(K, most)
    R_step = min(R, most // K_step)
    if operator == INFERENCE:
        R_step = min(R_step, profile[operator, "most_group"].number)
    for kv in range(0, K, K_step):
        for head in range(0, R, R_step):
            yield (kv, min(kv + K_step, K)), (head, min(head + R_step, R))


def _call(
    operator: Operator,
    batch: tuple[Segment, ...],
    left: int | None,
    right: int | None,
    scale: float,
    return_softmax_lse: bool,
) -> KernelCall:
    q_rows, k_rows = [q for q, _ in batch], [k for _, k in batch]
    sums_q, sums_k = _running_sums(q_rows), _running_sums(k_rows)
    kwargs: dict[str, Any] = {"input_layout": "TND", "scale": scale}
    if operator == INFERENCE:
        kwargs |= {"actual_seq_lengths": sums_q, "actual_seq_lengths_kv": sums_k}
        kwargs |= {"softmax_lse_flag": return_softmax_lse}
        pre, next_ = "pre_tokens", "next_tokens"
    else:
        kwargs |= {"actual_seq_qlen": sums_q, "actual_seq_kvlen": sums_k, "softmax_layout": "TND"}
        pre, next_ = "pre_tockens", "next_tockens"  # the operator's own spelling
    if left is None and right is None:
        kwargs["sparse_mode"] = 0
    elif left is None and right == 0:
        kwargs["sparse_mode"] = 3
    else:
        # A reach past the longest segment is unlimited, and the kernel's integers are of unknown width.
        longest = max(stop - start for start, stop in (*q_rows, *k_rows))
        kwargs["sparse_mode"] = 4
        kwargs[pre] = longest if left is None else min(left, longest)
        kwargs[next_] = longest if right is None else min(right, longest)
    return KernelCall(
        q_rows=_merge_runs(q_rows),
        k_rows=_merge_runs(k_rows),
        mask=kwargs["sparse_mode"] != 0,
        kwargs=tuple(sorted(kwargs.items())),
    )


def _on_heads(
    call: KernelCall, operator: Operator, kv_heads: tuple[int, int], group: tuple[int, int], *, whole: bool
) -> KernelCall:
    K = kv_heads[1] - kv_heads[0]
    N = K * (group[1] - group[0])
    heads = {"num_heads": N, "num_key_value_heads": K} if operator == INFERENCE else {"head_num": N}
    kwargs = tuple(sorted((*call.kwargs, *heads.items())))
    if whole:
        return replace(call, kwargs=kwargs)
    return replace(call, kwargs=kwargs, kv_heads=kv_heads, group=group)


def _running_sums(rows: list[tuple[int, int]]) -> tuple[int, ...]:
    """The lengths as the operators want them: running sums without the leading 0."""
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
