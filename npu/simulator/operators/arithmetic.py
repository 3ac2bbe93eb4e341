"""The arithmetic of the kernels, on host memory: which steps are float32, and where the input dtype rounds.

Scores, their scale, maximum and sum are float32. The weights, not yet divided by their sum, are rounded to the input
dtype when they meet v; that product is accumulated in float32, divided, and rounded once (kernel sources of CANN 8.3
to 8.5). torch's fused attention for the CPU rounds at the same places, so it does the work wherever it can.

Shapes: q `[B, N, Lq, D]`, k `[B, K, Lk, D]`, v `[B, K, Lk, Dv]`, of B segments of equal lengths.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_SCORES_AT_ONCE = 1 << 21
"""Scores held in memory at a time, in float32: 8 MB, which stays in the caches of a CPU."""


class Statistics(NamedTuple):
    """Largest score and softmax sum of each query, float32 `[B, N, Lq]`; -inf and 0 where it sees no key."""

    top: Tensor
    total: Tensor

    def lse(self) -> Tensor:
        """The natural log of the sum of exp over the scores."""
        return self.top + self.total.log()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, *, causal: bool = False) -> Tensor:
    """out `[B, N, Lq, Dv]` of every query over the keys that are not hidden, 0 where there is none.

    `causal` is the triangle of a square segment, in place of `hidden`.
    """
    Lk, (D, Dv) = k.shape[2], (q.shape[3], v.shape[3])
    if Lk == 0:
        return q.new_zeros((*q.shape[:3], Dv))
    if scale <= 0:  # the fused kernel hides with -inf before it scales
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    if Dv < D:
        v = pad(v, (0, D - Dv))
    # It reads rows of numbers that lie next to each other, and does not check.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bias = None
    if hidden is not None:
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device="cpu").masked_fill_(hidden, -torch.inf)
    out: Tensor = _fused(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)[0]
    if hidden is not None:
        out.masked_fill_(empty_rows(hidden, Lk)[..., None], 0)
    return out[..., :Dv]


def empty_rows(hidden: Tensor | None, Lk: int) -> Tensor:
    """Which queries see none of the Lk keys, bool, broadcastable to `[B, N, Lq]`."""
    return torch.full((1,), Lk == 0, device="cpu") if hidden is None or Lk == 0 else hidden.all(-1)


def statistics(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None, *, causal: bool = False) -> Statistics:
    """The softmax statistics of every query over the keys that are not hidden.

    torch's fused attention gives their log only, to about 1e-5 in float16 and bfloat16, where the kernels are exact.
    """
    (B, N, Lq, _), (_, K, Lk, _) = q.shape, k.shape
    top = torch.full((B, N, Lq), -torch.inf, device="cpu")
    total = torch.zeros((B, N, Lq), device="cpu")
    if Lk == 0:
        return Statistics(top, total)
    rows = max(1, _SCORES_AT_ONCE // (B * N * Lk))
    keys = k.float().transpose(-1, -2)[:, :, None]
    for start in range(0, Lq, rows):
        some = slice(start, min(start + rows, Lq))
        seen = some.stop if causal else Lk
        scores = (_grouped(q[:, :, some].float(), K) @ keys[..., :seen]).mul_(scale).flatten(1, 2)
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu_(start + 1)
            scores.masked_fill_(later, -torch.inf)
        elif hidden is not None:
            scores.masked_fill_(hidden[..., some, :], -torch.inf)
        largest = scores.amax(-1)
        top[:, :, some] = largest
        # exp(-inf - -inf) would be NaN in a row that sees nothing.
        total[:, :, some] = scores.sub_(largest.masked_fill(largest == -torch.inf, 0)[..., None]).exp_().sum(-1)
    return Statistics(top, total)


class Gradients(NamedTuple):
    """dq `[B, N, Lq, D]`, dk `[B, K, Lk, D]` and dv `[B, K, Lk, Dv]`, in float32."""

    q: Tensor
    k: Tensor
    v: Tensor


def backward(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, top: Tensor, total: Tensor, delta: Tensor, scale: float,
    hidden: Tensor | None,
) -> Gradients:  # fmt: skip
    """The gradients of attention from its statistics: no maximum or sum is computed again.

    With `P = exp(scale * q k^T - top) / total`:  dv = P^T dy,  dS = P * (dy v^T - delta),  dq = scale * dS k,
    dk = scale * dS^T q.  P and dS are rounded to the input dtype when they meet another matrix.

    Args:
        dy: the gradient of out, `[B, N, Lq, Dv]`.
        top, total: softmax maximum and sum, float32 `[B, N, Lq]`; any pair with the same `top + log(total)` will do.
        delta: the row sums of dy times out, float32 `[B, N, Lq]`.
    """
    K, Lk = k.shape[1:3]
    grads = Gradients(*(torch.zeros(x.shape, device="cpu") for x in (q, k, v)))
    for heads, keys in _some_heads(q.shape, K, Lk):
        kf, vf = k[:, keys, None].float(), v[:, keys, None].float()
        at = keys.stop - keys.start
        qf, dyf = _grouped(q[:, heads].float(), at), _grouped(dy[:, heads].float(), at)
        row_top, row_total, row_delta = (_grouped(x[:, heads, :, None], at) for x in (top, total, delta))
        weights = (qf @ kf.transpose(-1, -2)).mul_(scale).sub_(row_top).exp_().div_(row_total)
        if hidden is not None:
            covered = hidden[:, heads] if hidden.ndim == 4 and hidden.shape[1] > 1 else hidden
            weights = weights.flatten(1, 2).masked_fill_(covered, 0).unflatten(1, qf.shape[1:3])
        d_scores = (dyf @ vf.transpose(-1, -2)).sub_(row_delta).mul_(weights)
        weights, d_scores = (x.to(q.dtype).float() for x in (weights, d_scores))
        grads.q[:, heads] = (d_scores @ kf).mul_(scale).flatten(1, 2)
        grads.k[:, keys] = (d_scores.transpose(-1, -2) @ qf).sum(2).mul_(scale)
        grads.v[:, keys] = (weights.transpose(-1, -2) @ dyf).sum(2)
    return grads


def _some_heads(q_shape: torch.Size, K: int, Lk: int) -> Iterator[tuple[slice, slice]]:
    """The query heads and the key/value heads to compute at once, so that memory stays bounded."""
    B, N, Lq, _ = q_shape
    group = N // K
    step = max(1, _SCORES_AT_ONCE // max(1, B * group * Lq * Lk))
    for start in range(0, K, step):
        stop = min(start + step, K)
        yield slice(start * group, stop * group), slice(start, stop)


def _grouped(x: Tensor, K: int) -> Tensor:
    """`[B, N, ...]` as `[B, K, N / K, ...]`."""
    grouped: Tensor = x.unflatten(1, (K, x.shape[1] // K))
    return grouped


def poisoned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Where a NaN or Inf may reach in out, and where in the statistics: whole segments and heads, bool `[B, N, 1]`.

    The kernels multiply whole tiles, hidden keys and neighbouring rows included, so any row of the segment and head
    group may be lost. From v it reaches out, from q and k the statistics too.
    """
    K = k.shape[1]
    scores = _not_finite(_grouped(q, K).flatten(2, 3)) | _not_finite(k)
    out = scores | _not_finite(v)
    group = q.shape[1] // K
    return out.repeat_interleave(group, 1)[..., None], scores.repeat_interleave(group, 1)[..., None]


def has_poison(*tensors: Tensor) -> bool:
    """Whether one of them holds a NaN or Inf."""
    return any(x.numel() > 0 and not all(bool(torch.isfinite(end)) for end in torch.aminmax(x)) for x in tensors)


def _not_finite(x: Tensor) -> Tensor:
    """Whether a `[B, K, rows, width]` has a NaN or Inf, bool `[B, K]`."""
    return ~torch.isfinite(x).flatten(2).all(-1)


def with_sink(out: Tensor, stats: Statistics, sink: Tensor) -> tuple[Tensor, Statistics]:
    """out and statistics with one more logit per head, float32 `[N]`, that has no value: every weight gets smaller."""
    top = torch.maximum(stats.top, sink[:, None])
    kept = stats.total * torch.exp(stats.top - top)
    total = kept + torch.exp(sink[:, None] - top)
    return (out.float() * (kept / total)[..., None]).to(out.dtype), Statistics(top, total)
