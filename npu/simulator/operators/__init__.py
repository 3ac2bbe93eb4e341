"""The fused attention operators on the simulated NPU: real schemas, refusals, numerics and hazards.

What they accept and return follows the operator documents of torch_npu and the kernel and tiling sources of CANN 8.3 to
8.5. Codes and texts of the refusals are those of the real ones, so that code which reads them can be tested; each ends
by saying that the device is simulated. What a real operator may have and these have not is refused with
NotImplementedError.

In hazard mode (`npu.simulator.hazards`, on from the start) they also do what the real ones do outside their contract,
where nothing says that the result is wrong:

| the call | what comes | source |
|---|---|---|
| inference, grouped heads on the kernel for equal widths: last running sum below T | rows past it are never written: NaN | kernel sources, public issues |
| the same: lengths given in place of running sums, if they do not decrease | other segments, and rows never written | operator documents |
| the same: sparse_mode 3, a segment with more queries than keys | its rows are wrong, aligned at the start; without keys never written | kernel sources |
| inference, batched: a caller's mask hides a row fully, inner_precise 0 or 1 | the plain average of v | kernel sources |
| inference: sparse_mode 0 with a reach | counted from the first key of a segment, not its end | kernel sources |
| training: sparse_mode 3 or 4 without its triangle | full attention | operator documents |
| training: last running sum below T, no 0 at the end | rows past it, of outputs and gradients, are never written: NaN | kernel sources, public issues |
| training, batched: a caller's mask hides a row fully | undefined: NaN | nothing defines it |
| training: statistics read in the order that their shape tells | another head's or row's | kernel sources |
| grad: statistics whose 8 copies differ | undefined: NaN | kernel sources |
| sparse_mode 3 or 4: a triangle that hides the wrong side, or nothing | is used as it is | operator documents: never checked |
| all: a NaN or Inf in a segment | any row of its segment and head group may be lost: all are | whole tiles are multiplied |
| inference: a row that sees no key | lse is +inf, for every mode | kernel sources |

With hazard mode off the never written, wrong and undefined rows are refused where the documents give a code, else they
are 0 or right. A reach in mode 0, a missing triangle and +inf are documented, and stay.

Where the sources leave open which kernel a call goes to: as many key/value heads as query heads is the template kernel,
which is right about empty rows and refuses a last sum below T; fewer, with inner_precise 0 and equal widths up to 256,
is the one above; all others are the legacy kernel, which refuses sparse_mode 3 for segments with more queries than keys.
"""

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

import torch

_libraries: list[torch.library.Library] = []  # a collected Library takes its operators with it


def register() -> None:
    """Defines the operators of `schemas.txt` for NPU and meta tensors, once per process."""
    from npu.simulator.operators import autograd, inference, shapes, training

    library = torch.library.Library("npu", "DEF")
    for line in files("npu.simulator").joinpath("schemas.txt").read_text().splitlines():
        library.define(line.removeprefix("npu::"), tags=torch.Tag.pt2_compliant_tag)
    for name, kernel, shape in (
        ("npu_fused_infer_attention_score", inference.fused_infer_attention_score, shapes.fused_infer_attention_score),
        (
            "npu_fused_infer_attention_score_v2",
            inference.fused_infer_attention_score_v2,
            shapes.fused_infer_attention_score_v2,
        ),
        ("npu_fusion_attention", training.fusion_attention, shapes.fusion_attention),
        ("npu_fusion_attention_grad", training.fusion_attention_grad, shapes.fusion_attention_grad),
    ):
        library.impl(name, partial(_call, kernel), "PrivateUse1")
        torch.library.register_fake(f"npu::{name}", shape, lib=library)
    library.impl("npu_fusion_attention", autograd.fusion_attention, "Autograd")
    _libraries.append(library)


def _call(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a kernel on host memory, out of reach of the host's autocast, which would lower its float32."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return kernel(*args, **kwargs)
    return kernel(*args, **kwargs)
