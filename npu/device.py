"""Is there an NPU, is it real, and how do tensors get there."""

import importlib.util
import os
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from npu import simulator

_VARIABLE = "JAXATTN_NPU"


def is_available() -> bool:
    """True when an NPU can be used, real or simulated.

    Starts the simulated NPU if the environment variable `JAXATTN_NPU=sim` asks for it; otherwise imports torch_npu if
    it is installed. Looks again at every call until one is found.

    Raises:
        ValueError: `JAXATTN_NPU` has another value.
        simulator.Unavailable: `JAXATTN_NPU=sim`, but the simulator must stand aside.
    """
    asked = os.environ.get(_VARIABLE, "")
    if asked not in ("", "sim"):
        raise ValueError(f'{_VARIABLE}={asked!r}. It is "sim" or unset. Use {_VARIABLE}=sim to simulate an NPU.')
    if simulator.is_enabled():
        return True
    if asked == "sim":
        simulator.enable()
        return True
    if not hasattr(torch, "npu") and importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    return hasattr(torch, "npu") and bool(_module().is_available())


def device_count() -> int:
    """The number of NPUs, real or simulated; 0 when there is none."""
    return int(_module().device_count()) if is_available() else 0


def is_simulated() -> bool:
    """True when the NPU in use is the simulated one."""
    return is_available() and bool(getattr(_module(), "__simulated__", False))


def device_name(index: int = 0) -> str:
    """The name of NPU `index`; the name of a simulated one contains "simulated"."""
    require()
    return str(_module().get_device_name(index))


def require() -> None:
    """Raise unless an NPU can be used.

    Raises:
        RuntimeError: there is none; the message says how to get one, real or simulated.
    """
    if not is_available():
        raise RuntimeError(
            "No NPU: torch_npu gives none, and the simulator is not running. Attention on the NPU needs one. Install "
            "torch_npu on an Ascend machine, or simulate: set JAXATTN_NPU=sim, or call npu.simulator.enable()."
        )


def as_device(device: int | str | torch.device | None = None) -> torch.device:
    """The NPU that `device` names: an index, "npu", "npu:1", a torch.device; None is the current one.

    Raises:
        ValueError: not an NPU, or one that is not there.
        RuntimeError: there is no NPU at all.
    """
    require()
    if device is None:
        return torch.device("npu", _module().current_device())
    count = device_count()
    try:
        named = torch.device("npu", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        named = torch.device("meta")
    index = int(_module().current_device()) if named.index is None else named.index
    if isinstance(device, bool) or named.type != "npu" or not 0 <= index < count:
        raise ValueError(f'`device`: {device!r}. It must be an int or "npu:i" with i from 0 to {count - 1}.')
    return torch.device("npu", index)


def place(*tensors: Tensor, device: int | str | torch.device | None = None) -> tuple[Tensor, ...]:
    """The tensors on one NPU; those that are there already come back as they are.

    `device` is an index, "npu:1" or a torch.device; None is the current NPU.
    """
    target = as_device(device)
    return tuple(t.to(target) for t in tensors)


def on_same_npu(first: object, *others: object) -> TypeGuard[Tensor]:
    """True when all are tensors on one and the same NPU. A type guard for the first."""
    devices = {t.device if isinstance(t, Tensor) else None for t in (first, *others)}
    return len(devices) == 1 and (device := devices.pop()) is not None and device.type == "npu"


def _module() -> Any:
    return cast(Any, torch).npu
