"""What a call would do, and why: mask, plan, work, and the rows of the contract that decided."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxattn import Segments, draw
from jaxattn.mask import MOST_DRAWN, key_intervals
from jaxattn.validation import option_problems, resolve_options
from npu.contract import Profile
from npu.plan import Plan, make_plan
from npu.validation import Described, packed_problems

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Explanation:
    """A call without its data. Sizes in bytes, work in floating point operations of the forward pass."""

    plan: Plan
    mask: str
    visible_pairs: int
    flops: int
    dense_flops: int
    bytes_to_device: int
    bytes_to_host: int
    dense_mask_bytes: int

    def __str__(self) -> str:
        share = self.flops / self.dense_flops if self.dense_flops else 0.0
        return "\n".join(
            [
                *([self.mask, ""] if self.mask else []),
                str(self.plan),
                "",
                f"visible pairs of query and key   {self.visible_pairs:>18,}",
                f"work, forward                    {self.flops:>18,} flop, {share:.1%} of a dense mask's "
                f"{self.dense_flops:,}",
                f"to the device                    {self.bytes_to_device:>18,} bytes (q, k, v)",
                f"from the device                  {self.bytes_to_host:>18,} bytes (out)",
                f"a dense float32 mask would take  {self.dense_mask_bytes:>18,} bytes",
            ]
        )


def explain(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (8, 8),
    widths: tuple[int, int] = (64, 64),
    dtype: str = "bfloat16",
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    gradient: bool = False,
    profile: Profile | None = None,
) -> Explanation:
    """Plan a call and count its work, without data and without a device.

    Args:
        q_lengths, k_lengths: rows of each segment; None means the same as q.
        heads: N query heads and K key/value heads.
        widths: D of q and k, Dv of v.
        dtype: float16, bfloat16 or float32.
        causal, window_size: as in `jaxattn.packed_attention`.
        gradient: explain the forward pass of the training operator, whose gradient the NPU takes.
        profile: chip and CANN release; None is the default one.

    Raises:
        ValueError: a call that would be wrong.
        NotImplementedError: a call that no kernel takes, or a chip that no plan is made for.
    """
    segments = Segments.from_lengths(q_lengths, k_lengths)
    Tq, Tk = int(segments.cu_seqlens_q[-1]), int(segments.cu_seqlens_k[-1])
    (N, K), (D, Dv) = heads, widths
    shapes = (Tq, N, D), (Tk, K, D), (Tk, K, Dv)
    problems = packed_problems(*(Described(shape, dtype) for shape in shapes))
    problems += option_problems(None, causal, window_size, None, False)
    if problems:
        raise ValueError("\n".join(problems))
    options = resolve_options(D, None, causal, window_size, None)
    plan = make_plan(
        *shapes, dtype, tuple(segments.cu_seqlens_q.tolist()), tuple(segments.cu_seqlens_k.tolist()),
        left=options.left, right=options.right, gradient=gradient, profile=profile or Profile(),
    )  # fmt: skip
    lo, hi = key_intervals(segments, Tq, Tk, left=options.left, right=options.right)
    pairs = int((np.asarray(hi, np.int64) - np.asarray(lo, np.int64)).sum())
    size = _BYTES[dtype]
    return Explanation(
        plan=plan,
        mask=draw(segments, causal=causal, window_size=window_size) if max(Tq, Tk) <= MOST_DRAWN else "",
        visible_pairs=pairs,
        flops=2 * pairs * N * (D + Dv),
        dense_flops=2 * Tq * Tk * N * (D + Dv),
        bytes_to_device=size * (Tq * N * D + Tk * K * (D + Dv)),
        bytes_to_host=size * Tq * N * Dv,
        dense_mask_bytes=4 * Tq * Tk,
    )
