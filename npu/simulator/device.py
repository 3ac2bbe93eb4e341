"""Registers the simulated device with torch: name, guard, hooks, `torch.npu`, kernels."""

import warnings
from functools import partial
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel
from torch.utils import backend_registration

from npu.simulator import autocast, counting, devices, engine, generators, module, selection, storage, streams, tags
from npu.simulator.fallback import on_host, on_metadata
from npu.simulator.kernels import KERNELS, METADATA, ON_HOST

# torch's C++ points into these objects without owning them.
_kept: list[Any] = []
_acc: Any = torch._C._acc


class _Hooks(_acc.PrivateUse1Hooks):  # type: ignore[misc]
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:  # noqa: ARG002
        return True


class _Guard(_acc.DeviceGuard):  # type: ignore[misc]
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def register(count: int) -> None:
    """Registers `count` devices. Cannot be undone; called once.

    Raises Unavailable, with nothing changed, if torch's DLPack capsules are not what the simulator relies on.
    """
    tags.check_layout()
    devices.set_count(count)
    counting.start(count)
    backend_registration.rename_privateuse1_backend(devices.TYPE)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(devices.TYPE, module.make_module())
    hooks, guard = _Hooks(), _Guard()
    _acc.register_python_privateuseone_hook(hooks)
    _acc.register_python_privateuseone_device_guard(guard)
    everything: Any = Library("_", "IMPL")
    aten: Any = Library("aten", "IMPL")
    _kept.extend((hooks, guard, everything, aten))
    tags.check_round_trip()
    with warnings.catch_warnings():
        # torch warns of kernels that take the place of others, which is the intention.
        warnings.simplefilter("ignore")
        _register_kernels(everything, aten)
    for part in (engine, generators, selection, storage, streams):
        part.install()


def _register_kernels(everything: Any, aten: Any) -> None:
    everything.fallback(on_host, "PrivateUse1")
    for kind in ("NestedTensor", "Quantized", "Sparse", "SparseCsr"):
        everything.fallback(partial(_refuse, kind), f"{kind}PrivateUse1")
    for name, kernel in KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in ON_HOST:
        aten.impl(name, partial(on_host, _overload(name)), "PrivateUse1")
    for name in METADATA:
        aten.impl(name, partial(on_metadata, _overload(name)), "PrivateUse1")
    # Copies take lazy conjugation and negation as they are: to resolve them torch would copy, which would resolve them.
    for key in ("Conjugate", "Negative"):
        aten.impl("_copy_from", fallthrough_kernel, key)
    aten.impl("is_pinned", storage.is_pinned, "CPU")
    aten.impl("_pin_memory", storage.pin_memory, "CPU")
    autocast.register(everything, aten)


def _refuse(kind: str, op: Any, *_: Any, **__: Any) -> Any:
    raise tags.not_strided(f"{op.name()} on {kind}")


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
