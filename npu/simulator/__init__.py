"""A simulated NPU: a torch device named npu, without the hardware.

    from npu import simulator

    simulator.enable()
    x = torch.ones(3, device="npu:1")

As far as a program can tell the device has memory of its own: its tensors share nothing with the host, mixing devices
raises torch's own error, copies and waits are counted. Underneath is host memory and torch's CPU arithmetic. So a green
run says nothing about the chip's numerics, about anything asynchronous, or about which operators exist on the chip.

It never starts by itself: a device that is silently simulated would hide a broken installation.
"""

import threading

from npu.simulator.availability import Unavailable, reason_to_stand_aside, refuse_torch_npu
from npu.simulator.counting import Counters, Traffic, counters
from npu.simulator.hazard_mode import hazards

__all__ = ["Counters", "Traffic", "Unavailable", "counters", "enable", "hazards", "is_enabled"]

_lock = threading.Lock()
_enabled: int | None = None
_failure: Exception | None = None


def is_enabled() -> bool:
    """Whether the simulator runs in this process."""
    return _enabled is not None


def enable(devices: int = 4, *, force: bool = False) -> None:
    """Starts the simulator with the devices npu:0 to npu:`devices - 1`. It cannot be stopped.

    A second call with the same number does nothing. With `force=True` an installed torch_npu is ignored, and kept from
    being imported. Hazard mode is on, see `hazards`.

    Raises:
        ValueError: `devices` is not between 1 and 127, the largest index that torch has.
        RuntimeError: the simulator runs already, with another number of devices.
        Unavailable: another backend, the package of real NPUs or another accelerator is in this process, or torch is
            one that the simulator does not know. A RuntimeError too.
    """
    global _enabled, _failure
    with _lock:
        if _enabled is not None:
            if devices == _enabled:
                return
            raise RuntimeError(
                f"`devices`: {devices} were asked for, the simulator runs with {_enabled} since it was started. "
                f"The number is fixed for the life of a process. Use enable(devices={_enabled}) or a new process."
            )
        if _failure is not None:
            raise _failure
        if not 1 <= devices <= 127:
            raise ValueError(
                f"`devices`: {devices}. torch has room for 127 devices. Use a number from 1 to 127, such as 4."
            )
        reason = reason_to_stand_aside(force=force)
        if reason is not None:
            raise Unavailable(f"the simulated NPU stands aside: {reason}")
        from npu.simulator import device, operators  # importing them prepares what only a running simulator needs

        try:
            device.register(devices)
            operators.register()
        except Exception as error:
            _failure = error  # a second try would find the name taken, by this one
            raise
        refuse_torch_npu()
        _enabled = devices
