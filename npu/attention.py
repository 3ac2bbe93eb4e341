"""Packed attention for torch users, on tensors that lie on an NPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from npu.kernels import run
from npu.plan import make_plan
from npu.validation import Described, offsets_problems, packed_problems


def fused_infer_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    cu_seqlens_q_host: Sequence[int] | None = None,
    cu_seqlens_k_host: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside each segment of a packed batch, by the fused inference kernel of the NPU.

    The first nine parameters are those of sglang's function of this name, with the same meaning and defaults. With
    `causal=True` the last query of a segment lines up with its last key. Two queries, five keys:

        k  0 1 2 3 4
        q0 x x x x .
        q1 x x x x x

    A query that sees no key gives 0, and its lse is -inf (with sinks: its sink). Rows past the last offset give 0 and
    -inf. A NaN or Inf stays inside its segment and head group; there any row may become non-finite.

    Args:
        q: queries `[Tq, N, D]` on an NPU, float16 or bfloat16.
        k: keys `[Tk, K, D]` on the same NPU, same dtype; `N` is a multiple of `K`.
        v: values `[Tk, K, Dv]`, likewise.
        cu_seqlens_q, cu_seqlens_k: int32 offsets `[B + 1]`: start with 0, never decrease, end at or before T. On a
            device they are read back once per call, which waits for the device.
        cu_seqlens_q_host, cu_seqlens_k_host: the same as host integers; then the tensors are not read.
        softmax_scale: the factor on `<q, k>`; None means `D ** -0.5`.
        return_softmax_lse: also return lse, the natural log of the softmax sum.
        causal: hide keys after the query.
        window_size: the reach `(left, right)` in keys, both ends inclusive; None or -1 is unlimited.
        sinks: one logit per query head, floating `[N]` on the same NPU, added to the softmax sum.

    Returns:
        out `[Tq, N, Dv]` in the dtype of q; with `return_softmax_lse=True` also lse float32 `[N, Tq]`. No gradients.

    Raises:
        ValueError: everything that is wrong with the call, one line each.
        NotImplementedError: what the kernel lacks, by name, and what to use instead.
        RuntimeError: the device refused or failed.
    """
    described = [Described(tuple(t.shape), _name(t.dtype), str(t.device)) for t in (q, k, v)]
    problems = packed_problems(*described)
    problems += _option_problems(causal, window_size)
    if sinks is not None and q.ndim == 3:
        problems += _sinks_problems(sinks, q)
    offsets: list[tuple[int, ...]] = []
    for name, tensor, host, rows in (
        ("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q_host, q.shape[0] if q.ndim == 3 else None),
        ("cu_seqlens_k", cu_seqlens_k, cu_seqlens_k_host, k.shape[0] if k.ndim == 3 else None),
    ):
        values, found = _read_offsets(name, tensor, host)
        if not found and rows is not None:
            found = offsets_problems(name, values, rows)
        offsets.append(values)
        problems += found
    if not problems and len(offsets[0]) != len(offsets[1]):
        problems.append(
            f"`cu_seqlens_k`: {len(offsets[1]) - 1} key segments for {len(offsets[0]) - 1} query segments. Both sides "
            f"need the same number. Repeat an offset for a segment that has nothing."
        )
    if problems:
        raise ValueError("\n".join(problems))

    left, right = (None if reach == -1 else reach for reach in window_size)
    plan = make_plan(
        tuple(q.shape), tuple(k.shape), tuple(v.shape), _name(q.dtype), *offsets,
        softmax_scale=softmax_scale, left=left, right=0 if causal else right,
        return_softmax_lse=return_softmax_lse or sinks is not None,
    )  # fmt: skip
    out, lse = run(plan, q, k, v, sinks=sinks, return_softmax_lse=return_softmax_lse)
    return out if lse is None else (out, lse)


def _read_offsets(name: str, tensor: Tensor, host: Sequence[int] | None) -> tuple[tuple[int, ...], list[str]]:
    """The offsets as host integers, from the host copy where there is one, and what is wrong with them."""
    if host is not None:
        values = tuple(host)
        if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            return values, []
        return values, [f"`{name}_host`: {values}. It must hold Python ints. Use tensor.tolist()."]
    if tensor.ndim != 1 or tensor.dtype not in (torch.int32, torch.int64):
        return (), [
            f"`{name}`: {_name(tensor.dtype)} of shape {tuple(tensor.shape)}. Offsets are int32 with one dimension. "
            f"Pass running sums that start with 0, as int32."
        ]
    return tuple(tensor.tolist()), []


def _option_problems(causal: object, window_size: object) -> list[str]:
    found = []
    if not isinstance(causal, bool):
        found.append(f"`causal`: {causal!r}. It must be True or False. Pass a Python bool.")
    entries = list(window_size) if isinstance(window_size, tuple | list) else []
    if len(entries) != 2 or not all(e is None or (type(e) is int and e >= -1) for e in entries):
        found.append(
            f"`window_size`: {window_size!r}. It must be (left, right), each an int >= 0, or None or -1 for unlimited. "
            f"Use (4, 0) for the key itself and four before it."
        )
    return found


def _sinks_problems(sinks: Tensor, q: Tensor) -> list[str]:
    if tuple(sinks.shape) == (q.shape[1],) and sinks.dtype.is_floating_point and sinks.device == q.device:
        return []
    return [
        f"`sinks`: {_name(sinks.dtype)} of shape {tuple(sinks.shape)} on {sinks.device}. It must be floating, one logit "
        f"per query head ({q.shape[1]},), on the device of q. Reshape it, or move it with sinks.to(q.device)."
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
