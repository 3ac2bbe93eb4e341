"""npu_fusion_attention and npu_fusion_attention_grad."""

from collections.abc import Sequence

import torch
from torch import Tensor

from npu.simulator import hazard_mode
from npu.simulator.operators import arithmetic, layouts, statistics_memory, training_rules
from npu.simulator.operators.refusals import BAD_ARGUMENT, MISSING, Operator, check_same_device
from npu.simulator.operators.segments import Span, groups
from npu.simulator.operators.training_rules import Options
from npu.simulator.operators.visibility import UNLIMITED
from npu.simulator.tags import as_cpu, as_npu

Forward = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]
Backward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,  # noqa: ARG001  (of the dropout mask, which does not exist)
    sync: bool = False,  # noqa: ARG001
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,  # noqa: ARG001
    offset: int = 0,  # noqa: ARG001
) -> Forward:
    """out like query with the width of value, softmax maximum and sum, float32 `(T, N, 8)` or `(B, N, S, 8)` in the
    order of `statistics_memory`, an empty tensor, and three zeros: the state of a dropout that does not happen.

    A row of a segment without keys has out 0 and maximum = sum = 0.
    """
    op = Operator(
        "npu_fusion_attention", _kernel("aclnnFlashAttentionVarLenScore", "aclnnFlashAttentionScore", input_layout)
    )
    check_same_device(query=query, key=key, value=value, atten_mask=atten_mask, sink=sink)
    options = Options(
        head_num, input_layout, None if atten_mask is None else as_cpu(atten_mask), scale, keep_prob,
        pre_tockens, next_tockens, inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout,
    )  # fmt: skip
    others = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "dropout_mask": dropout_mask}
    training_rules.check_options(op, options, others)
    q, k, v = training_rules.checked_rows(op, options, as_cpu(query), as_cpu(key), as_cpu(value))
    logits = training_rules.checked_sink(op, None if sink is None else as_cpu(sink), head_num)
    work = training_rules.work(op, options, q, k)

    T, N, _ = q.x.shape
    out = _memory(work.q_spans, (T, N, v.x.shape[2]), q.x.dtype, zeroed=work.q_tail_zeroed)
    top, total = (_memory(work.q_spans, (T, N, 8), torch.float32, zeroed=work.q_tail_zeroed) for _ in range(2))
    poison = hazard_mode.is_on() and arithmetic.has_poison(q.x, k.x, v.x)
    for group in groups(work.q_spans, work.k_spans):
        parts = group.q_rows(q.x), group.k_rows(k.x), group.k_rows(v.x)
        causal = work.seen.is_causal_square(group.Lq, group.Lk)
        hidden = None if causal else work.seen.hidden(group)
        result = arithmetic.attend(*parts, scale, hidden, causal=causal)
        stats = arithmetic.statistics(*parts[:2], scale, hidden, causal=causal)
        if logits is not None:
            result, stats = arithmetic.with_sink(result, stats, logits)
        empty = arithmetic.empty_rows(hidden, group.Lk)
        # Rows without keys are defined, rows whose keys a caller's mask hides are not.
        undefined = torch.nan if group.Lk and hazard_mode.is_on() else 0.0
        group.q_rows(out).copy_(result.masked_fill_(empty[..., None], undefined))
        for buffer, values in ((top, stats.top), (total, stats.total)):
            statistics_memory.write(buffer, group, softmax_layout, values.masked_fill_(empty, undefined))
        if poison:
            out_lost, stats_lost = (lost & ~empty for lost in arithmetic.poisoned(*parts))
            group.q_rows(out).masked_fill_(out_lost[..., None], torch.nan)
            for buffer in (top, total):
                statistics_memory.place(buffer, group, softmax_layout).masked_fill_(stats_lost[..., None], torch.nan)
    if q.batch is not None:
        B, S = q.batch
        top, total = top.view(B, N, S, 8), total.view(B, N, S, 8)
    tensors = layouts.restored(out, input_layout, q.batch), top, total, out.new_empty(0)
    first, second, third, fourth = (as_npu(t, query.device.index) for t in tensors)
    return first, second, third, fourth, 0, 0, 0


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,  # noqa: ARG001  (the empty fourth output of the forward operator)
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,  # noqa: ARG001  (of the dropout, which does not exist)
    offset: int = 0,  # noqa: ARG001
    numels: int = 0,  # noqa: ARG001
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,  # noqa: ARG001
    sync: bool = False,  # noqa: ARG001
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> Backward:
    """dq, dk and dv like their tensors, an empty dpse, and dsink float32 `(N,)`, empty without a sink.

    Computed from what the forward operator returned, not anew: the weights are `exp(score - softmax_max) /
    softmax_sum`, and the row sums of `dy * attention_in` are taken from each score's gradient.
    """
    op = Operator(
        "npu_fusion_attention_grad",
        _kernel("aclnnFlashAttentionUnpaddingScoreGrad", "aclnnFlashAttentionScoreGrad", input_layout),
    )
    check_same_device(
        query=query, key=key, value=value, dy=dy, atten_mask=atten_mask, softmax_max=softmax_max,
        softmax_sum=softmax_sum, attention_in=attention_in, sink=sink,
    )  # fmt: skip
    options = Options(
        head_num, input_layout, None if atten_mask is None else as_cpu(atten_mask), scale_value, keep_prob,
        pre_tockens, next_tockens, inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout,
    )  # fmt: skip
    training_rules.check_options(op, options, {"pse": pse, "padding_mask": padding_mask, "prefix": prefix})
    q, k, v = training_rules.checked_rows(op, options, as_cpu(query), as_cpu(key), as_cpu(value))
    logits = training_rules.checked_sink(op, None if sink is None else as_cpu(sink), head_num)
    work = training_rules.work(op, options, q, k)
    T, N, _ = q.x.shape
    wanted_out = layouts.restored(q.x.new_empty((T, N, v.x.shape[2]), device="meta"), input_layout, q.batch)
    wanted_stats = (T, N, 8) if q.batch is None else (q.batch[0], N, q.batch[1], 8)
    dy, out = (
        layouts.rows(op, name, _like(op, name, x, tuple(wanted_out.shape), q.x.dtype), input_layout, N).x
        for name, x in (("dy", dy), ("attention_in", attention_in))
    )
    top, total = (
        _like(op, name, x, wanted_stats, torch.float32).contiguous().view(T, N, 8)
        for name, x in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum))
    )

    dq = _memory(work.q_spans, q.x.shape, q.x.dtype, zeroed=work.q_tail_zeroed)
    dk, dv = (_memory(work.k_spans, x.shape, x.dtype, zeroed=work.k_tail_zeroed) for x in (k.x, v.x))
    dsink = torch.zeros(0 if logits is None else N, device="cpu")
    for (q0, q1), (k0, k1) in zip(work.q_spans, work.k_spans, strict=True):
        if q0 == q1:  # keys that no query sees, which `groups` passes over
            dk[k0:k1], dv[k0:k1] = 0, 0
    for group in groups(work.q_spans, work.k_spans):
        row_top, row_total = (
            statistics_memory.read(x, group, softmax_layout, strict=hazard_mode.is_on()) for x in (top, total)
        )
        d_out = group.q_rows(dy)
        delta = (d_out.float() * group.q_rows(out).float()).sum(-1)
        hidden = work.seen.hidden(group)
        grads = arithmetic.backward(
            group.q_rows(q.x),
            group.k_rows(k.x),
            group.k_rows(v.x),
            d_out,
            row_top,
            row_total,
            delta,
            scale_value,
            hidden,
        )
        group.q_rows(dq).copy_(grads.q)
        group.k_rows(dk).copy_(grads.k)
        group.k_rows(dv).copy_(grads.v)
        if logits is not None and group.Lk:
            dsink -= (torch.exp(logits[:, None] - row_top) / row_total * delta).sum((0, 2))
    restored = [layouts.restored(x, input_layout, batch) for x, batch in ((dq, q.batch), (dk, k.batch), (dv, v.batch))]
    first, second, third, fourth, fifth = (as_npu(t, query.device.index) for t in (*restored, q.x.new_empty(0), dsink))
    return first, second, third, fourth, fifth


def _kernel(packed: str, batched: str, layout: str) -> str:
    return packed if layout == "TND" else batched


def _memory(spans: Sequence[Span], shape: Sequence[int], dtype: torch.dtype, *, zeroed: bool) -> Tensor:
    """Memory for packed rows; those after the last segment are zero if the operator zeroes them, else left as found."""
    written = spans[-1][1] if spans else 0
    memory = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    memory[written:] = 0 if zeroed or not hazard_mode.is_on() else torch.nan
    return memory


def _like(op: Operator, name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if x is None:
        op.refuse(MISSING, f"{name} is missing. It is what the forward operator returned.")
    if tuple(x.shape) != shape or x.dtype != dtype:
        op.refuse(BAD_ARGUMENT, f"{name} is {x.dtype} {tuple(x.shape)}. It is {dtype} {shape} here.")
    return as_cpu(x)
