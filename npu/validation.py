"""The checks of a packed attention call on the NPU, made before anything reaches the operator.

The operators themselves check little: a wrong dtype or width passes their shape functions and fails, or computes
something else, on the device.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_FLOAT32 = 3.4028234663852886e38
"""The largest float32, which scores are taken in."""


class Described(NamedTuple):
    """What the checks need of a tensor, of any framework. `device` is None where there is none to compare."""

    shape: tuple[int, ...]
    dtype: str
    device: str | None = None


def packed_problems(q: Described, k: Described, v: Described) -> list[str]:
    """What is wrong with `q [Tq, N, D]`, `k [Tk, K, D]`, `v [Tk, K, Dv]`, one line each, in a fixed order:
    rank, device, dtype, key/value shapes, query/key widths, heads.

    The first sentence of each of the first five is fixed; people search for it.
    """
    tensors = {"q": q, "k": k, "v": v}
    found = []
    flat = [name for name, t in tensors.items() if len(t.shape) != 3]
    if flat:
        found.append(
            f"NPU packed attention requires q, k, and v in [T, N, D] layout; invalid tensors: {', '.join(flat)}. "
            f"Shapes are {_each(tensors, 'shape')}. Lay the sequences end to end on the first axis, without a batch axis."
        )
    devices = {name: t.device for name, t in tensors.items() if t.device is not None}
    away = [name for name, d in devices.items() if not d.startswith("npu") or d != q.device]
    if away:
        home = next((d for d in devices.values() if d.startswith("npu")), "npu:0")
        moves = "; ".join(f'{name} = {name}.to("{home}")' for name, d in devices.items() if d != home)
        found.append(
            f"NPU packed attention requires q, k, and v on the same NPU; invalid tensors: {', '.join(away)}. "
            f"Devices are {_each(tensors, 'device')}. Move them: {moves}."
        )
    if len({t.dtype for t in tensors.values()}) > 1:
        found.append(
            f"NPU packed attention requires q, k, and v with the same dtype. "
            f"Dtypes are {_each(tensors, 'dtype')}. Cast them to one dtype."
        )
    if flat:
        return found
    (_, N, D), (Tk, K, Dk), (Tv, Kv, _) = q.shape, k.shape, v.shape
    if (Tk, K) != (Tv, Kv):
        found.append(
            f"NPU packed attention requires matching K/V token and head counts. "
            f"k has {Tk} tokens and {K} heads, v has {Tv} tokens and {Kv} heads. Pass k and v of the same packing."
        )
    if Dk != D:
        found.append(
            f"NPU packed attention requires matching Q/K head dimensions. "
            f"q has width {D}, k has width {Dk}. Project both to one width."
        )
    if 0 in (N, K, D):
        found.append(
            f"`q`, `k`: {N} query heads, {K} key/value heads, width {D}. Each must be at least 1. Check shapes."
        )
    elif N % K:
        found.append(
            f"`q`: {N} query heads over {K} key/value heads leaves {N % K} over. Query heads must be a whole multiple "
            f"of key/value heads. Use a multiple of {K}."
        )
    return found


def option_problems(
    softmax_scale: object, causal: object, window_size: object, return_softmax_lse: object
) -> list[str]:
    """What is wrong with the options of a call on torch tensors."""
    found = []
    if softmax_scale is not None and (
        not isinstance(softmax_scale, int | float)
        or isinstance(softmax_scale, bool)
        or not abs(softmax_scale) <= _FLOAT32
    ):
        found.append(
            f"`softmax_scale`: {softmax_scale!r}. It must be a finite number (of float32) or None. Pass a float."
        )
    for name, value in (("causal", causal), ("return_softmax_lse", return_softmax_lse)):
        if not isinstance(value, bool):
            found.append(f"`{name}`: {value!r}. It must be True or False. Pass a Python bool.")
    entries = list(window_size) if isinstance(window_size, tuple | list) else []
    if len(entries) != 2 or not all(e is None or (type(e) is int and e >= -1) for e in entries):
        found.append(
            f"`window_size`: {window_size!r}. It must be (left, right), each an int >= 0, or None or -1 for unlimited. "
            f"Use (4, 0) for the key itself and four before it."
        )
    return found


def sinks_problems(sinks: Described | None, q: Described) -> list[str]:
    """What is wrong with sinks, which are None or floating `[N]` on the device of `q [Tq, N, D]`."""
    if sinks is None:
        return []
    if sinks.shape == (q.shape[1],) and "float" in sinks.dtype and sinks.device == q.device:
        return []
    return [
        f"`sinks`: {sinks.dtype} of shape {sinks.shape} on {sinks.device}. It must be floating, one logit per query head "
        f"({q.shape[1]},), on the device of q. Reshape it, or move it with sinks.to(q.device)."
    ]


def offsets_problems(name: str, offsets: Sequence[int], rows: int) -> list[str]:
    """What is wrong with the offsets of a packed tensor of `rows` rows."""
    if len(offsets) == 0 or offsets[0] != 0:
        first = offsets[0] if len(offsets) else "missing"
        return [f"`{name}`: the first offset is {first}. Offsets start with 0. Prepend 0 to the running sums."]
    for index, (before, after) in enumerate(pairwise(offsets), start=1):
        if after < before:
            return [
                f"`{name}`: offset {after} follows {before} at index {index}. Offsets never decrease. Pass running sums."
            ]
    if offsets[-1] > rows:
        return [
            f"`{name}`: the last offset is {offsets[-1]}, past the {rows} rows of `{name[11:]}`. Offsets count rows and end at "
            f"or before the last one. Pass the offsets of this batch."
        ]
    return []


def _each(tensors: dict[str, Described], field: str) -> str:
    return ", ".join(f"{name} {getattr(t, field)}" for name, t in tensors.items())
