"""What the simulated devices did: transfers, waits, memory.

Counts are exact and may be read from any thread. A snapshot is a plain value, so that two can be subtracted:

    before = simulator.counters()
    run()
    spent = simulator.counters() - before
"""

import os
import threading
from collections import deque
from dataclasses import dataclass, field

from npu.simulator import devices


@dataclass(frozen=True)
class Traffic:
    """Copies in one direction: how many, and how many bytes of the source."""

    count: int = 0
    nbytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.nbytes + other.nbytes)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count - other.count, self.nbytes - other.nbytes)


@dataclass(frozen=True)
class Counters:
    """A snapshot of what one device did, or all of them together.

    `to_device`, `to_host`: copies between the host and the device. `from_peer`: copies that arrived from another NPU,
    counted where they arrive. `syncs`: how often the host had to wait for the device: a blocking copy to the host
    (`.cpu()`, `.tolist()`), `.item()`, an operator whose output shape depends on data (`nonzero`, `x[mask]`),
    `synchronize()`.
    """

    to_device: Traffic = field(default_factory=Traffic)
    to_host: Traffic = field(default_factory=Traffic)
    from_peer: Traffic = field(default_factory=Traffic)
    syncs: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            self.to_device + other.to_device,
            self.to_host + other.to_host,
            self.from_peer + other.from_peer,
            self.syncs + other.syncs,
        )

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(
            self.to_device - other.to_device,
            self.to_host - other.to_host,
            self.from_peer - other.from_peer,
            self.syncs - other.syncs,
        )


class _Device:
    """The running counts of one device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen = Counters()
        self.in_use = 0
        self.peak = 0
        # Frees arrive from finalizers, which may run anywhere, also inside the lock: they only append here (atomic,
        # never blocks) and whoever holds the lock next settles them. Frees before an allocation are settled before
        # it, so the peak is exact.
        self.freed: deque[int] = deque()

    def add(self, more: Counters) -> None:
        with self.lock:
            self.seen = self.seen + more

    def settle(self) -> None:
        while self.freed:
            self.in_use -= self.freed.popleft()


class Allocation:
    """Counts `nbytes` as in use on device `index` for as long as this object lives."""

    __slots__ = ("_freed", "_nbytes")

    def __init__(self, index: int, nbytes: int) -> None:
        device = _device(index)
        self._freed, self._nbytes = device.freed, nbytes
        with device.lock:
            device.settle()
            device.in_use += nbytes
            device.peak = max(device.peak, device.in_use)

    def __del__(self) -> None:
        self._freed.append(self._nbytes)


_devices: list[_Device] = []


def _device(index: int) -> _Device:
    return _devices[devices.checked(index)]


def start(count: int) -> None:
    """Makes the counts of `count` devices; called once, when the simulator starts."""
    _devices.extend(_Device() for _ in range(count))
    os.register_at_fork(after_in_child=_new_locks)


def _new_locks() -> None:
    # A thread that does not exist in the forked child may have held a lock at the moment of the fork.
    for device in _devices:
        device.lock = threading.Lock()


def count_to_device(index: int, nbytes: int) -> None:
    """Notes a copy of `nbytes` from the host to device `index`."""
    _device(index).add(Counters(to_device=Traffic(1, nbytes)))


def count_to_host(index: int, nbytes: int, *, blocking: bool) -> None:
    """Notes a copy of `nbytes` from device `index` to the host; a blocking one is also a sync."""
    _device(index).add(Counters(to_host=Traffic(1, nbytes), syncs=int(blocking)))


def count_from_peer(index: int, nbytes: int) -> None:
    """Notes a copy of `nbytes` from another device to device `index`."""
    _device(index).add(Counters(from_peer=Traffic(1, nbytes)))


def count_sync(index: int) -> None:
    """Notes that the host waited for device `index`."""
    _device(index).add(Counters(syncs=1))


def counters(device: int | None = None) -> Counters:
    """A snapshot of the counts of device `device`, of all devices together when None.

    Raises RuntimeError for a device that does not exist.
    """
    if device is not None:
        return _device(device).seen
    return sum((each.seen for each in _devices), Counters())


def memory_in_use(index: int) -> int:
    """The bytes of all living storages of device `index`."""
    device = _device(index)
    with device.lock:
        device.settle()
        return device.in_use


def memory_peak(index: int) -> int:
    """The largest `memory_in_use` of device `index`, in bytes, since the start or the last `reset_memory_peak`."""
    device = _device(index)
    with device.lock:
        return device.peak


def reset_memory_peak(index: int) -> None:
    """Starts the peak of device `index` again from what is in use now."""
    device = _device(index)
    with device.lock:
        device.settle()
        device.peak = device.in_use
