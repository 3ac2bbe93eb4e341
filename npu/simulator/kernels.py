"""The operators with kernels of their own: memory, copies, and what the CPU kernels must not decide for a device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npu.simulator import counting, devices, recurrent
from npu.simulator.fallback import on_host, on_metadata
from npu.simulator.storage import bytes_of, mark_pinned
from npu.simulator.tags import as_cpu, as_npu

aten: Any = torch.ops.aten


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Fresh memory on a device."""
    _plain(layout, pin_memory)
    host = aten.empty.memory_format(size, dtype=dtype, device="cpu", memory_format=memory_format)
    return as_npu(host, devices.index_of(device))


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """Fresh memory on a device, with strides."""
    _plain(layout, pin_memory)
    return as_npu(aten.empty_strided(size, stride, dtype=dtype, device="cpu"), devices.index_of(device))


def _plain(layout: torch.layout | None, pin_memory: bool | None) -> None:
    if layout not in (None, torch.strided):
        raise NotImplementedError(
            f"`layout`: {layout} was asked for on a simulated NPU. It holds strided tensors only."
        )
    if pin_memory:
        raise RuntimeError("`pin_memory`: asked for on a simulated NPU. Only host memory can be pinned. Leave it out.")


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)` where at least one of the two is on a device."""
    as_cpu(target).copy_(as_cpu(source))
    _count_copy(source, target.device, blocking=not non_blocking)
    return target


def copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    """The same, where the target takes the shape of the source."""
    return copy_from(source, target.resize_(source.shape))


def to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """A copy of a device tensor, on the host, on a device or, without its data, on meta."""
    _plain(layout, False)
    device = tensor.device if device is None else device
    if device.type == devices.TYPE:
        _plain(None, pin_memory)
        device = torch.device(devices.TYPE, devices.index_of(device))
    near = torch.device("cpu") if device.type == devices.TYPE else device
    copy: Tensor = aten._to_copy(as_cpu(tensor), dtype=dtype, device=near, memory_format=memory_format)
    if device.type == "meta":
        return copy
    _count_copy(tensor, device, blocking=not non_blocking)
    if device.type == devices.TYPE:
        return as_npu(copy, device.index)
    return mark_pinned(copy) if pin_memory else copy


def _count_copy(source: Tensor, target: torch.device, *, blocking: bool) -> None:
    nbytes = source.numel() * source.element_size()
    if source.device.type != devices.TYPE:
        counting.count_to_device(target.index, nbytes)
    elif target.type != devices.TYPE:
        counting.count_to_host(source.device.index, nbytes, blocking=blocking)
    elif target.index != source.device.index:
        counting.count_from_peer(target.index, nbytes)


def resize(tensor: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """`tensor.resize_(size)`. Memory that has to grow is replaced; what it held moves along.

    Raises NotImplementedError when memory that has to grow is shared with another tensor, which would lose the tie.
    """
    wanted = aten.empty.memory_format(size, dtype=tensor.dtype, device="meta", memory_format=memory_format)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    needed = 0 if wanted.numel() == 0 else offset * tensor.element_size() + wanted.untyped_storage().nbytes()
    if needed > storage.nbytes():
        if torch._C._storage_Use_Count(storage._cdata) > 2:  # others than `tensor` and `storage`
            raise NotImplementedError(
                f"resize_: {list(size)} needs {needed} bytes, the {storage.nbytes()} there are belong to several "
                "tensors. Memory of the simulated NPU has a fixed size. Make a new tensor and copy."
            )
        grown = aten.empty.memory_format([needed], dtype=torch.uint8, device="cpu")
        grown[: storage.nbytes()].copy_(as_cpu(bytes_of(storage)))
        storage = as_npu(grown, tensor.get_device()).untyped_storage()
    op = aten.set_.source_Storage_storage_offset
    resized: Tensor = on_metadata(op, tensor, storage, offset, wanted.shape, wanted.stride())
    return resized


def local_scalar_dense(tensor: Tensor) -> Any:
    """`tensor.item()`: the host waits for one number."""
    counting.count_sync(tensor.get_device())
    return aten._local_scalar_dense(as_cpu(tensor))


def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    """Nothing to record: work on a simulated device is done when the call returns."""


def convolution(*args: Any) -> Any:
    """Convolution, under the name by which torch asks an extension device for it."""
    return on_host(aten.convolution.default, *args)


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Its gradients. `rest` is stride, padding, dilation, transposed, output_padding, groups, output_mask."""
    transposed, groups = rest[3], rest[5]
    bias_sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return on_host(aten.convolution_backward.default, grad, x, weight, bias_sizes, *rest)


def fused_attention_choice(*_: Any, **__: Any) -> int:
    """Scaled dot product attention runs as its plain formula: the CPU's fused kernels are no kernels of this device."""
    return int(torch.nn.attention.SDPBackend.MATH.value)


# By operator name.
KERNELS: dict[str, Callable[..., Any]] = {
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_fused_sdp_choice": fused_attention_choice,
    "_local_scalar_dense": local_scalar_dense,
    "_thnn_fused_gru_cell": recurrent.gru_cell,
    "_thnn_fused_gru_cell_backward": recurrent.gru_cell_backward,
    "_thnn_fused_lstm_cell": recurrent.lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": recurrent.lstm_cell_backward,
    "_to_copy": to_copy,
    "convolution_backward_overrideable": convolution_backward,
    "convolution_overrideable": convolution,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "record_stream": record_stream,
    "resize_": resize,
}
# torch has a plain formula for these, which it would prefer to the fallback: many small operators in place of one.
ON_HOST = ("native_group_norm", "native_layer_norm")
# `set_` writes, though no elements. The other two are called so often that they skip the fallback, which would find out
# by itself that their results are views.
METADATA = (
    "as_strided",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "view",
)
