"""npu_fused_infer_attention_score and its second version."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from npu.simulator import hazard_mode
from npu.simulator.operators import arithmetic, inference_rules, layouts
from npu.simulator.operators.inference_rules import Route
from npu.simulator.operators.layouts import Rows
from npu.simulator.operators.refusals import BAD_ARGUMENT, BAD_TILING, Operator, check_same_device, given_names
from npu.simulator.operators.segments import Group, Span, check_same_count, groups, inference_spans
from npu.simulator.operators.visibility import UNLIMITED, Visibility
from npu.simulator.tags import as_cpu, as_npu

FIRST = Operator("npu_fused_infer_attention_score", "aclnnFusedInferAttentionScoreV3")
SECOND = Operator("npu_fused_infer_attention_score_v2", "aclnnFusedInferAttentionScoreV5")
HAS = "attention over packed or batched tensors, without bias, paging, prefix, separate rope or quantisation"


@dataclass(frozen=True, eq=False)
class Options:
    """The arguments that both versions have, with the names that differ."""

    mask: Tensor | None
    lengths: tuple[Sequence[int] | None, Sequence[int] | None]
    length_names: tuple[str, str]
    heads: tuple[int, int]
    head_names: tuple[str, str]
    scale: float
    pre: int
    next: int
    layout: str
    sparse_mode: int
    inner_precise: int
    want_lse: bool
    sink: Tensor | None = None


class _Work(NamedTuple):
    """What is left to compute when all checks are passed."""

    q_spans: tuple[Span, ...]
    k_spans: tuple[Span, ...]
    seen: Visibility
    slips: bool = False
    """Segments with fewer keys than queries get sparse mode 3 wrong: aligned at the start, not the end."""
    averages: bool = False
    """Rows that a caller's mask hides fully become the average of v."""


def infer(op: Operator, query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """out like query with the width of value, and lse float32 `(T, N, 1)` or `(B, N, S, 1)`; `(0,)` when unwanted.

    Rows that see no key have out 0 and lse +inf.
    """
    check_same_device(query=query, key=key, value=value, atten_mask=options.mask, learnable_sink=options.sink)
    index, layout, (N, K) = query.device.index, options.layout, options.heads
    inference_rules.check_inputs(op, query, key, value)
    inference_rules.check_precision(op, options.inner_precise)
    layouts.check_layout(op, layout)
    q, k, v = (
        layouts.rows(op, name, as_cpu(t), layout, heads)
        for name, t, heads in (("query", query, N), ("key", key, K), ("value", value, K))
    )
    inference_rules.check_heads(op, options.head_names, q, k, v, N, K)
    sink = None if options.sink is None else _sink(op, as_cpu(options.sink), N)
    mask = None if options.mask is None else as_cpu(options.mask)
    work = (_packed if q.batch is None else _batched)(op, options, mask, q, k, v)

    out = q.x.new_full((*q.x.shape[:2], v.x.shape[2]), torch.nan)
    lse = torch.full((*q.x.shape[:2], 1), torch.nan, device="cpu") if options.want_lse or sink is not None else None
    poison = hazard_mode.is_on() and arithmetic.has_poison(q.x, k.x, v.x)
    for group in groups(work.q_spans, work.k_spans):
        slipped = work.slips and group.Lq > group.Lk
        if slipped and group.Lk == 0:
            continue  # nothing to be wrong with: never written
        seen = Visibility(None, 0, from_start=True) if slipped else work.seen
        inputs = group.q_rows(q.x), group.k_rows(k.x), group.k_rows(v.x)
        targets = group.q_rows(out), None if lse is None else group.q_rows(lse)[..., 0]
        _compute(*inputs, *targets, group, seen, options.scale, sink, averages=work.averages, poison=poison)
    if lse is None or not options.want_lse:
        lse = torch.empty(0, device="cpu")
    elif q.batch is not None:
        lse = lse.unflatten(0, q.batch).transpose(1, 2).contiguous()
    return as_npu(layouts.restored(out, layout, q.batch), index), as_npu(lse, index)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, group: Group, seen: Visibility, scale: float,
    sink: Tensor | None, *, averages: bool, poison: bool,
) -> None:  # fmt: skip
    """Writes out `[B, N, Lq, Dv]` and lse `[B, N, Lq]` of a group."""
    causal = seen.is_causal_square(group.Lq, group.Lk)
    hidden = None if causal else seen.hidden(group)
    if lse is None and not averages and not poison:
        out.copy_(arithmetic.attend(q, k, v, scale, hidden, causal=causal))
        return
    empty = arithmetic.empty_rows(hidden, group.Lk)
    if averages and hidden is not None and group.Lk:
        # Hidden scores are a large negative number there, not -inf. Where all are, all weigh the same.
        hidden = hidden & ~empty[..., None]
        q = q.masked_fill(empty[..., None], 0)
        empty = torch.zeros(1, dtype=torch.bool, device="cpu")
    part = arithmetic.attend(q, k, v, scale, hidden, causal=causal)
    if lse is not None:
        stats = arithmetic.statistics(q, k, scale, hidden, causal=causal)
        if sink is not None:
            part, stats = arithmetic.with_sink(part, stats, sink)
        lse.copy_(stats.lse().masked_fill_(empty, torch.inf))
    out.copy_(part)
    if poison:
        out_lost, lse_lost = (lost & ~empty for lost in arithmetic.poisoned(q, k, v))
        out.masked_fill_(out_lost[..., None], torch.nan)
        if lse is not None:
            lse.masked_fill_(lse_lost, torch.nan)


def _packed(op: Operator, options: Options, mask: Tensor | None, q: Rows, k: Rows, v: Rows) -> _Work:
    """Layout TND: lengths are running sums, and three kernels differ in what they do beyond the contract."""
    route = inference_rules.route(q.x, k.x, v.x, options.inner_precise)
    inference_rules.check_packed(op, q.x, k.x, v.x, route)
    logs_only = route is Route.GROUPED and hazard_mode.is_on()
    q_spans, k_spans = (
        inference_spans(op, name, sums, rows.x.shape[0], may_stop_short=logs_only)
        for name, sums, rows in zip(options.length_names, options.lengths, (q, k), strict=True)
    )
    check_same_count(op, options.length_names, (len(q_spans), len(k_spans)))
    seen = inference_rules.visibility(op, options.sparse_mode, mask, options.pre, options.next, None)
    if options.sparse_mode == 3 and route is Route.LEGACY:
        inference_rules.check_enough_keys(op, q_spans, k_spans)
    slips = options.sparse_mode == 3 and route is Route.GROUPED and hazard_mode.is_on()
    return _Work(q_spans, k_spans, seen, slips=slips)


def _batched(op: Operator, options: Options, mask: Tensor | None, q: Rows, k: Rows, v: Rows) -> _Work:
    """Layouts BSND, BNSD and BSH: every sequence has S rows, of the keys perhaps fewer valid ones."""
    inference_rules.check_batched(op, q, k, v, options.layout)
    sizes = layouts.batch_sizes(q, k)
    seen = inference_rules.visibility(op, options.sparse_mode, mask, options.pre, options.next, sizes)
    averages = mask is not None and options.sparse_mode == 0 and options.inner_precise < 2 and hazard_mode.is_on()
    return _Work(q.spans(), _valid_keys(op, options, k.spans()), seen, averages=averages)


def _valid_keys(op: Operator, options: Options, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The keys of each sequence of a batch, fewer than S where lengths are given: one for all, or one each."""
    queries, keys = options.lengths
    if queries is not None:
        op.lacks(
            f"{options.length_names[0]} in layout {options.layout}",
            f"{options.length_names[1]} there, the number of valid keys of each sequence",
            "Leave it out, or use layout TND",
        )
    if keys is None:
        return spans
    counts = [int(n) for n in keys]
    S = spans[0][1] - spans[0][0] if spans else 0
    if len(counts) not in (1, len(spans)) or not all(0 <= n <= S for n in counts):
        op.refuse(
            BAD_TILING,
            f"{options.length_names[1]} is {counts[:8]}. It holds 1 or {len(spans)} numbers of keys from 0 to {S}.",
        )
    counts = counts * len(spans) if len(counts) == 1 else counts
    return tuple((start, start + n) for (start, _), n in zip(spans, counts, strict=True))


def _sink(op: Operator, sink: Tensor, N: int) -> Tensor:
    if tuple(sink.shape) != (N,) or sink.dtype != torch.bfloat16:
        op.refuse(
            BAD_ARGUMENT,
            f"learnable_sink is {sink.dtype} {tuple(sink.shape)}. It is bfloat16 ({N},), one logit per head.",
        )
    return sink.float()


def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """`infer` under the first version's names; `others` are the rest of its schema, and refused."""
    _refuse_others(FIRST, input_layout, others)
    options = Options(
        mask=atten_mask,
        lengths=(actual_seq_lengths, actual_seq_lengths_kv),
        length_names=("actual_seq_lengths", "actual_seq_lengths_kv"),
        heads=(num_heads, num_key_value_heads or num_heads),
        head_names=("num_heads", "num_key_value_heads"),
        scale=scale,
        pre=pre_tokens,
        next=next_tokens,
        layout=input_layout,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        want_lse=softmax_lse_flag,
    )
    return infer(FIRST, query, key, value, options)


def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """`infer` under the second version's names; `learnable_sink` is bfloat16 `(N,)`."""
    _refuse_others(SECOND, input_layout, others)
    options = Options(
        mask=atten_mask,
        lengths=(actual_seq_qlen, actual_seq_kvlen),
        length_names=("actual_seq_qlen", "actual_seq_kvlen"),
        heads=(num_query_heads, num_key_value_heads or num_query_heads),
        head_names=("num_query_heads", "num_key_value_heads"),
        scale=softmax_scale,
        pre=pre_tokens,
        next=next_tokens,
        layout=input_layout,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        want_lse=return_softmax_lse,
        sink=learnable_sink,
    )
    return infer(SECOND, query, key, value, options)


def _refuse_others(op: Operator, layout: str, others: dict[str, object]) -> None:
    """Bias, shared prefix and quantised output exist in other layouts only; the rest exists on hardware only."""
    given = given_names(others)
    never_packed = {
        "pse_shift", "key_shared_prefix", "value_shared_prefix", "actual_shared_prefix_len", "quant_scale2",
        "quant_offset2", "quant_scale_out", "quant_offset_out",
    }  # fmt: skip
    if layout == "TND" and (names := [name for name in given if name in never_packed]):
        op.refuse(BAD_ARGUMENT, f"{', '.join(names)} in layout TND, which has no bias, prefix or quantised output.")
    if given:
        op.lacks(", ".join(given), HAS, "Leave out what it lacks")
