"""Autograd on every simulated device."""

from typing import Any

import torch

_Engine: Any = torch._C._ImperativeEngine


class _OneThread(_Engine):  # type: ignore[misc]
    """Runs every backward pass in the thread that asks for it.

    torch keeps one worker thread for each device that its device guard reports, and a guard written in Python reports
    one: a gradient on npu:1 would find no worker. A simulated device has nothing to gain from a worker of its own.
    """

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return super().run_backward(*args, **kwargs)


def install() -> None:
    """Makes torch's backward passes start here. The C++ engine behind is the one it was."""
    torch.autograd.Variable._execution_engine = _OneThread()
