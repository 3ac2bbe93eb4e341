"""Which keys a query sees: the sparse modes, their mask tensors, and what a wrong mask does."""

from dataclasses import dataclass

import torch
from torch import Tensor

from npu.simulator import hazard_mode
from npu.simulator.operators.refusals import BAD_ARGUMENT, BAD_TILING, MISSING, Operator
from npu.simulator.operators.segments import Group

UNLIMITED = 2147483647
_SIDE = 2048
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Visibility:
    """Query i sees key j when `a - left <= j <= a + right`, with the aligned key `a = i + Lk - Lq`.

    A reach of None is unlimited. With `from_start` the aligned key is i itself. `own`, bool `[1 or B, 1 or N, Lq, Lk]`,
    hides more keys: where it is True. `slip` replaces the comparison where the caller's triangle is none: bool
    `[4095]`, whether a key is hidden that lies -2047 to 2047 keys after the last visible one and beyond.
    """

    left: int | None = None
    right: int | None = None
    from_start: bool = False
    own: Tensor | None = None
    slip: Tensor | None = None

    def is_causal_square(self, Lq: int, Lk: int) -> bool:
        """Whether a segment's visible part is the usual lower triangle."""
        return Lq == Lk and self.left is None and self.right == 0 and self.own is None and self.slip is None

    def hidden(self, group: Group) -> Tensor | None:
        """True where a query does not see a key, bool, broadcastable to `[B, N, Lq, Lk]`; None when all is seen."""
        Lq, Lk = group.Lq, group.Lk
        shift = 0 if self.from_start else Lk - Lq
        hidden = None
        if self.right is not None and (shift + self.right < Lk - 1 or self.slip is not None):
            hidden = self._after(Lq, Lk, shift + self.right)
        if self.left is not None and (Lq - 1 + shift - self.left > 0 or self.slip is not None):
            before = ~self._after(Lq, Lk, shift - self.left - 1)
            hidden = before if hidden is None else hidden | before
        if self.own is not None:
            own = self.own if len(self.own) == 1 else self.own[group.first : group.first + group.B]
            own = own[..., :Lk]
            hidden = own if hidden is None else hidden | own
        return hidden

    def _after(self, Lq: int, Lk: int, last: int) -> Tensor:
        """Whether key j comes after `i + last`, bool `[Lq, Lk]`."""
        if self.slip is None:
            return torch.ones(Lq, Lk, dtype=torch.bool, device="cpu").triu_(last + 1)
        distance = torch.arange(Lk, device="cpu") - (torch.arange(Lq, device="cpu")[:, None] + last)
        return self.slip[distance.clamp(1 - _SIDE, _SIDE - 1) + (_SIDE - 1)]


def band(op: Operator, names: tuple[str, str], pre: int, next_: int) -> tuple[int | None, int | None]:
    """The reach of sparse mode 4, both ends inclusive. Limits: tiling sources of CANN 8.3 to 8.5."""
    if pre < 0 or pre + next_ < 0:
        op.refuse(BAD_TILING, f"{names[0]} {pre} and {names[1]} {next_}. The first and their sum must not be negative.")
    return None if pre >= UNLIMITED else pre, None if next_ >= UNLIMITED else next_


def slip_of_triangle(op: Operator, mask: Tensor | None, sparse_mode: int) -> Tensor | None:
    """Checks the 2048 x 2048 triangle of sparse modes 3 and 4; returns None when its content is right.

    Nothing on the device looks at the content: the kernels lay the triangle over the scores along the diagonal. In
    hazard mode one that is not `triu(ones, 1)`, such as torch's usual `tril`, acts by its first row and column.
    """
    if mask is None:
        op.refuse(MISSING, f"atten_mask is missing. sparse_mode {sparse_mode} needs it.")
    if tuple(mask.shape) != (_SIDE, _SIDE) or mask.dtype not in MASK_DTYPES:
        op.refuse(
            BAD_ARGUMENT,
            f"atten_mask is {mask.dtype} {tuple(mask.shape)}. sparse_mode {sparse_mode} needs bool [2048, 2048].",
        )
    if not hazard_mode.is_on():
        return None
    cells = torch.cat((mask[1:, 0].flip(0), mask[0])).bool()
    wanted = torch.arange(1 - _SIDE, _SIDE, device="cpu") > 0
    return None if torch.equal(cells, wanted) else cells


def own_mask(op: Operator, mask: Tensor, B: int, N: int, Lq: int, Lk: int) -> Tensor:
    """A caller's full mask of a batch as bool `[1 or B, 1 or N, Lq, Lk]`, True hides."""
    if mask.dtype not in MASK_DTYPES:
        op.refuse(BAD_ARGUMENT, f"atten_mask is {mask.dtype}. It is bool, int8 or uint8.")
    full = mask[(None,) * max(0, 4 - mask.ndim)]
    if mask.ndim > 4 or len(full) not in (1, B) or full.shape[1] not in (1, N) or full.shape[2:] != (Lq, Lk):
        op.refuse(
            BAD_ARGUMENT,
            f"atten_mask has shape {tuple(mask.shape)}. sparse_mode 0 takes ({Lq}, {Lk}), or that with a "
            f"batch axis of 1 or {B} and a head axis of 1 or {N} before it.",
        )
    return full.bool()
