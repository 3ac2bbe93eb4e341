"""The fused attention operators on the simulated NPU: real schemas, refusals, numerics.

What they accept and return follows the operator documents of torch_npu and CANN 8.3 to 8.5. Codes and texts of the
refusals are those of the real ones, so that code which reads them can be tested; each ends by saying that the device
is simulated.
"""

from importlib.resources import files
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from npu.simulator.tags import as_cpu, as_npu

_libraries: list[torch.library.Library] = []  # a collected Library takes its operators with it


def register() -> None:
    """Define the operators of `schemas.txt` for NPU and meta tensors. Once per process."""
    define = torch.library.Library("npu", "DEF")
    for line in files("npu.simulator").joinpath("schemas.txt").read_text().splitlines():
        define.define(line.removeprefix("npu::"), tags=torch.Tag.pt2_compliant_tag)
    name = "npu_fused_infer_attention_score"
    define.impl(name, _fused_infer_attention_score, "PrivateUse1")
    torch.library.register_fake(f"npu::{name}", _fused_infer_attention_score_shapes, lib=define)
    _libraries.append(define)


def _fused_infer_attention_score_shapes(
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    *,
    softmax_lse_flag: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Output shapes; like the real operator's, it checks next to nothing."""
    T, N, _width = query.shape
    lse_shape = (T, N, 1) if softmax_lse_flag else (0,)
    return query.new_empty((T, N, value.shape[-1])), query.new_empty(lse_shape, dtype=torch.float32)


def _fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The inference operator, layout TND."""
    _check_same_device(query=query, key=key, value=value, atten_mask=atten_mask)
    if given := sorted(name for name, x in others.items() if x is not None and x != 0):
        raise NotImplementedError(
            f"The simulated NPU has no {', '.join(given)} in npu_fused_infer_attention_score. It has packed attention "
            f"without bias, paging, prefix or quantisation. Leave these out, or run on real hardware."
        )
    if input_layout != "TND":
        raise NotImplementedError(
            f"The simulated NPU has no input_layout={input_layout!r} in npu_fused_infer_attention_score. It has TND. "
            f"Lay the sequences end to end, or run on real hardware."
        )
    num_key_value_heads = num_key_value_heads or num_heads
    _check_tensors(query, key, value, num_heads, num_key_value_heads)
    _check_widths(query.shape[2], value.shape[2], grouped=num_heads != num_key_value_heads, precise=inner_precise == 0)
    lengths_q = _lengths("actual_seq_lengths", actual_seq_lengths, query.shape[0])
    lengths_k = _lengths("actual_seq_lengths_kv", actual_seq_lengths_kv, key.shape[0])
    if len(lengths_q) != len(lengths_k):
        _refuse(561002, f"actual_seq_lengths has {len(lengths_q)} entries, actual_seq_lengths_kv {len(lengths_k)}.")
    left, right = _reach(sparse_mode, atten_mask, pre_tokens, next_tokens)

    index = query.device.index
    q, k, v = (as_cpu(t) for t in (query, key, value))
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device="cpu")
    lse = torch.empty((*q.shape[:2], 1), dtype=torch.float32, device="cpu")
    q_ends, k_ends = [0, *torch.tensor(lengths_q).cumsum(0).tolist()], [0, *torch.tensor(lengths_k).cumsum(0).tolist()]
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        out[q0:q1], lse[q0:q1, :, 0] = _segment(q[q0:q1], k[k0:k1], v[k0:k1], scale, left, right)
    result = lse if softmax_lse_flag else torch.empty(0, dtype=torch.float32, device="cpu")
    return as_npu(out, index), as_npu(result, index)


def _segment(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, right: int | None
) -> tuple[Tensor, Tensor]:
    """out `[L, N, Dv]` and lse `[L, N]` of one segment, rounded where the kernel rounds.

    Scores, maximum and sum in float32; the weights, not yet divided, in the input dtype when they meet v; the product
    accumulated in float32, divided, and rounded once. A row that sees no key has out 0 and lse +inf.
    """
    (Lq, N, D), (Lk, K, Dv) = q.shape, v.shape
    grouped = q.view(Lq, K, N // K, D).permute(1, 2, 0, 3).float()
    scores = (grouped @ k.permute(1, 2, 0).float()[:, None]) * scale
    partner = torch.arange(Lq)[:, None] + (Lk - Lq)
    key = torch.arange(Lk)
    hidden = torch.zeros(Lq, Lk, dtype=torch.bool)
    if left is not None:
        hidden |= key < partner - left
    if right is not None:
        hidden |= key > partner + right
    scores = scores.masked_fill(hidden, -torch.inf)
    empty = hidden.all(-1)
    top = scores.amax(-1) if Lk else scores.new_zeros(scores.shape[:-1])
    top = top.masked_fill(empty, 0)
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    out = weights.to(q.dtype).float() @ v.permute(1, 0, 2).float()[:, None] / total[..., None]
    out = out.masked_fill(empty[:, None], 0).permute(2, 0, 1, 3).reshape(Lq, N, Dv)
    lse = (top + total.log()).masked_fill(empty, torch.inf).permute(2, 0, 1).reshape(Lq, N)
    return out.to(q.dtype), lse


def _check_same_device(**tensors: Tensor | None) -> None:
    devices = {str(t.device) for t in tensors.values() if t is not None}
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(sorted(devices))}!"
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, N: int, K: int) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, t in tensors.items():
        if t.ndim != 3:
            _refuse(161002, f"{name} has {t.ndim} dimensions. Layout TND has 3.")
        if not t.is_contiguous():
            _refuse(161002, f"{name} with strides {tuple(t.stride())} is not contiguous.")
        if t.dtype not in (torch.float16, torch.bfloat16) or t.dtype != query.dtype:
            _refuse(161002, f"{name} has dtype {t.dtype}. query, key and value are all float16 or all bfloat16.")
    if key.shape[:2] != value.shape[:2]:
        _refuse(161002, f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}.")
    if (query.shape[1], key.shape[1]) != (N, K):
        _refuse(161002, f"num_heads {N} and num_key_value_heads {K} for {query.shape[1]} and {key.shape[1]} heads.")
    if N % K or N // K > 64 or N > 256:
        _refuse(561002, f"{N} query heads over {K} key/value heads. At most 256, a whole ratio of at most 64.")
    if max(query.shape[0], key.shape[0]) > 1_048_576:
        _refuse(561002, f"T is {query.shape[0]} and {key.shape[0]}. At most 1048576.")


def _check_widths(D: int, Dv: int, *, grouped: bool, precise: bool) -> None:
    if (D, Dv) in ((64, 64), (128, 128), (192, 128)) or (grouped and precise and D == Dv <= 256):
        return
    _refuse(161002, f"head widths {D} and {Dv}. Layout TND takes 64 and 64, 128 and 128, 192 and 128.")


def _lengths(name: str, sums: list[int] | None, T: int) -> list[int]:
    """The lengths behind the running sums that the operator takes."""
    if sums is None:
        _refuse(161001, f"{name} is missing. Layout TND needs it.")
    if len(sums) > 4096:
        _refuse(561002, f"{name} has {len(sums)} entries. At most 4096.")
    lengths = [int(after - before) for before, after in pairwise([0, *sums])]
    if any(n < 0 for n in lengths):
        _refuse(561002, f"{name} {list(sums)[:8]} decreases. It holds running sums.")
    if sum(lengths) != T:
        _refuse(561002, f"the last entry of {name} is {sum(lengths)} for T = {T}. They must be equal.")
    return lengths


def _reach(sparse_mode: int, mask: Tensor | None, pre: int, next_: int) -> tuple[int | None, int | None]:
    """The reach in keys to the left and right of the aligned key; the mask's content is never looked at."""
    if sparse_mode not in (0, 3, 4):
        _refuse(561002, f"sparse_mode {sparse_mode} in layout TND. It has 0, 3 and 4.")
    if sparse_mode == 0:
        if mask is not None:
            _refuse(561002, "atten_mask is given with sparse_mode 0 in layout TND.")
        return None, None
    if mask is None:
        _refuse(161001, f"atten_mask is missing. sparse_mode {sparse_mode} needs it.")
    if tuple(mask.shape) != (2048, 2048) or mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        _refuse(
            161002,
            f"atten_mask is {mask.dtype} {tuple(mask.shape)}. sparse_mode {sparse_mode} needs bool [2048, 2048].",
        )
    if not mask.is_contiguous():
        _refuse(161002, "atten_mask is not contiguous.")
    if sparse_mode == 3:
        return None, 0
    if pre < 0 or pre + next_ < 0:
        _refuse(561002, f"pre_tokens {pre} and next_tokens {next_}. pre_tokens and their sum must not be negative.")
    return pre, next_


def _refuse(code: int, detail: str) -> NoReturn:
    raise RuntimeError(
        f"npu_fused_infer_attention_score: call aclnnFusedInferAttentionScoreV3 failed, error code is {code}\n"
        f"[ERROR] ERR00100 PTA call acl api failed\nEZ9999: {detail} (simulated NPU)"
    )
