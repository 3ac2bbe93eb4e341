"""The offsets of a packed batch as host integers, read from the device at most once."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# By the tensor object, which must be alive and unchanged: its version goes up with every write. Never by address, which
# the next tensor may have.
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()
_read_lock = Lock()
_checking: ContextVar[bool] = ContextVar("checking", default=False)


@contextmanager
def checking() -> Iterator[None]:
    """Inside, host copies of offsets are compared with their tensors, which reads the device.

    Outside, a host copy is trusted and its tensor is not read.
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


class HostOffsets(NamedTuple):
    """The offsets of one argument, and what is wrong with how they were given ("" when nothing is).

    They are packed, eight bytes each, because a call looks its plan up by them: bytes are hashed and compared several
    times faster than a tuple of ints.
    """

    packed: bytes
    problem: str = ""

    @property
    def values(self) -> tuple[int, ...]:
        """The offsets as integers."""
        return tuple(array("q", self.packed))


def host_offsets(name: str, tensor: Tensor, host: Sequence[int] | None) -> HostOffsets:
    """The offsets of argument `name`, from the host copy where there is one."""
    if host is None:
        problem = _tensor_problem(name, tensor)
        return HostOffsets(b"", problem) if problem else HostOffsets(_packed(tensor))
    try:
        given = HostOffsets(array("q", host).tobytes())
    except (TypeError, OverflowError):
        return HostOffsets(b"", f"`{name}_host`: {_short(host)}. It must hold ints. Use {name}.tolist().")
    if _checking.get():
        if problem := _tensor_problem(name, tensor):
            return HostOffsets(b"", problem)
        seen = HostOffsets(_packed(tensor))
        if seen != given:
            return HostOffsets(
                b"",
                f"`{name}_host`: {_short(host)} where `{name}` holds {_short(seen.values)}. The host copy must be equal. "
                f"Pass {name}.tolist(), or leave the host copy out.",
            )
    return given


def _packed(tensor: Tensor) -> bytes:
    # Reading host memory costs nothing, and numpy can change it without a new version.
    if tensor.device.type == "cpu" or tensor.is_inference():
        return array("q", tensor.tolist()).tobytes()
    with _read_lock:
        kept = _read.get(tensor)
        if kept is None or kept[0] != tensor._version:
            kept = _read[tensor] = (tensor._version, array("q", tensor.tolist()).tobytes())
        packed: bytes = kept[1]
        return packed


def _tensor_problem(name: str, tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return f"`{name}`: {type(tensor).__name__}. It must be a tensor of int32 offsets. Use torch.tensor(offsets)."
    if tensor.ndim == 1 and tensor.dtype in (torch.int32, torch.int64):
        return ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (
        f"`{name}`: {dtype} of shape {tuple(tensor.shape)}. Offsets are int32 with one dimension. Pass running sums that "
        f"start with 0, as int32."
    )


def _short(given: Sequence[object]) -> str:
    values = list(given) if isinstance(given, Iterable) else [given]
    shown = ", ".join(repr(value) for value in values[:8])
    return f"[{shown}, ... {len(values)} of them]" if len(values) > 8 else f"[{shown}]"
