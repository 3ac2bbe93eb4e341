"""How an operator says no: in the form of the real errors, or by naming what the simulation lacks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

MISSING = 161001
"""A tensor or list that the call needs is not there."""
BAD_ARGUMENT = 161002
"""A dtype, shape, layout or option that the operator does not take."""
BAD_TILING = 561002
"""Numbers that do not fit together, found when the operator plans its work."""


@dataclass(frozen=True)
class Operator:
    """An operator's name in torch, and that of the aclnn function behind it, which its errors carry."""

    name: str
    kernel: str

    def refuse(self, code: int, detail: str) -> NoReturn:
        """Raises the RuntimeError of a real device, with one sentence more to say that this one is simulated."""
        raise RuntimeError(
            f"{self.name}: call {self.kernel} failed, error code is {code}\n"
            f"[ERROR] ERR00100 PTA call acl api failed\nEZ9999: {detail} (simulated NPU)"
        )

    def lacks(self, what: str, has: str, instead: str) -> NoReturn:
        """Raises NotImplementedError: real hardware may have `what`, the simulation `has` something else."""
        raise NotImplementedError(
            f"The simulated NPU has no {what} in {self.name}. It has {has}. {instead}, or run on real hardware."
        )


def given_names(arguments: Mapping[str, object]) -> list[str]:
    """The names of the arguments that ask for something: not None, 0 or False. A dtype's number may be 0."""
    return sorted(
        name
        for name, x in arguments.items()
        if isinstance(x, Tensor) or (x is not None and (name.endswith("_dtype") or x not in (0, "")))
    )


def check_same_device(**tensors: Tensor | None) -> None:
    """RuntimeError in torch's words unless all tensors that are given lie on one device."""
    found: list[torch.device] = []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if found and tensor.device != found[0]:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{found[0]} and {tensor.device}! (when checking argument for argument {name})"
            )
        found.append(tensor.device)
