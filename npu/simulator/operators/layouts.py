"""The layouts of query, key and value: every one is rows of heads, `[T, N, D]`, as the packed one has them.

A batch of B sequences of S rows each is a packing of B equal segments.
"""

from typing import NamedTuple

from torch import Tensor

from npu.simulator.operators.refusals import BAD_ARGUMENT, Operator
from npu.simulator.operators.segments import Span

_AXES = {"TND": 3, "BSND": 4, "BNSD": 4, "BSH": 3}


class Rows(NamedTuple):
    """A tensor as packed rows `[T, N, D]`, with its sequences: B of S rows each, or None where it is packed already."""

    x: Tensor
    batch: tuple[int, int] | None

    def spans(self) -> tuple[Span, ...]:
        """The rows of each sequence of a batch."""
        assert self.batch is not None
        B, S = self.batch
        return tuple((b * S, (b + 1) * S) for b in range(B))


def check_layout(op: Operator, layout: str) -> None:
    """TND, BSND, BNSD and BSH pass."""
    if layout in ("SBH", "NTD", "NTD_TND", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"):
        op.lacks(f"input_layout {layout!r}", ", ".join(_AXES), "Lay the tensors out so")
    if layout not in _AXES:
        op.refuse(BAD_ARGUMENT, f"input_layout is {layout!r}. It is one of {', '.join(_AXES)}, in capitals.")


def rows(op: Operator, name: str, x: Tensor, layout: str, heads: int) -> Rows:
    """`x` as packed rows; a view where its memory allows."""
    if x.ndim != _AXES[layout]:
        op.refuse(BAD_ARGUMENT, f"{name} has {x.ndim} dimensions. Layout {layout} has {_AXES[layout]}.")
    if layout == "TND":
        return Rows(x, None)
    if layout == "BSH":
        if heads < 1 or x.shape[2] % heads:
            op.refuse(BAD_ARGUMENT, f"{name} has width {x.shape[2]}, which {heads} heads do not share evenly.")
        x = x.unflatten(2, (heads, x.shape[2] // heads))
    elif layout == "BNSD":
        x = x.transpose(1, 2)
    return Rows(x.flatten(0, 1), (x.shape[0], x.shape[1]))


def restored(x: Tensor, layout: str, batch: tuple[int, int] | None) -> Tensor:
    """Packed rows `[T, N, D]` in the layout again, contiguous."""
    if batch is None:
        return x
    x = x.unflatten(0, batch)
    if layout == "BSH":
        return x.flatten(2)
    return x.transpose(1, 2).contiguous() if layout == "BNSD" else x


def batch_sizes(q: Rows, k: Rows) -> tuple[int, int, int, int]:
    """`(B, N, Sq, Sk)` of a batch."""
    assert q.batch is not None
    assert k.batch is not None
    return q.batch[0], q.x.shape[1], q.batch[1], k.batch[1]
