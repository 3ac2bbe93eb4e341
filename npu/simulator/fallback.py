"""Every operator on the simulated device that has no kernel of its own: its CPU kernel, run on the same memory."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from npu.simulator import counting, devices, generators
from npu.simulator.tags import as_cpu, as_npu

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# Arguments that torch allows on the host while the data is on the device.
_ON_HOST = {
    "aten::_index_put_impl": {"indices"},
    "aten::_index_put_impl_": {"indices"},
    "aten::_pack_padded_sequence": {"lengths"},
    "aten::_unsafe_index": {"indices"},
    "aten::_unsafe_index_put": {"indices"},
    "aten::_unsafe_masked_index": {"indices"},
    "aten::_unsafe_masked_index_put_accumulate": {"indices"},
    "aten::index": {"indices"},
    "aten::index_put": {"indices"},
    "aten::index_put_": {"indices"},
}


@dataclass(frozen=True)
class _Traits:
    """What the fallback needs to know of an operator, read once from its schema."""

    names: tuple[str, ...]  # of the arguments, in order
    written: frozenset[str]
    outs: frozenset[str]  # the written ones that the kernel may resize
    on_host: frozenset[str]
    only_metadata: bool  # the result is a view
    waits: bool  # the host needs the data, or the shape that comes of it


@cache
def _traits(op: OpOverload) -> _Traits:
    schema = op._schema
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return _Traits(
        names=tuple(a.name for a in schema.arguments),
        written=written,
        outs=frozenset(a.name for a in schema.arguments if a.kwarg_only) & written,
        on_host=frozenset(_ON_HOST.get(schema.name, ())),
        only_metadata=not written and any(r.alias_info is not None for r in schema.returns),
        waits=torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags,
    )


@dataclass
class _Call:
    """One call, its device tensors seen as CPU tensors that share their memory."""

    op: OpOverload
    traits: _Traits
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int = 0  # of the device that the results belong to
    device: torch.device | None = None  # of the first device tensor
    stray: str | None = None  # the first argument that is on the host and should not be
    generator: torch.Generator | None = None
    # By the id of a CPU tensor: that tensor, kept alive so that the id stays its own, and the device tensor behind it.
    originals: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stand_ins: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def borrow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes the arguments in. RuntimeError in torch's words when they are not all on one device."""
        self.args = tuple(self._lent(name, arg) for name, arg in zip(self.traits.names, args, strict=False))
        self.kwargs = {name: self._lent(name, arg) for name, arg in kwargs.items()}
        if self.device is not None and self.stray is not None:
            self._refuse(torch.device("cpu"), self.stray)
        wanted = kwargs.get("device")
        self.index = devices.index_of(self.device if wanted is None else wanted)
        if self.generator is not None:
            generators.check(self.generator, self.index)

    def _lent(self, name: str, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self._lent_tensor(name, arg)
        if isinstance(arg, (list, tuple)):
            return [self._lent(name, each) for each in arg]
        if isinstance(arg, torch.device):
            return torch.device("cpu") if arg.type == devices.TYPE else arg
        if isinstance(arg, torch.Generator):
            self.generator = arg
        return arg

    def _lent_tensor(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type != devices.TYPE:
            # A number on the host, a tensor of rank 0, may take part in device arithmetic. Results do not go there.
            allowed = name in self.traits.on_host or (tensor.dim() == 0 and name not in self.traits.written)
            if not allowed and self.stray is None:
                self.stray = name
            return tensor
        if self.device is None:
            self.device = tensor.device
        elif tensor.device != self.device:
            self._refuse(tensor.device, name)
        if name in self.traits.outs and tensor.numel() == 0:
            return self._stand_in(tensor)
        lent = as_cpu(tensor)
        self.originals[id(lent)] = (lent, tensor)
        return lent

    def _refuse(self, other: torch.device, name: str) -> None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, "
            f"but found at least two devices, {self.device} and {other}! "
            f"(when checking argument for argument {name} of {self.op._schema.name})"
        )

    def _stand_in(self, out: Tensor) -> Tensor:
        # A kernel that resizes its `out=` needs memory that can grow, which lent memory cannot.
        stand_in = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cpu")
        self.stand_ins.append((out, stand_in))
        self.originals[id(stand_in)] = (stand_in, out)
        return stand_in

    def let_outs_grow(self, kwargs: dict[str, Any]) -> None:
        """Replaces the `out=` arguments by host memory that the kernel may resize."""
        for name in self.traits.outs & kwargs.keys():
            if isinstance(kwargs[name], Tensor) and kwargs[name].numel():
                self.kwargs[name] = self._stand_in(kwargs[name])

    def run(self) -> Any:
        """The CPU kernel's result."""
        try:
            return self.op(*self.args, **self.kwargs)
        except NotImplementedError as error:
            name = self.op._schema.name
            if f"Could not run '{name}" not in str(error):
                raise
            raise NotImplementedError(
                f"{name}: the simulated NPU runs the CPU's kernels, and torch {torch.__version__} has none for this "
                "operator. Call it on the host, or write it with other operators."
            ) from error
        except RuntimeError as error:
            # torch hands numbers that stand for tensors, the 2 of `x * 2`, to Python kernels as numbers. Some overloads
            # refuse them; the packet of all overloads finds the one that takes a number.
            if "Expected a value of type 'Tensor" not in str(error):
                raise
            return self.op.overloadpacket(*self.args, **self.kwargs)

    def give_back(self, result: Any) -> Any:
        """The result as seen on the device: arguments come back as themselves, fresh memory is taken without a copy."""
        if isinstance(result, Tensor):
            _, original = self.originals.get(id(result), (None, None))
            return as_npu(result, self.index) if original is None else original
        if isinstance(result, list):
            return [self.give_back(each) for each in result]
        if isinstance(result, tuple):
            return tuple(self.give_back(each) for each in result)
        return result

    def settle_outs(self) -> None:
        """Moves what was computed aside into the `out=` tensors: by a copy where it fits, else with its memory."""
        for out, stand_in in self.stand_ins:
            if stand_in.shape == out.shape:
                as_cpu(out).copy_(stand_in)
            else:
                new = as_npu(stand_in, out.get_device())
                place = (new.untyped_storage(), new.storage_offset(), new.shape, new.stride())
                on_metadata(torch.ops.aten.set_.source_Storage_storage_offset, out, *place)


def on_metadata(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs the CPU kernel of an operator that touches no elements on the device tensor itself: views share storage."""
    return op.redispatch(_CPU, *args, **kwargs)


def on_host(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs the CPU kernel of `op` on the memory of device tensors.

    Raises RuntimeError, in torch's words, when the tensors are on different devices, NotImplementedError when torch has
    no CPU kernel. What the kernel raises passes through.
    """
    traits = _traits(op)
    if traits.only_metadata:
        return on_metadata(op, *args, **kwargs)
    call = _Call(op, traits)
    call.borrow(args, kwargs)
    if traits.waits:
        counting.count_sync(call.index)
    if torch.is_autocast_enabled("cpu"):
        # Autocast of the host must not reach into the device's kernels.
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            result = _run(call, kwargs)
    else:
        result = _run(call, kwargs)
    call.settle_outs()
    return call.give_back(result)


def _run(call: _Call, kwargs: dict[str, Any]) -> Any:
    try:
        return call.run()
    except RuntimeError as error:
        # An `out=` of the wrong size is resized before anything is computed, so the kernel can simply start again.
        if not call.traits.outs or "not resizable" not in str(error):
            raise
        call.let_outs_grow(kwargs)
        return call.run()
