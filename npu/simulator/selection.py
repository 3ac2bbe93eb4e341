"""A plain "npu", without an index, means the current device.

Kernels resolve it themselves. In a few places torch's C++ resolves it before any kernel sees it, by asking the device
guard, and a guard written in Python always answers 0: in `Tensor.to` (also inside `torch.tensor`), in
`Tensor.new_tensor`, and in `torch.accelerator`.
"""

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.library import Library

from npu.simulator import devices, module, streams

_once = threading.Lock()
_library: Library | None = None


def _with_index(device: torch.device | None) -> torch.device | None:
    if device is not None and device == torch.device(devices.TYPE):
        return torch.device(devices.TYPE, devices.current())
    return device


def _to(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    device = _with_index(device)
    unchanged = (
        not copy
        and dtype in (None, tensor.dtype)
        and layout in (None, tensor.layout)
        and device in (None, tensor.device)
        and memory_format in (None, torch.preserve_format, suggest_memory_format(tensor))
    )
    if unchanged:
        return tensor
    return torch.ops.aten._to_copy.default(  # type: ignore[no-any-return]
        tensor,
        dtype=dtype,
        layout=layout,
        device=device,
        pin_memory=pin_memory,
        non_blocking=non_blocking,
        memory_format=memory_format,
    )


def _to_device(
    tensor: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    return _to(tensor, dtype=dtype, device=device, non_blocking=non_blocking, copy=copy, memory_format=memory_format)


def follow_current_device() -> None:
    """From now on `Tensor.to("npu")` goes to the current device.

    Called when a thread first leaves device 0: until then torch's answer is right, and its `to`, which is also the
    host's, stays fast.
    """
    global _library
    with _once:
        if _library is not None:
            return
        _library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of kernels that take the place of others
            for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):  # the second for `vmap`
                _library.impl("to.dtype_layout", _to, key)
                _library.impl("to.device", _to_device, key)


def _on_own_device(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`method`, called with its tensor's device as the current one, as torch's guard does on hardware."""

    @functools.wraps(method)
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.device.type != devices.TYPE:
            return method(self, *args, **kwargs)
        with module.device(self.device):
            return method(self, *args, **kwargs)

    return call


def _exchange(index: int) -> int:
    return devices.current() if index < 0 else devices.set_current(index)


def install() -> None:
    """Makes `torch.accelerator` and the tensor methods that make tensors speak of the right device."""
    for name in ("new", "new_tensor"):
        setattr(torch.Tensor, name, _on_own_device(getattr(torch.Tensor, name)))
    answers: dict[str, Any] = {
        "getDeviceIndex": devices.current,
        "setDeviceIndex": module.set_device,
        "exchangeDevice": _exchange,
        "maybeExchangeDevice": _exchange,
        "getStream": streams.current_stream,
        "setStream": streams.set_stream,
        "synchronizeDevice": module.synchronize,
        "isAllocatorInitialized": module.is_initialized,
        "emptyCache": module.empty_cache,
        "getMemoryInfo": module.mem_get_info,
        "resetPeakStats": module.reset_peak_memory_stats,
        "getDeviceStats": _device_stats,
    }
    for name, answer in answers.items():
        setattr(torch._C, f"_accelerator_{name}", answer)


def _device_stats(index: int) -> dict[str, dict[str, dict[str, int]]]:
    stats = {"current": module.memory_allocated(index), "peak": module.max_memory_allocated(index)}
    return {"allocated_bytes": {"all": stats}, "reserved_bytes": {"all": stats}}
