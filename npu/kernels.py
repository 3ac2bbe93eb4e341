"""Running a plan: the only place where the NPU operators are called."""

from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import pad

from npu.contract import INFERENCE
from npu.plan import KernelCall, Plan, Runs


def run(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, return_softmax_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out `[Tq, N, Dv]` and lse `[N, Tq]` (None unless wanted) of tensors that lie on one NPU.

    The tensors must be those that `plan` was made for; nothing is checked here. Gradients are not recorded.
    """
    with torch.no_grad():
        out, lse = _forward(plan, q, k, v, with_lse=return_softmax_lse or sinks is not None)
        if sinks is not None and lse is not None:
            # A sink adds exp(sink) to the softmax sum and nothing to out: the same out, with every weight made smaller.
            # One that is not finite, -inf too, is poison: it makes every row of its head NaN.
            rows, sinks = slice(plan.tail_start), sinks.to(torch.float32)
            with_sinks = torch.logaddexp(lse[rows], torch.where(torch.isfinite(sinks), sinks, torch.nan))
            out[rows] *= torch.exp(lse[rows] - with_sinks)[..., None]
            lse[rows] = with_sinks
        return out, lse.T.contiguous() if return_softmax_lse and lse is not None else None


def run_backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the dtype of q and dsinks in float32 (None without sinks), from what the forward pass returned.

    Stateless: out and lse may come from another plan or another operator; `plan` must be one with `gradient=True`.
    The cotangents of rows in no call are not read, but for dlse of empty rows with sinks.

    The operator rebuilds the weights as exp(s - softmax_max) / softmax_sum, so lse goes in as the maximum and 1 as the
    sum: that is right with sinks too, which are part of lse. It has no dlse. With weights P and delta the row sums of
    dout * out, ds = P * (dout v^T - delta + dlse); a spare column of v that is 0, where dout is 1 and out is -dlse,
    adds exactly -dlse to delta and nothing else.

    Args:
        plan: made with `gradient=True` for these tensors.
        q, k, v: as in the forward pass.
        out, lse: its results, `[Tq, N, Dv]` and float32 `[N, Tq]`.
        dout, dlse: their cotangents; dlse is rounded to the dtype of q on its way into the operator.
        sinks: as in the forward pass, `[N]`.
    """
    with torch.no_grad():
        chunked = any(call.group is not None for call in plan.calls)
        grad_dtype = torch.float32 if chunked else q.dtype  # the query heads of one key add up over several calls
        dq, dk, dv = q.new_zeros(q.shape), *(torch.zeros_like(x, dtype=grad_dtype) for x in (k, v))
        delta = q.new_zeros(q.shape[:2], dtype=torch.float32)
        for call in plan.calls:
            part_dq, part_dk, part_dv, part_delta = _one_gradient(plan, call, q, k, v, out, lse, dout, dlse)
            _put(dq, call.q_rows, part_dq, plan, call)
            _put(delta, call.q_rows, part_delta, plan, call)
            for total, part in ((dk, part_dk), (dv, part_dv)):
                kept = total if call.kv_heads is None else total[:, slice(*call.kv_heads)]
                _add_rows(kept, call.k_rows, part)
        dsinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(torch.float32)[:, None] - lse[:, : plan.tail_start])
            pull = -delta.T[:, : plan.tail_start]
            if dlse is not None:
                pull = pull + dlse[:, : plan.tail_start]
            dsinks = (share * pull).sum(1)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks


def _forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """out `[Tq, N, Dv]` and lse `[Tq, N]`, without sinks."""
    Tq, N, Dv = plan.shape
    if len(plan.calls) == 1 and plan.calls[0].q_rows == ((0, Tq),):
        return _one_call(plan, plan.calls[0], q, k, v, with_lse=with_lse)
    out = q.new_zeros((Tq, N, Dv))
    lse = torch.full((Tq, N), -torch.inf, dtype=torch.float32, device=q.device) if with_lse else None
    for call in plan.calls:
        part, part_lse = _one_call(plan, call, q, k, v, with_lse=with_lse)
        _put(out, call.q_rows, part, plan, call)
        if lse is not None and part_lse is not None:
            _put(lse, call.q_rows, part_lse, plan, call)
    return out, lse


def _one_call(
    plan: Plan, call: KernelCall, q: Tensor, k: Tensor, v: Tensor, *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    inputs = _inputs(plan, call, q, k, v)
    kwargs = {name: list(value) if isinstance(value, tuple) else value for name, value in call.kwargs}
    kwargs["atten_mask"] = triangle(q.device) if call.mask else None
    lse = None
    if plan.operator == INFERENCE:
        out, lse = torch.ops.npu.npu_fused_infer_attention_score(*inputs, **kwargs)
        lse = lse.squeeze(-1) if with_lse else None
    else:
        out, top, total, *_ = torch.ops.npu.npu_fusion_attention(*inputs, **kwargs)
        if with_lse:
            lse = top[..., 0] + torch.log(total[..., 0])  # eight equal copies
    return out[..., : plan.shape[2]].contiguous(), lse


def _one_gradient(
    plan: Plan,
    call: KernelCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and delta of the rows and heads of one call."""
    D, Dv = q.shape[2], v.shape[2]
    width = plan.widths[1]
    attention_in, dy = (_take(_q_heads(x, plan, call), call.q_rows) for x in (out, dout))
    delta = (attention_in.float() * dy.float()).sum(-1)
    attention_in, dy = (pad(x, (0, width - Dv)) for x in (attention_in, dy))
    if dlse is not None:
        dy[..., Dv] = 1
        attention_in[..., Dv] = -_take(_q_heads(dlse.T, plan, call), call.q_rows)
    top = _take(_q_heads(lse.T, plan, call), call.q_rows)[..., None].expand(-1, -1, 8).contiguous()
    kwargs = {name: list(value) if isinstance(value, tuple) else value for name, value in call.kwargs}
    kwargs["scale_value"] = kwargs.pop("scale")
    kwargs["atten_mask"] = triangle(q.device) if call.mask else None
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        *_inputs(plan, call, q, k, v),
        dy,
        softmax_max=top,
        softmax_sum=torch.ones_like(top),
        attention_in=attention_in,
        **kwargs,
    )
    return dq[..., :D], dk[..., :D], dv[..., :Dv], delta


def _inputs(plan: Plan, call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and heads of one call, zero-padded to the plan's widths, contiguous."""
    width_qk, width_v = plan.widths
    q = _q_heads(q, plan, call)
    if call.kv_heads is not None:
        k, v = (x[:, slice(*call.kv_heads)] for x in (k, v))
    q, k, v = (
        _take(x, rows, width)
        for x, rows, width in ((q, call.q_rows, width_qk), (k, call.k_rows, width_qk), (v, call.k_rows, width_v))
    )
    return q, k, v


def _q_heads(x: Tensor, plan: Plan, call: KernelCall) -> Tensor:
    """The query heads of the call, of `x [Tq, N, ...]`."""
    if call.kv_heads is None or call.group is None:
        return x
    grouped: Tensor = x.unflatten(1, (plan.kv_heads, -1))
    return grouped[:, slice(*call.kv_heads), slice(*call.group)].flatten(1, 2)


def _take(x: Tensor, rows: Runs, width: int | None = None) -> Tensor:
    """The given rows, zero-padded to `width`, contiguous; `x` itself when that is what it is."""
    if rows != ((0, x.shape[0]),):
        x = x[rows[0][0] : rows[0][1]] if len(rows) == 1 else x.index_select(0, _index(rows, x.device))
    if width is not None and x.shape[-1] != width:
        x = pad(x, (0, width - x.shape[-1]))
    return x.contiguous()


def _put(target: Tensor, rows: Runs, part: Tensor, plan: Plan, call: KernelCall) -> None:
    """Write the rows and query heads of a call into `target [Tq, N, ...]`."""
    if call.kv_heads is not None and call.group is not None:
        sizes = (call.kv_heads[1] - call.kv_heads[0], -1)
        target = target.unflatten(1, (plan.kv_heads, -1))[:, slice(*call.kv_heads), slice(*call.group)]
        part = part.unflatten(1, sizes)
    if len(rows) == 1:
        target[rows[0][0] : rows[0][1]] = part
    else:
        target.index_copy_(0, _index(rows, target.device), part)


def _add_rows(target: Tensor, rows: Runs, part: Tensor) -> None:
    if len(rows) == 1:
        target[rows[0][0] : rows[0][1]] += part
    else:
        target.index_add_(0, _index(rows, target.device), part.to(target.dtype))


def _index(rows: Runs, device: torch.device) -> Tensor:
    starts, stops = torch.tensor(rows, dtype=torch.int64, device="cpu").T
    lengths = stops - starts
    before = torch.cumsum(lengths, 0) - lengths
    index = torch.arange(int(lengths.sum()), device="cpu") + torch.repeat_interleave(starts - before, lengths)
    return index.to(device)


_triangles: dict[torch.device, tuple[Tensor, int]] = {}
_triangles_lock = Lock()


def triangle(device: torch.device) -> Tensor:
    """The mask that the operators want in the modes 3 and 4, bool `[2048, 2048]`: True, which hides, above the diagonal.

    Its content is the same for every call, so each device keeps one. It is made anew if somebody wrote into it.
    """
    with _triangles_lock:
        kept = _triangles.get(device)
        if kept is None or kept[0]._version != kept[1]:
            with torch.inference_mode(False):
                mask = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
            kept = _triangles[device] = (mask, mask._version)
        return kept[0]
