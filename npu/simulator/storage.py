"""Storages on the simulated device, and which host memory counts as pinned."""

from typing import Any

import torch
from torch import Tensor

from npu.simulator import devices
from npu.simulator.tags import as_npu


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage as a uint8 tensor of rank 1 over the same memory, on the storage's device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def mark_pinned(tensor: Tensor) -> Tensor:
    """Remembers the memory of a host tensor as pinned; returns the tensor."""
    tensor.untyped_storage()._npu_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:  # noqa: ARG001
    """Whether the memory of a host tensor was pinned."""
    return hasattr(tensor.untyped_storage(), "_npu_pinned")


def pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:  # noqa: ARG001
    """A copy of a host tensor that counts as pinned. To a simulated device all host memory is equally near."""
    return mark_pinned(tensor.clone(memory_format=torch.preserve_format))


def install() -> None:
    """Teaches `torch.UntypedStorage` the device. Copies of storages, `deepcopy` and `torch.load` all come through it.

    torch would ask the device's C++ allocator for memory, and follow the null pointer that stands for none.
    """
    storage: Any = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != devices.TYPE:
            return make(cls, *args, **kwargs)
        host = make(cls, *args, **{**kwargs, "device": "cpu"})
        return as_npu(bytes_of(host), devices.index_of(device)).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != devices.TYPE:
            return resize(self, size)
        raise NotImplementedError(
            f"UntypedStorage.resize_: {size} bytes were asked for a storage on {self.device}. "
            "Memory of the simulated NPU has a fixed size. Make a new tensor and copy."
        )

    storage.__new__, storage.resize_ = new, resize_
