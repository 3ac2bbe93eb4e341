"""The checks of a packed attention call on the NPU, made before anything reaches the operator.

The operators themselves check little: a wrong dtype or width passes their shape functions and fails, or computes
something else, on the device.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


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
