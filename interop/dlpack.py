"""Arrays between JAX and torch: who owns the memory, and what may be written.

JAX arrays are immutable, torch tensors are not, and DLPack lets both see the same memory. So sharing is asked for by
name, and the default hands out memory that its receiver owns.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.utils import dlpack as torch_dlpack

_WIDE = {torch.float64: "float32", torch.int64: "int32", torch.uint64: "uint32", torch.complex128: "complex64"}
_CROSSING = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
)
"""The dtypes that jax and torch both have and DLPack carries, by their common name."""


def to_torch(array: jax.Array, *, copy: bool | None = True) -> Tensor:
    """The JAX array as a CPU tensor of the same shape and dtype.

    =========  ==================================  ============================================
    `copy`     memory                              may the tensor be written?
    =========  ==================================  ============================================
    True       new, owned by the tensor (default)  yes
    False      the array's; ValueError if it       no: the write shows in the immutable array,
               cannot be shared                    and in programs that run on it
    None       the array's if it can be shared,    no, for it may be the array's
               else new
    =========  ==================================  ============================================

    Shared memory lives as long as either side. While a tensor shares it, donating the array has no effect.

    Raises:
        ValueError: a tracer; a deleted or donated array; one that is sharded over several devices; `copy` is not
            True, False or None; a dtype that torch lacks.
        NotImplementedError: an array that is not in host memory, with `copy=False`.

    >>> to_torch(jnp.arange(3.0))
    tensor([0., 1., 2.])
    """
    _check_copy(copy)
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            "`array`: a traced value. It has no memory while a function is traced. Call to_torch outside jit, grad and "
            "vmap, or use interop.npu_packed_attention, which works inside."
        )
    if not isinstance(array, jax.Array):
        raise ValueError(f"`array`: {type(array).__name__}. It must be a jax.Array. Use torch.as_tensor for the rest.")
    if array.is_deleted():
        raise ValueError(
            "`array`: its memory was deleted, or donated to a jitted function. Use the function's result, or call it "
            "without donate_argnums."
        )
    if len(array.devices()) > 1:
        raise ValueError(
            f"`array`: sharded over {len(array.devices())} devices. A tensor lies on one. Use "
            f"array.addressable_data(0) for one shard, or jax.device_put(array, jax.devices('cpu')[0]) for the whole."
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ValueError(f"`array`: dtype {array.dtype}. torch has no keys. Use jax.random.key_data.")
    if str(array.dtype) not in _CROSSING:
        raise ValueError(f"`array`: dtype {array.dtype} does not cross to torch. Cast it with .astype.")
    if next(iter(array.devices())).platform != "cpu":
        if copy is False:
            raise NotImplementedError(
                f"`array`: on {next(iter(array.devices()))}. Only host memory is shared. Use copy=True, or "
                f"jax.device_put(array, jax.devices('cpu')[0]) first."
            )
        array = jax.device_put(array, jax.devices("cpu")[0])
    array.block_until_ready()
    return view(array).clone() if copy else view(array)


def to_jax(tensor: Tensor, *, copy: bool | None = True, narrow: bool = False) -> jax.Array:
    """The tensor as a JAX array of the same shape and dtype, on the first CPU device.

    =========  ==================================  ============================================
    `copy`     memory                              may the tensor still be written?
    =========  ==================================  ============================================
    True       new, owned by the array (default)   yes
    False      the tensor's; ValueError if it      no: the write shows in the immutable array
               cannot be shared
    None       the tensor's if it can be shared,   no, for the array may share it
               else new
    =========  ==================================  ============================================

    Sharable is contiguous host memory whose address is a multiple of 64 bytes, as that of `torch.empty` is. A tensor
    on an NPU is copied to the host first. While an array shares the memory, the tensor must not be resized.

    Args:
        tensor: strided, without gradient.
        copy: the table above.
        narrow: with 64-bit types switched off in JAX, allow float64, int64 and uint64 to become 32 bits wide. Integers
            must fit.

    Raises:
        ValueError: a tensor that requires grad; 64-bit types that would be narrowed; fake, sparse or quantised
            tensors; memory that cannot be shared, with `copy=False`.

    >>> to_jax(torch.arange(3, dtype=torch.int32))
    Array([0, 1, 2], dtype=int32)
    """
    _check_copy(copy)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"`tensor`: {type(tensor).__name__}. It must be a torch.Tensor. Use jnp.asarray for the rest.")
    if tensor.requires_grad:
        raise ValueError("`tensor`: requires grad. JAX would drop the graph. Use tensor.detach().")
    if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.device.type == "meta":
        raise ValueError("`tensor`: it has no memory (fake or meta). Pass a real tensor.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"`tensor`: layout {tensor.layout}. Only dense strided memory crosses. Use tensor.to_dense().")
    if tensor.device.type != "cpu":
        if copy is False:
            raise ValueError(f"`tensor`: on {tensor.device}. JAX cannot see that memory. Use copy=True or .cpu().")
        tensor, copy = tensor.cpu(), None  # the host copy is nobody else's
    if tensor.is_conj() or tensor.is_neg():
        if copy is False:
            raise ValueError("`tensor`: a lazy conjugate or negation. Its memory holds other values. Use copy=True.")
        tensor, copy = tensor.resolve_conj().resolve_neg(), None
    if tensor.dtype in _WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        if copy is False or not narrow:
            raise ValueError(
                f"`tensor`: {tensor.dtype}, and JAX's 64-bit types are off: it would become {_WIDE[tensor.dtype]}. "
                f"Use narrow=True, cast it in torch, or set jax_enable_x64."
            )
        tensor, copy = _narrowed(tensor), None
    pinned = tensor.is_pinned()  # to DLPack that is memory of an accelerator, which JAX does not know here
    shareable = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 and not pinned
    if copy is False and not shareable:
        raise ValueError(
            f"`tensor`: strides {tuple(tensor.stride())} at address {tensor.data_ptr():#x}{', pinned' if pinned else ''}. JAX "
            f"shares contiguous memory at a multiple of 64 bytes, not pinned. Use copy=None, or tensor.contiguous() and copy=False."
        )
    # jax's from_dlpack shares whatever its own copy argument says, so what must be owned is copied on this side.
    # clone(contiguous) of torch is aligned.
    if copy or not shareable:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return jnp.from_dlpack(tensor)


def view(buffer: Any) -> Tensor:
    """The host memory of a JAX array or callback buffer as a tensor. Nothing is copied; nothing may be kept.

    By the DLPack capsule; where torch does not take it, by the numpy view. numpy has no bfloat16 or float8 that torch
    knows, so these cross as integers of the same size.
    """
    try:
        return torch_dlpack.from_dlpack(buffer.__dlpack__())
    except (RuntimeError, BufferError):
        return view_by_numpy(buffer)


def view_by_numpy(buffer: Any) -> Tensor:
    """`view` without DLPack."""
    host = np.asarray(buffer)
    dtype = getattr(torch, host.dtype.name)
    if host.dtype.isbuiltin != 1:  # 2 for the types that ml_dtypes adds
        host = host.view(f"u{host.dtype.itemsize}")
    return torch.from_numpy(np.asarray(_Writable(host))).view(dtype)


class _Writable:
    """An array's memory without its read-only flag, which torch has no notion of and warns about."""

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        address, _ = host.__array_interface__["data"]
        self.__array_interface__ = {**host.__array_interface__, "data": (address, False)}
        self._host = host


def _narrowed(tensor: Tensor) -> Tensor:
    target = getattr(torch, _WIDE[tensor.dtype])
    narrowed = tensor.to(target)
    if (
        not tensor.dtype.is_floating_point
        and not tensor.is_complex()
        and not torch.equal(narrowed.to(tensor.dtype), tensor)
    ):
        raise ValueError(
            f"`tensor`: {tensor.dtype} values that do not fit {_WIDE[tensor.dtype]}. narrow=True needs them to fit. Set "
            f"jax_enable_x64."
        )
    return narrowed


def _check_copy(copy: object) -> None:
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"`copy`: {copy!r}. It must be True, False or None. See the table in the docstring.")
