"""What several tests of the torch side need: cases as NPU tensors, and a count of the operator's calls."""

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jaxattn.testing import Case


class OperatorCalls(TorchDispatchMode):
    """Counts the NPU operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.counts[func._schema.name.removeprefix("npu::")] += 1
        return func(*args, **(kwargs or {}))


def to_npu(x: np.ndarray, device: str = "npu:0") -> torch.Tensor:
    """A numpy array, bfloat16 included, as a tensor of the same dtype on an NPU."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_host(x: torch.Tensor) -> np.ndarray:
    """The way back."""
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def call_arguments(case: Case, dtype: str, device: str = "npu:0") -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The positional tensors and the options of a case for the varlen functions; without softcap."""
    inputs = case.inputs(dtype)
    tensors = [to_npu(x, device) for x in (inputs.q, inputs.k, inputs.v)]
    tensors += [torch.from_numpy(np.array(cu)) for cu in (case.segments.cu_seqlens_q, case.segments.cu_seqlens_k)]
    options = case.options
    assert options.pop("softcap") is None
    options["window_size"] = options["window_size"] or (-1, -1)
    options["sinks"] = None if inputs.sinks is None else to_npu(inputs.sinks, device)
    return tensors, options
