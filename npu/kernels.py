"""Running a plan: the only place where the NPU operators are called."""

from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import pad

from npu.plan import KernelCall, Plan, Runs


def run(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, return_softmax_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out `[Tq, N, Dv]` and lse `[N, Tq]` (None unless wanted) of tensors that lie on one NPU.

    The tensors must be those that `plan` was made for; nothing is checked here. Gradients are not recorded: the
    operator has none, and would say so only by a gradient that stays None.
    """
    with torch.no_grad():
        Tq, N, Dv = plan.shape
        whole: Runs = ((0, Tq),)
        if len(plan.calls) == 1 and plan.calls[0].q_rows == whole:
            return _one_call(plan, plan.calls[0], q, k, v, sinks, return_softmax_lse)
        out = q.new_zeros((Tq, N, Dv))
        lse = None
        if return_softmax_lse:
            lse = torch.full((N, Tq), -torch.inf, dtype=torch.float32, device=q.device)
            if sinks is not None:
                lse[:, : plan.tail_start] = sinks.to(torch.float32)[:, None]
        for call in plan.calls:
            part, part_lse = _one_call(plan, call, q, k, v, sinks, return_softmax_lse)
            _put(out, 0, call.q_rows, part)
            if lse is not None and part_lse is not None:
                _put(lse, 1, call.q_rows, part_lse)
        return out, lse


def _one_call(
    plan: Plan, call: KernelCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, return_softmax_lse: bool
) -> tuple[Tensor, Tensor | None]:
    width_qk, width_v = plan.widths
    inputs = (
        _ready(q, call.q_rows, width_qk),
        _ready(k, call.k_rows, width_qk),
        _ready(v, call.k_rows, width_v),
    )
    kwargs = {name: list(value) if isinstance(value, tuple) else value for name, value in call.kwargs}
    mask = triangle(q.device) if call.mask else None
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(*inputs, atten_mask=mask, **kwargs)
    out = out[..., : plan.shape[2]]
    if not return_softmax_lse and sinks is None:
        return out.contiguous(), None
    lse = lse.squeeze(-1).T.contiguous()
    if sinks is not None:
        # A sink adds exp(sink) to the softmax sum and nothing to out: the same out, with every weight made smaller.
        with_sinks = torch.logaddexp(lse, sinks.to(torch.float32)[:, None])
        out = (out * torch.exp(lse - with_sinks).T[..., None]).to(out.dtype)
        lse = with_sinks
    return out.contiguous(), lse if return_softmax_lse else None


def _ready(x: Tensor, rows: Runs, width: int) -> Tensor:
    """The given rows, zero-padded to `width`, contiguous; `x` itself when that is what it is."""
    if rows != ((0, x.shape[0]),):
        x = x[rows[0][0] : rows[0][1]] if len(rows) == 1 else x.index_select(0, _index(rows, x.device))
    if x.shape[-1] != width:
        x = pad(x, (0, width - x.shape[-1]))
    return x.contiguous()


def _put(target: Tensor, axis: int, rows: Runs, part: Tensor) -> None:
    if len(rows) == 1:
        target.narrow(axis, rows[0][0], rows[0][1] - rows[0][0]).copy_(part)
    else:
        target.index_copy_(axis, _index(rows, target.device), part)


def _index(rows: Runs, device: torch.device) -> Tensor:
    starts, stops = torch.tensor(rows, dtype=torch.int64).T
    lengths = stops - starts
    before = torch.cumsum(lengths, 0) - lengths
    index = torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - before, lengths)
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
