"""Gradients of npu_fusion_attention, by its grad operator. Of its outputs the first alone has one.

`torch.library.register_autograd` has no place for tensors among keyword-only arguments, which the grad operator has, so
this is an autograd function registered as the operator's kernel for autograd.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu.simulator.operators.training import Forward

_npu: Any = torch.ops.npu


def fusion_attention(*args: Any, **kwargs: Any) -> Forward:
    """The operator's kernel for autograd, on any device; arguments as in its schema."""
    arguments = _npu.npu_fusion_attention.default._schema.arguments
    given = {each.name: each.default_value for each in arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    query, key, value, sink = (given.pop(name) for name in ("query", "key", "value", "sink"))
    result: Forward = _FusionAttention.apply(query, key, value, sink, given)  # type: ignore[no-untyped-call]
    return result


class _FusionAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, given: dict[str, Any]
    ) -> Forward:
        with torch._C._AutoDispatchBelowAutograd():
            out, top, total, rest, *dropout = _npu.npu_fusion_attention(query, key, value, sink=sink, **given)
        ctx.save_for_backward(query, key, value, sink, given["atten_mask"], top, total, rest, out)
        ctx.given = given
        ctx.mark_non_differentiable(top, total, rest)
        return (out, top, total, rest, *dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        query, key, value, sink, mask, top, total, rest, out = ctx.saved_tensors
        names = (
            "head_num", "input_layout", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "actual_seq_qlen",
            "actual_seq_kvlen", "sparse_mode", "softmax_layout",
        )  # fmt: skip
        dq, dk, dv, _dpse, dsink = _npu.npu_fusion_attention_grad(
            query, key, value, dy, atten_mask=mask, softmax_max=top, softmax_sum=total, softmax_in=rest,
            attention_in=out, scale_value=ctx.given["scale"], sink=sink, **{name: ctx.given[name] for name in names},
        )  # fmt: skip
        return dq, dk, dv, None if sink is None else dsink, None
