"""The module `torch.npu` of the simulated device."""

from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from npu.simulator import counting, devices, streams

DeviceLike = torch.device | str | int | None


class device:  # noqa: N801  (torch.cuda.device and torch.npu.device are written so)
    """Context manager: inside, `device` is the thread's current NPU. None and negative indices change nothing."""

    def __init__(self, device: DeviceLike) -> None:
        unchanged = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if unchanged else devices.index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = devices.current() if self.idx < 0 else devices.set_current(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        devices.set_current(self.prev_idx)


class device_of(device):  # noqa: N801
    """Context manager: inside, the device of `tensor` is the current NPU; a host tensor changes nothing."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.device.index if tensor.device.type == devices.TYPE else -1)


class stream:  # noqa: N801
    """Context manager: inside, `stream` is the current one, and its device the current device. None changes nothing."""

    def __init__(self, stream: streams.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


def is_available() -> bool:
    """True: a simulated device is always there."""
    return True


def is_initialized() -> bool:
    """True: there is nothing to initialise."""
    return True


def init() -> None:
    """Does nothing: there is nothing to initialise."""


def device_count() -> int:
    """The number of simulated devices."""
    return devices.count()


def current_device() -> int:
    """The index of the calling thread's device."""
    return devices.current()


def set_device(device: DeviceLike) -> None:
    """Makes `device` the calling thread's device: what a plain "npu" means. RuntimeError when it does not exist."""
    devices.set_current(devices.index_of(device))


def get_device_name(device: DeviceLike = None) -> str:
    """A name that says that the device is simulated."""
    return f"simulated NPU {devices.index_of(device)} (host memory and host arithmetic)"


def synchronize(device: DeviceLike = None) -> None:
    """Counts one sync. All work is done already."""
    counting.count_sync(devices.index_of(device))


def memory_allocated(device: DeviceLike = None) -> int:
    """The bytes of all living storages on the device."""
    return counting.memory_in_use(devices.index_of(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The largest `memory_allocated` since the start or the last `reset_peak_memory_stats`, in bytes."""
    return counting.memory_peak(devices.index_of(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Starts `max_memory_allocated` again from what is in use now."""
    counting.reset_memory_peak(devices.index_of(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """The same as `memory_allocated`: the simulator keeps no cache."""
    return memory_allocated(device)


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """`memory_allocated` and its peak in bytes, under torch's keys."""
    return {
        "allocated_bytes.all.current": memory_allocated(device),
        "allocated_bytes.all.peak": max_memory_allocated(device),
    }


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Raises NotImplementedError: a simulated device has no memory limit of its own."""
    raise NotImplementedError(
        f"mem_get_info: simulated npu:{devices.index_of(device)} has no memory limit, so nothing is free or total. "
        "Use memory_allocated() and max_memory_allocated()."
    )


def empty_cache() -> None:
    """Does nothing: the simulator keeps no cache."""


def manual_seed(seed: int) -> None:
    """Seeds the random numbers of the device. A simulated device draws from the host's default generator."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """The same as `manual_seed`: all devices draw from one generator."""
    manual_seed(seed)


def initial_seed() -> int:
    """The seed that the device's random numbers started from."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: DeviceLike = "npu") -> Tensor:
    """The state of the device's random numbers: the host's, as a CPU tensor of uint8."""
    devices.index_of(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: Tensor, device: DeviceLike = "npu") -> None:
    """Puts the state of `get_rng_state` back."""
    devices.index_of(device)
    torch.default_generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that `torch.autocast("npu")` takes."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    """True."""
    return True


def is_triton_capable(device: DeviceLike = None) -> bool:  # noqa: ARG001
    """False: no compiler makes kernels for a simulated device."""
    return False


def _is_in_bad_fork() -> bool:
    return False  # host memory survives a fork


def make_module() -> ModuleType:
    """The module object that `torch.npu` is, with every public name above."""
    names: dict[str, Any] = {
        name: value
        for name, value in globals().items()
        if getattr(value, "__module__", None) == __name__ and name not in ("make_module",)
    }
    module = ModuleType("torch.npu", "A simulated NPU: `torch.npu` over host memory.")
    module.__dict__.update(names)
    module.__dict__.update(
        __simulated__=True,
        Stream=streams.Stream,
        Event=streams.Event,
        default_stream=streams.default_stream,
        current_stream=streams.current_stream,
        set_stream=streams.set_stream,
        default_generators=(),
    )
    return module
