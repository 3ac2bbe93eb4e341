"""How many simulated devices there are, and which one a thread works on."""

import threading

import torch

TYPE = "npu"


class _Current(threading.local):
    # As on hardware: every thread starts on device 0 and changes only its own choice.
    index: int = 0


_current = _Current()
_count = 0


def set_count(count: int) -> None:
    """Fixes the number of devices; called once, when the simulator starts."""
    global _count
    _count = count


def count() -> int:
    """The number of simulated devices, 0 before the simulator starts."""
    return _count


def current() -> int:
    """The calling thread's device index."""
    return _current.index


def checked(index: int) -> int:
    """`index` itself; RuntimeError when no such device exists."""
    if 0 <= index < _count:
        return index
    if not _count:
        raise RuntimeError("the simulated NPU does not run in this process. Call npu.simulator.enable() first.")
    raise RuntimeError(
        f"`device`: {TYPE}:{index} was asked for. This simulator has {_count}, the last is {TYPE}:{_count - 1}. "
        f"Use one of these, or start a new process with npu.simulator.enable(devices={max(index + 1, 1)})."
    )


def set_current(index: int) -> int:
    """Makes `index` the calling thread's device; returns the one before."""
    before, _current.index = _current.index, checked(index)
    if index:
        from npu.simulator import selection  # it needs this module

        selection.follow_current_device()
    return before


def index_of(device: torch.device | str | int | None) -> int:
    """The index that `device` means; None and a plain "npu" mean the current device.

    Raises ValueError for a device that is not an NPU, RuntimeError for an index that does not exist.
    """
    if device is None:
        return _current.index
    if isinstance(device, int):
        return checked(device)
    device = torch.device(device)
    if device.type != TYPE:
        raise ValueError(f"`device`: {device} is not an NPU. Use {TYPE}, {TYPE}:0 or a plain index.")
    return _current.index if device.index is None else checked(device.index)
