"""Streams and events of the simulated device, where all work is done when a call returns."""

import itertools
import threading
import time
from types import TracebackType
from typing import Any, Self

import torch

from npu.simulator import counting, devices

_StreamBase: Any = torch.Stream
_EventBase: Any = torch.Event
_PRIVATEUSE1 = torch._C._autograd.DeviceType.PrivateUse1.value
_ids = itertools.count(1)


class _StreamType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _StreamBase)  # torch's C++ code makes some too


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _EventBase)


def _elsewhere(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type != devices.TYPE


class Stream(_StreamBase, metaclass=_StreamType):  # type: ignore[misc]
    """A stream of an NPU, by default of the current one. Work never waits on it.

    As a context manager it becomes the thread's stream and its device the thread's device. For a device of another kind
    torch's own stream is made.
    """

    def __new__(cls, device: Any = None, **kwargs: Any) -> Any:
        if "stream_id" not in kwargs:
            if _elsewhere(device):
                return _StreamBase(device, **kwargs)
            index = devices.index_of(device)
            kwargs = {"stream_id": next(_ids), "device_index": index, "device_type": _PRIVATEUSE1}
        return super().__new__(cls, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what `__new__` took; everything is done there."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Counts one sync."""
        counting.count_sync(self.device_index)

    def wait_event(self, event: torch.Event) -> None:
        """Nothing to do: what an event marks is done already."""

    def wait_stream(self, other: torch.Stream) -> None:
        """Nothing to do: the other stream's work is done already."""

    def record_event(self, event: Any = None) -> Any:
        """Records `event`, a new one when None, and returns it."""
        event = Event(self.device) if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        _streams.left.append((devices.current(), current_stream(self.device_index)))
        devices.set_current(self.device_index)
        set_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        index, stream = _streams.left.pop()
        set_stream(stream)
        devices.set_current(index)


class Event(_EventBase, metaclass=_EventType):  # type: ignore[misc]
    """A mark in the work of an NPU, reached as soon as it is recorded. Its time is the host's clock."""

    _index: int
    _timed: bool
    _recorded_ns: int | None

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, **kwargs: Any) -> Any:
        if _elsewhere(device):
            return _EventBase(device, enable_timing=enable_timing, **kwargs)
        index = devices.index_of(device)
        event = super().__new__(cls, torch.device(devices.TYPE, index), enable_timing=enable_timing, **kwargs)
        event._index, event._timed, event._recorded_ns = index, enable_timing, None
        return event

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what `__new__` took; everything is done there."""

    @property
    def device(self) -> torch.device:
        """The event's NPU."""
        return torch.device(devices.TYPE, self._index)

    def record(self, stream: torch.Stream | None = None) -> None:  # noqa: ARG002
        """Takes the time."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Nothing to do: what the event marks is done already."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Counts one sync."""
        counting.count_sync(self._index)

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to `end_event`. ValueError unless both are timed and recorded."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6

    def __repr__(self) -> str:
        return f"torch.npu.Event(device={self.device}, recorded={self._recorded_ns is not None})"


class _Streams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}
        self.left: list[tuple[int, Any]] = []  # device and stream to return to, for every `with` under way


_streams = _Streams()


def default_stream(device: torch.device | str | int | None = None) -> Any:
    """The stream with number 0 of a device, by default of the current one."""
    return Stream(stream_id=0, device_index=devices.index_of(device), device_type=_PRIVATEUSE1)


def current_stream(device: torch.device | str | int | None = None) -> Any:
    """The calling thread's stream on a device, by default on the current one."""
    index = devices.index_of(device)
    return _streams.by_device.get(index) or default_stream(index)


def set_stream(stream: torch.Stream) -> None:
    """Makes `stream` the calling thread's on the stream's device."""
    _streams.by_device[stream.device_index] = stream


def install() -> None:
    """Makes `torch.Stream` and `torch.Event` the classes above.

    torch's own ask the device guard, and a guard written in Python knows npu:0 only and has no events.
    """
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc]
