"""Where the softmax statistics of the training operators lie in memory.

float32 `(T, N, 8)` with 8 equal copies of every number: the vector unit reads 32 bytes at a time. With
`softmax_layout="TND"` the shape tells the order. By default it does not: the numbers of a segment with S rows that
starts at row `a` lie as `[N, S, 8]` from float `a * N * 8` on. For a batch, `(B, N, S, 8)`, both orders are one.
"""

import torch
from torch import Tensor

from npu.simulator.operators.segments import Group

COPIES = 8


def place(buffer: Tensor, group: Group, softmax_layout: str) -> Tensor:
    """The numbers of a group of segments in a contiguous buffer `(T, N, 8)`, as a view `[B, N, Lq, 8]`."""
    N = buffer.shape[1]
    rows = buffer[group.q_start : group.q_start + group.B * group.Lq]
    if softmax_layout == "TND":
        return rows.view(group.B, group.Lq, N, COPIES).transpose(1, 2)
    return rows.view(group.B, N, group.Lq, COPIES)


def write(buffer: Tensor, group: Group, softmax_layout: str, values: Tensor) -> None:
    """Puts the values `[B, N, Lq]` of a group where the operator puts them."""
    place(buffer, group, softmax_layout).copy_(values[..., None].expand(*values.shape, COPIES))


def read(buffer: Tensor, group: Group, softmax_layout: str, *, strict: bool) -> Tensor:
    """The values `[B, N, Lq]` of a group; with `strict` NaN where the copies differ, as memory nobody wrote has them."""
    copies = place(buffer, group, softmax_layout)
    first = copies[..., 0]
    return torch.where((copies == first[..., None]).all(-1), first, torch.nan) if strict else first
