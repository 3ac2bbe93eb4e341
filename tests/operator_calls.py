"""Short ways to call the fused attention operators directly, for tests."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from npu.simulator.operators.segments import Group
from npu.simulator.operators.statistics_memory import read

DEVICE = "npu:0"
ops: Any = torch.ops.npu


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def qkv(
    lengths_q: list[int], lengths_k: list[int] | None = None, heads: tuple[int, int] = (2, 2),
    widths: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.float16, device: str = DEVICE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Random packed q, k and v."""
    Tq, Tk = sum(lengths_q), sum(lengths_q if lengths_k is None else lengths_k)
    shapes = (Tq, heads[0], widths[0]), (Tk, heads[1], widths[0]), (Tk, heads[1], widths[1])
    return tuple(randn(*shape, dtype=dtype, seed=i, device=device) for i, shape in enumerate(shapes))


def triangle(device: str = DEVICE) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)


def sums(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths))


def infer(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_k: list[int] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The inference operator on packed tensors, with running sums; its lse too."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    defaults = {
        "num_heads": q.shape[1], "num_key_value_heads": k.shape[1], "scale": q.shape[2] ** -0.5, "input_layout": "TND",
        "actual_seq_lengths": lengths_q, "actual_seq_lengths_kv": lengths_k, "softmax_lse_flag": True,
    }  # fmt: skip
    if options.get("sparse_mode"):
        defaults["atten_mask"] = triangle(str(q.device))
    return ops.npu_fused_infer_attention_score(q, k, v, **defaults | options)


def train(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_k: list[int] | None = None, **options: Any
) -> Any:
    """The training operator on packed tensors, with running sums."""
    return ops.npu_fusion_attention(q, k, v, q.shape[1], "TND", **_training(q, lengths_q, lengths_k, options))


def grad(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, lengths_q: list[int], lengths_k: list[int] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """The grad operator on packed tensors, with running sums."""
    options = _training(q, lengths_q, lengths_k, options)
    options["scale_value"] = options.pop("scale")
    return ops.npu_fusion_attention_grad(q, k, v, dy, q.shape[1], "TND", **options)


def _training(q: Tensor, lengths_q: list[int], lengths_k: list[int] | None, options: dict[str, Any]) -> dict[str, Any]:
    lengths_k = lengths_q if lengths_k is None else lengths_k
    defaults: dict[str, Any] = {
        "scale": q.shape[-1] ** -0.5, "actual_seq_qlen": lengths_q, "actual_seq_kvlen": lengths_k
    }  # fmt: skip
    if options.get("sparse_mode"):
        defaults["atten_mask"] = triangle(str(q.device))
    return defaults | options


def per_segment(buffer: Tensor, lengths: list[int], order: str = "") -> Tensor:
    """The numbers of statistics `(T, N, 8)` in the order of rows, `[T, N]`."""
    starts = [0, *sums(lengths)]
    parts = [
        read(buffer.cpu(), Group(b, 1, start, L, 0, 0), order, strict=True)[0].T
        for b, (start, L) in enumerate(zip(starts, lengths, strict=False))
    ]
    return torch.cat(parts)


def refusal(call: Callable[[], object], code: int | None, detail: str, operator: str = "npu_fused_infer") -> None:
    """`call` is refused like on a device, with `code`; without one it is what the simulation lacks."""
    error = NotImplementedError if code is None else RuntimeError
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert type(caught.value) is error
    assert detail in said
    if code is None:
        assert said.startswith("The simulated NPU has no ")
        assert said.endswith("or run on real hardware.")
    else:
        assert said.startswith(operator)
        assert f"failed, error code is {code}\n[ERROR] ERR00100 PTA call acl api failed\nEZ9999: " in said
        assert said.endswith(" (simulated NPU)")
