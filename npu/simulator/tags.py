"""One memory, two names: the same bytes as a CPU tensor and as an NPU tensor.

A simulated device tensor is a plain `torch.Tensor` over host memory whose device says npu. The name is changed on the
way through DLPack: a tensor is exported to a capsule, the capsule's device is overwritten, and the capsule is
imported again. DLPack reserves the device type kDLExtDev for extension devices and torch reads it as its PrivateUse1
device, which here is called npu. Nothing is copied, and DLPack's own bookkeeping keeps the memory alive.

Written by hand are the eight bytes of `DLTensor.device`, nothing else. `check_layout` proves at start that they lie
where assumed.
"""

import ctypes

import torch
from torch import Tensor

from npu.simulator import counting, devices
from npu.simulator.availability import Unavailable

_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_DL_CPU, _DL_EXTENSION = 1, 12
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _DLTensor(ctypes.Structure):
    """The first fields of DLPack's DLTensor, which a "dltensor" capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
    )


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def as_cpu(tensor: Tensor) -> Tensor:
    """The memory of an NPU tensor, seen as a CPU tensor of the same shape, strides and dtype.

    Writing to one is seen in the other. The result carries no gradient and its storage cannot be resized.
    A CPU tensor comes back as it is. Raises NotImplementedError for layouts that are not strided.
    """
    if tensor.device.type == "cpu":
        return tensor
    result = _retagged(tensor, _DL_CPU, 0)
    # Marks borrowed device memory, so that as_npu does not count it a second time.
    result.untyped_storage()._npu_allocation = None  # type: ignore[attr-defined]
    return result


def as_npu(tensor: Tensor, index: int) -> Tensor:
    """The memory of a CPU tensor, seen as a tensor on npu:`index` of the same shape, strides and dtype.

    Writing to one is seen in the other: give away memory that nobody else on the host writes. The memory counts as in
    use on the device until the last tensor over it dies. The result carries no gradient and its storage cannot be
    resized.

    Raises NotImplementedError for layouts that are not strided, RuntimeError for an index that does not exist.
    """
    if tensor._is_zerotensor():  # torch's symbolic zeros have a shape but no memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    devices.checked(index)
    result = _retagged(tensor, _DL_EXTENSION, index)
    storage = tensor.untyped_storage()
    if not hasattr(storage, "_npu_allocation"):
        # torch keeps a storage's Python object, and with it this attribute, for as long as the memory itself.
        storage._npu_allocation = counting.Allocation(index, storage.nbytes())  # type: ignore[attr-defined]
    return result


def _retagged(tensor: Tensor, device_type: int, device_id: int) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise not_strided("quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout))
    # Lazy conjugation and negation are flags outside the memory. DLPack refuses them: take them off and put them back.
    if tensor.is_conj():
        return torch.conj(_retagged(torch.conj(tensor), device_type, device_id))
    if tensor.is_neg():
        return torch._neg_view(_retagged(torch._neg_view(tensor), device_type, device_id))
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        capsule = torch._C._to_dlpack(tensor)
    except BufferError:
        # A dtype that DLPack has no name for travels as one that it has, of the same size.
        carried = torch.ops.aten.view.dtype.redispatch(_CPU_KERNEL, tensor, _SAME_SIZE[tensor.dtype.itemsize])
        arrived = _retagged(carried, device_type, device_id)
        named: Tensor = torch.ops.aten.view.dtype.redispatch(_CPU_KERNEL, arrived, tensor.dtype)
        return named
    header = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    header.device_type, header.device_id = device_type, device_id
    result: Tensor = torch._C._from_dlpack(capsule)
    if result.stride() != tensor.stride():  # DLPack writes 1 for the stride of an axis of size 0 or 1
        result = torch.ops.aten.as_strided.default.redispatch(_CPU_KERNEL, result, tensor.shape, tensor.stride(), 0)
    return result


def not_strided(kind: str) -> NotImplementedError:
    """The error for tensors of a `kind` that a simulated NPU does not hold."""
    return NotImplementedError(
        f"{kind} tensors: a simulated NPU holds plain strided tensors only. "
        "Convert on the host first, with .to_dense(), .dequantize() or .to_padded_tensor()."
    )


def check_layout() -> None:
    """Proves that capsules are laid out as assumed. Reads only, and needs no device.

    Raises Unavailable otherwise: a torch that changed its capsules must not be fed wrong bytes.
    """
    probe = torch.arange(6, dtype=torch.float32, device="cpu").reshape(2, 3)
    try:
        capsule = torch._C._to_dlpack(probe)
        header = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    except (AttributeError, TypeError, ValueError) as error:
        raise _changed(f"torch gave no capsule called dltensor ({error})") from error
    if header.data != probe.data_ptr():
        raise _changed("the capsule does not begin with the tensor's address")
    found = (header.device_type, header.device_id, header.ndim)
    if found != (_DL_CPU, 0, 2):
        raise _changed(f"device type, device index and rank read as {found}, not {(_DL_CPU, 0, 2)}")


def check_round_trip() -> None:
    """Proves on the registered device that a retagged tensor says where it is and shares memory, else Unavailable."""
    probe = torch.arange(6, dtype=torch.float32, device="cpu").reshape(2, 3)
    there = _retagged(probe, _DL_EXTENSION, 0)
    back = _retagged(there, _DL_CPU, 0)
    if there.device != torch.device(devices.TYPE, 0) or back.device.type != "cpu":
        raise _changed(f"a retagged tensor says {there.device} and {back.device}, not {devices.TYPE}:0 and cpu")
    if not (there.data_ptr() == back.data_ptr() == probe.data_ptr() and torch.equal(back, probe)):
        raise _changed("a retagged tensor does not share the memory of the first one")


def _changed(seen: str) -> Unavailable:
    return Unavailable(
        f"the simulated NPU cannot run on torch {torch.__version__}: {seen}. "
        "It relies on how DLPack lays out capsules. Use torch 2.13, which it is tested with."
    )
