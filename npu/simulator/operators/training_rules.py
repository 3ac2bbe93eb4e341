"""What the training operators take. Limits: operator documents and tiling sources of CANN 8.3 to 8.5."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from npu.simulator.operators import layouts
from npu.simulator.operators.layouts import Rows
from npu.simulator.operators.refusals import BAD_ARGUMENT, BAD_TILING, Operator, given_names
from npu.simulator.operators.segments import Span, check_same_count, training_spans
from npu.simulator.operators.visibility import UNLIMITED, Visibility, band, own_mask, slip_of_triangle

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HAS = "attention over packed or batched tensors, without bias, dropout or prefix"


@dataclass(frozen=True, eq=False)
class Options:
    """The arguments that decide what is computed, as both operators take them."""

    head_num: int
    input_layout: str
    atten_mask: Tensor | None = None
    scale: float = 1.0
    keep_prob: float = 1.0
    pre_tockens: int = UNLIMITED
    next_tockens: int = UNLIMITED
    inner_precise: int = 0
    actual_seq_qlen: Sequence[int] | None = None
    actual_seq_kvlen: Sequence[int] | None = None
    sparse_mode: int = 0
    softmax_layout: str = ""


class Work(NamedTuple):
    """What is to be computed: the segments of both sides, and whether the rows after the last of them are zeroed."""

    q_spans: tuple[Span, ...]
    k_spans: tuple[Span, ...]
    seen: Visibility
    q_tail_zeroed: bool
    k_tail_zeroed: bool


def check_options(op: Operator, options: Options, others: Mapping[str, object]) -> None:
    """Refuses what is no value of an option, and what the simulation lacks.

    How a dropout mask is made (`gen_mask_parallel`, `sync`, `seed`, `offset`, `numels`) changes nothing without one.
    """
    if not 0 < options.keep_prob <= 1:
        op.refuse(BAD_ARGUMENT, f"keep_prob is {options.keep_prob}. It is above 0 and at most 1.")
    if options.keep_prob != 1:
        op.lacks(f"dropout (keep_prob {options.keep_prob})", "keep_prob 1", "Drop out elsewhere")
    if given := given_names(others):
        op.lacks(", ".join(given), HAS, "Leave out what it lacks")
    if options.inner_precise != 0:
        op.lacks(f"inner_precise {options.inner_precise}", "0", "Leave it out")
    if options.softmax_layout not in ("", "TND"):
        op.refuse(BAD_ARGUMENT, f"softmax_layout is {options.softmax_layout!r}. It is empty or 'TND'.")
    if options.softmax_layout and options.input_layout != "TND":
        op.refuse(BAD_ARGUMENT, f"softmax_layout 'TND' with input_layout {options.input_layout!r}. It needs TND.")


def checked_rows(
    op: Operator, options: Options, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Rows, Rows, Rows]:  # fmt: skip
    """query, key and value, host memory, as packed rows whose shapes and dtypes agree. They need not be contiguous."""
    layout, N = options.input_layout, options.head_num
    layouts.check_layout(op, layout)
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dtype not in DTYPES or t.dtype != query.dtype:
            op.refuse(
                BAD_ARGUMENT, f"{name} has dtype {t.dtype}. All are float16, all are bfloat16 or all are float32."
            )
    q = layouts.rows(op, "query", query, layout, N)
    D, K = q.x.shape[2], N
    if layout == "BSH" and D and key.ndim == 3:  # the heads of key are not told: as many as have the width of query
        K = max(1, key.shape[2] // D)
    k, v = layouts.rows(op, "key", key, layout, K), layouts.rows(op, "value", value, layout, K)
    (T, Nq, D), (Tk, K, Dk), (Tv, Kv, Dv) = shapes = [tuple(rows.x.shape) for rows in (q, k, v)]
    if (Tk, K, k.batch) != (Tv, Kv, v.batch) or (
        q.batch is not None and k.batch is not None and q.batch[0] != k.batch[0]
    ):
        op.refuse(BAD_ARGUMENT, f"query, key and value have (rows, heads, width) {', '.join(map(str, shapes))}.")
    if Nq != N:
        op.refuse(BAD_ARGUMENT, f"head_num is {N} for {Nq} heads. They must agree.")
    if not 1 <= N <= 256 or K < 1 or N % K:
        op.refuse(BAD_TILING, f"{N} query heads over {K} key/value heads. At most 256, a whole ratio.")
    if not (1 <= D == Dk <= 768 and 1 <= Dv <= D):
        op.refuse(
            BAD_ARGUMENT, f"head widths {D}, {Dk} and {Dv}. At most 768, those of query and key equal, value not wider."
        )
    if layout == "TND" and max(T, Tk) > 1_048_576:
        op.refuse(BAD_TILING, f"T is {T} for query and {Tk} for key. At most 1048576.")
    return q, k, v


def work(op: Operator, options: Options, q: Rows, k: Rows) -> Work:
    """The segments and what they see."""
    names = ("actual_seq_qlen", "actual_seq_kvlen")
    lengths = (options.actual_seq_qlen, options.actual_seq_kvlen)
    mask = options.atten_mask
    if q.batch is None:
        (q_spans, q_zeroed), (k_spans, k_zeroed) = (
            training_spans(op, name, sums, rows.x.shape[0])
            for name, sums, rows in zip(names, lengths, (q, k), strict=True)
        )
        check_same_count(op, names, (len(q_spans), len(k_spans)))
        sizes = None
    else:
        if any(each is not None for each in lengths):
            op.lacks(f"{' and '.join(names)} in layout {options.input_layout}", "them in TND", "Use layout TND")
        (q_spans, q_zeroed), (k_spans, k_zeroed) = (q.spans(), False), (k.spans(), False)
        sizes = layouts.batch_sizes(q, k)
    seen = _visibility(op, options, mask, sizes)
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(q_spans, k_spans, strict=True)):
        if mask is None or options.sparse_mode == 0:
            break
        # Rows that no key is left for.
        hidden = (q1 - q0) - (k1 - k0) - (UNLIMITED if seen.right is None else seen.right)
        if hidden > 0:
            op.refuse(
                BAD_TILING,
                f"segment {b} has {q1 - q0} queries and {k1 - k0} keys, sparse_mode {options.sparse_mode} hides all "
                f"keys from the first {hidden}. Every query must see a key.",
            )
    return Work(q_spans, k_spans, seen, q_zeroed, k_zeroed)


def _visibility(
    op: Operator, options: Options, mask: Tensor | None, sizes: tuple[int, int, int, int] | None
) -> Visibility:
    mode, pre, next_ = options.sparse_mode, options.pre_tockens, options.next_tockens
    if mode in (1, 2, 5, 6, 7, 8):
        op.lacks(f"sparse_mode {mode}", "0, 3 and 4", "Use one of these")
    if mode not in (0, 3, 4):
        op.refuse(BAD_ARGUMENT, f"sparse_mode is {mode}. It is 0 to 8.")
    if mode == 0 and (pre < UNLIMITED or next_ < UNLIMITED):
        op.lacks("pre_tockens and next_tockens in sparse_mode 0", "them in sparse_mode 4", "Use that")
    if mask is None:
        return Visibility()  # also in the modes 3 and 4: without their triangle nothing is hidden, and nothing is said
    if mode == 0:
        if sizes is None:
            op.lacks("atten_mask in sparse_mode 0 of layout TND", "sparse_mode 3 and 4 there", "Use these")
        return Visibility(own=own_mask(op, mask, *sizes))
    slip = slip_of_triangle(op, mask, mode)
    if mode == 3:
        return Visibility(None, 0, slip=slip)
    left, right = band(op, ("pre_tockens", "next_tockens"), pre, next_)
    return Visibility(left, right, slip=slip)


def checked_sink(op: Operator, sink: Tensor | None, N: int) -> Tensor | None:
    """One logit per head, float32."""
    if sink is not None and (tuple(sink.shape) != (N,) or sink.dtype != torch.float32):
        op.refuse(BAD_ARGUMENT, f"sink is {sink.dtype} {tuple(sink.shape)}. It is float32 ({N},), one logit per head.")
    return sink
