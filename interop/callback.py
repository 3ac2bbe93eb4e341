"""The primitive that hands host buffers to the NPU from inside a JAX program.

On the CPU the buffers of `buffer_callback` are XLA's own memory, inputs and outputs: nothing is copied on the host. JAX's
documented callbacks copy every argument, with JAX operations that can wait for the thread they run on.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from interop import pending
from interop.derivatives import refuse_second_order
from interop.dlpack import view
from interop.operations import ShapeDtype
from npu.device import device_count

# The one import of an experimental interface.
from jax.experimental.buffer_callback import buffer_callback  # isort: skip


T = TypeVar("T")


class Operation(Protocol):
    """What to run: a value, so that equal calls are one program."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def results(self, *operands: Any) -> tuple[ShapeDtype, ...]: ...

    def run(self, buffers: Any, npu: int) -> list[torch.Tensor]: ...


def on_npu(operation: Operation, npu: int | None, *operands: Any) -> list[Any]:
    """The results of an operation on arrays or traced values.

    `npu` is the index of the device, None for the one with the number of the JAX device.

    Raises:
        NotImplementedError: the program is compiled for another platform than the CPU, or arrays lie on one.
        ValueError: several devices run it and no `jax.shard_map` says which part is whose; fewer NPUs than devices.
    """
    results: list[Any] = _on_npu_p.bind(*operands, operation=operation, npu=npu)
    return results


_on_npu_p = Primitive("on_npu")
_on_npu_p.multiple_results = True


def _abstract(*operands: Any, operation: Operation, npu: int | None) -> list[Any]:  # noqa: ARG001
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in operation.results(*operands)]


def _eager(*operands: Any, operation: Operation, npu: int | None) -> list[Any]:
    """Concrete arrays on the first CPU device need no program; others need one for their device."""
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    devices = {device for x in arrays for device in x.devices()}
    if platforms := {d.platform for d in devices} - {"cpu"}:
        _refuse_platform(min(platforms))
    if (most := max((len(x.devices()) for x in arrays), default=1)) > 1:
        raise ValueError(_sharded(most))
    local = jax.local_devices(backend="cpu")
    if npu is None:
        npu = _own_npu(local.index(*devices)) if len(devices) == 1 else 0
    if devices - {local[0]}:
        found: list[Any] = _program(operation, npu)(*operands)
        return found
    buffers = [x.block_until_ready() if isinstance(x, jax.Array) else x for x in operands]
    tensors = _in_own_state(npu, lambda: [x.cpu() for x in operation.run(buffers, npu)])
    return [jnp.from_dlpack(x) for x in tensors]


@lru_cache(maxsize=256)
def _program(operation: Operation, npu: int) -> Callable[..., list[Any]]:
    return jax.jit(partial(on_npu, operation, npu))


def _lower(ctx: Any, *operands: Any, operation: Operation, npu: int | None) -> Any:
    if tuple(ctx.module_context.platforms) != ("cpu",):
        _refuse_platform(" and ".join(ctx.module_context.platforms))
    npus, axes = _placement(ctx.module_context.axis_context, npu)
    deferred = axes is not None

    def program(*arrays: Any) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operation.results(*arrays)]
        position = [jax.lax.axis_index(axes)] if axes else []
        results: list[Any] = buffer_callback(_callback(operation, npus, deferred), shapes)(*position, *arrays)
        return results

    return mlir.lower_fun(program, multiple_results=True)(ctx, *operands)


_on_npu_p.def_abstract_eval(_abstract)
_on_npu_p.def_impl(_eager)
mlir.register_lowering(_on_npu_p, _lower, platform="cpu", cacheable=False)
mlir.register_lowering(
    _on_npu_p, lambda ctx, *_, **__: _refuse_platform(" and ".join(ctx.module_context.platforms)), cacheable=False
)
ad.primitive_jvps[_on_npu_p] = refuse_second_order


@lru_cache(maxsize=256)  # a new function per call would be lowered again each time
def _callback(operation: Operation, npus: tuple[int, ...], deferred: bool) -> Callable[..., None]:
    """The function that XLA calls, on any thread: no JAX in here, and no buffer is kept."""
    pending.be_ready_for_exit()

    def into(results: Any, buffers: Sequence[Any]) -> None:
        npu = npus[0]
        if len(npus) > 1:
            position, *buffers = buffers
            npu = npus[int(np.asarray(position))]
        _in_own_state(npu, lambda: _store(operation.run(buffers, npu), [view(x) for x in results], npu))

    def body(_context: Any, results: Any, *buffers: Any) -> None:
        if not deferred:
            return into(results, buffers)
        try:
            into(results, buffers)
        except Exception as error:  # whatever it is, the other shards would wait for this one
            for result in results:
                view(result).fill_(torch.nan)
            pending.keep(error)
        return None

    return body


def _store(tensors: list[torch.Tensor], results: list[torch.Tensor], npu: int) -> None:
    """One copy back for each, straight into JAX's output."""
    for tensor, result in zip(tensors, results, strict=True):
        result.copy_(tensor)
    torch.npu.synchronize(npu)  # type: ignore[attr-defined]


def _in_own_state(npu: int, work: Callable[[], T]) -> T:
    """`work()`, with torch's thread-local state as a call needs it.

    The thread may be XLA's, or one that its user has set up.
    """
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled("npu") or torch.is_autocast_enabled("cpu"):
        with torch.inference_mode(False), torch.autocast("npu", enabled=False), torch.autocast("cpu", enabled=False):
            return _in_own_state(npu, work)
    with torch.no_grad(), torch.npu.device(npu):  # type: ignore[attr-defined]
        return work()


def _placement(context: Any, npu: int | None) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """The NPU of every device of the program that is lowered, and the mesh axes whose index counts the devices.

    Outside of `jax.shard_map` the axes are None. JAX's lowering knows the devices of a mesh; of a program on a single
    device it does not know which.
    """
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        if (count := getattr(context, "num_devices", 1)) > 1:
            raise ValueError(_sharded(count))
        return (npu or 0,), None
    free = [name for name, size in mesh.shape.items() if name not in context.manual_axes and size > 1]
    if free:
        raise ValueError(
            f"npu_packed_attention: the mesh axes {', '.join(map(repr, free))} are automatic inside jax.shard_map. Every "
            f"device along them would compute the same. Name all axes of the mesh in `axis_names`, or leave the "
            f"argument out."
        )
    axes = tuple(mesh.axis_names)
    if npu is not None:
        return (npu,), ()  # every device's, wherever it is
    local = jax.local_devices(backend="cpu")
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else jax.devices("cpu")[: mesh.size]
    npus = tuple(_own_npu(local.index(d)) if d in local else -1 for d in devices)
    return npus, axes if len(npus) > 1 else ()


def _own_npu(index: int) -> int:
    """The NPU of the process's CPU device `index`: the one of the same number."""
    if index < (count := device_count()):
        return index
    raise ValueError(
        f"`device`: None on JAX's CPU device {index}, and there are {count} NPUs. Each JAX device calls the NPU of its own "
        f"number. Use at most {count} JAX devices per process, or name one NPU for all, device=0."
    )


def _sharded(count: int) -> str:
    return (
        f"npu_packed_attention: the program runs on {count} devices without jax.shard_map. JAX cannot divide a callback: "
        f"every device would gather all arrays and compute everything. Wrap the call in jax.shard_map and divide heads, "
        f"or packed batches, over the mesh."
    )


def _refuse_platform(platform: str) -> NoReturn:
    raise NotImplementedError(
        f"npu_packed_attention on platform {platform}. Arrays reach the NPU through host memory, from programs of JAX's CPU "
        f'backend. Move the arguments first: jax.device_put(x, jax.devices("cpu")[0]).'
    )


def _batched(operands: Any, axes: Any, *, operation: Operation, npu: int | None) -> tuple[list[Any], list[int]]:
    """One call for the whole batch if q, k and v have the axis and only what may have one has; else one per element.

    What lacks the axis then (offsets, a constant cotangent) is repeated.
    """
    mapped = [axis is not None for axis in axes]
    front = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    ranks = operation.ranks
    if not (ranks and all(mapped[:3])) or any(mapped[len(ranks) :]):
        results = _one_by_one(partial(on_npu, operation, npu), front, mapped)
    else:
        batch = front[0].shape[:-3]  # two axes when the call is inside another vmap already, which becomes one
        folded = [
            _with_batch(x, batch, has_axis, rank).reshape(-1, *x.shape[x.ndim - rank :])
            for x, has_axis, rank in zip(front, mapped, ranks, strict=False)
        ]
        results = [x.reshape(*batch, *x.shape[1:]) for x in on_npu(operation, npu, *folded, *front[len(ranks) :])]
    return results, [0] * len(results)


def _with_batch(x: Any, batch: tuple[int, ...], has_axis: bool, rank: int) -> Any:
    """`x`, whose last `rank` axes are its own, with all axes of `batch` in front."""
    own, inner = x.shape[x.ndim - rank :], x.shape[has_axis : x.ndim - rank]
    ones = (1,) * (len(batch) - 1 - len(inner))
    return jnp.broadcast_to(x.reshape(batch[0] if has_axis else 1, *ones, *inner, *own), (*batch, *own))


def _one_by_one(call: Callable[..., list[Any]], front: list[Any], mapped: list[bool]) -> list[Any]:
    def element(moving: list[Any]) -> list[Any]:
        rest = iter(moving)
        return call(*(next(rest) if has_axis else x for x, has_axis in zip(front, mapped, strict=True)))

    found: list[Any] = jax.lax.map(element, [x for x, has_axis in zip(front, mapped, strict=True) if has_axis])
    return found


batching.primitive_batchers[_on_npu_p] = _batched
