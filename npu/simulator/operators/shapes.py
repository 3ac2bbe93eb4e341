"""The outputs' shapes, dtypes and devices without their values: what meta tensors, FakeTensor and torch.compile see.

Like the shape functions of the real operators they check next to nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from npu.simulator.operators.training import Backward, Forward


def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    *,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    input_layout: str = "BSH",
    softmax_lse_flag: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """out and lse of the first version."""
    return _inference(query, value, num_heads, num_key_value_heads, input_layout, want_lse=softmax_lse_flag)


def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    *,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    input_layout: str = "BSH",
    return_softmax_lse: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """out and lse of the second version."""
    return _inference(query, value, num_query_heads, num_key_value_heads, input_layout, want_lse=return_softmax_lse)


def _inference(
    query: Tensor, value: Tensor, N: int, K: int, layout: str, *, want_lse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = query.new_empty(_out_shape(query, value, layout, N, K or N))
    lse_shape = (*_statistics_shape(query, layout, N), 1) if want_lse else (0,)
    return out, query.new_empty(lse_shape, dtype=torch.float32)


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *_: object,
    **__: object,
) -> Forward:
    """out, maximum, sum and the rest of the forward operator."""
    K = head_num * key.shape[2] // query.shape[2] if input_layout == "BSH" else 0
    statistics = (*_statistics_shape(query, input_layout, head_num), 8)
    top, total = (query.new_empty(statistics, dtype=torch.float32) for _ in range(2))
    out = query.new_empty(_out_shape(query, value, input_layout, head_num, K))
    return out, top, total, query.new_empty(0), 0, 0, 0


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,  # noqa: ARG001
    head_num: int,
    input_layout: str,  # noqa: ARG001
    *,
    sink: Tensor | None = None,
    **_: object,
) -> Backward:
    """The gradients."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    dsink = query.new_empty(0 if sink is None else head_num, dtype=torch.float32)
    return dq, dk, dv, query.new_empty(0), dsink


def _out_shape(query: Tensor, value: Tensor, layout: str, N: int, K: int) -> Sequence[int]:
    width = value.shape[-1] * N // K if layout == "BSH" else value.shape[-1]
    return (*query.shape[:-1], width)


def _statistics_shape(query: Tensor, layout: str, N: int) -> Sequence[int]:
    """`(T, N)` of packed rows, `(B, N, S)` of a batch."""
    if layout == "TND":
        return query.shape[:2]
    if layout == "BNSD":
        return query.shape[:3]
    return query.shape[0], N, query.shape[1]
