"""Random numbers on the simulated device: `torch.Generator("npu")`."""

from typing import Any
from weakref import WeakValueDictionary

import torch

from npu.simulator import devices

_Base: Any = torch.Generator

# Kernels see a new Python object for the generator of a call. What stays is the address of the C++ generator inside.
_by_address: "WeakValueDictionary[int, Generator]" = WeakValueDictionary()


class _MakesBoth(type(_Base)):  # type: ignore[misc]
    """Calling `torch.Generator` makes the class below for an NPU, torch's own for the host; `isinstance` holds for
    both.
    """

    def __call__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != devices.TYPE:
            return _Base(device)
        generator = super().__call__()
        generator._own = torch.device(devices.TYPE, devices.index_of(device))
        _by_address[generator._cdata] = generator
        return generator

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Base)


class Generator(_Base, metaclass=_MakesBoth):  # type: ignore[misc]
    """A stream of random numbers for one NPU.

    Underneath is a generator of the host, so an operator on host tensors takes it too, which no hardware would.
    """

    _own: torch.device

    @property
    def device(self) -> torch.device:
        """The generator's NPU."""
        return self._own

    def clone_state(self) -> Any:
        """A new generator of the same NPU that draws the same numbers from here on."""
        return _with_state(self.device, self.get_state())

    def __reduce__(self) -> Any:
        return _with_state, (self.device, self.get_state())


def _with_state(device: torch.device, state: torch.Tensor) -> Any:
    return torch.Generator(device).set_state(state)


def check(generator: torch.Generator, index: int) -> None:
    """RuntimeError unless `generator` belongs to npu:`index`."""
    found = _by_address.get(generator._cdata)  # type: ignore[attr-defined]
    if found is None:
        raise RuntimeError(f"Expected a '{devices.TYPE}' device type for generator but found '{generator.device.type}'")
    if found.device.index != index:
        own = f"{devices.TYPE}:{index}"
        raise RuntimeError(
            f"`generator`: a generator of {found.device} was given for work on {own}. Each device draws from its own "
            f"generators. Make one with torch.Generator('{own}')."
        )


def install() -> None:
    """Makes `torch.Generator` the class above: torch's own needs a C++ generator for the device."""
    torch.Generator = Generator  # type: ignore[misc]
