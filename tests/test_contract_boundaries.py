"""At every limit of the contract: just inside runs; just outside the operator refuses, and we never send it."""

from typing import Any

import pytest
import torch
from npu_tools import OperatorCalls

from npu import fused_infer_attention_varlen, fusion_attention_varlen
from npu.contract import INFERENCE, LIMITS, TRAINING, Limit


def call(
    *,
    segments: int = 1,
    rows: int = 2,
    keys: int = 2,
    N: int = 1,
    K: int = 1,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float16,
    strided: bool = False,
) -> tuple[tuple[torch.Tensor, ...], list[int], list[int]]:
    """Zeros on an NPU, and running sums without the leading 0, the segments as equal as can be."""
    shape_q, shape_k, shape_v = (rows, N, D), (keys, K, D), (keys, K, D if Dv is None else Dv)
    tensors = tuple(torch.zeros(shape, dtype=dtype, device="npu") for shape in (shape_q, shape_k, shape_v))
    if strided:
        tensors = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors)
    sums = [[n * (b + 1) // segments for b in range(segments)] for n in (rows, keys)]
    return tensors, sums[0], sums[1]


def directly(operator: str, **facts: Any) -> torch.Tensor:
    """The operator itself, with whatever it is given."""
    (q, k, v), sums_q, sums_k = call(**facts)
    scale = q.shape[2] ** -0.5
    if operator == INFERENCE:
        return torch.ops.npu.npu_fused_infer_attention_score(
            q, k, v, num_heads=q.shape[1], num_key_value_heads=k.shape[1], scale=scale, input_layout="TND",
            actual_seq_lengths=sums_q, actual_seq_lengths_kv=sums_k,
        )[0]  # fmt: skip
    return torch.ops.npu.npu_fusion_attention(
        q, k, v, q.shape[1], "TND", scale=scale, actual_seq_qlen=sums_q, actual_seq_kvlen=sums_k, softmax_layout="TND"
    )[0]


def through_us(operator: str, **facts: Any) -> torch.Tensor:
    tensors, sums_q, sums_k = call(**facts)
    cu = [torch.tensor([0, *sums], dtype=torch.int32) for sums in (sums_q, sums_k)]
    function = fused_infer_attention_varlen if operator == INFERENCE else fusion_attention_varlen
    return function(*tensors, *cu)


MILLION = 1_048_576
SINGLE = {"dtype": torch.float32}
BOUNDARIES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    (INFERENCE, "dtypes"): ({"dtype": torch.bfloat16}, {"dtype": torch.float32}),
    (INFERENCE, "widths"): ({"D": 192, "Dv": 128}, {"D": 192, "Dv": 129}),
    (INFERENCE, "most_segments"): ({"segments": 4096, "rows": 4096, "keys": 4096}, {"segments": 4097, "rows": 4097, "keys": 4097}),
    (INFERENCE, "most_rows"): ({"segments": 4, "rows": MILLION}, {"segments": 4, "rows": MILLION + 1, "keys": 4}),
    (INFERENCE, "most_heads"): ({"N": 256, "K": 4}, {"N": 260, "K": 5}),
    (INFERENCE, "most_group"): ({"N": 64}, {"N": 65}),
    (INFERENCE, "contiguous"): ({"N": 2, "K": 2}, {"N": 2, "K": 2, "strided": True}),
    (TRAINING, "dtypes"): (SINGLE, {"dtype": torch.float64}),
    (TRAINING, "most_width"): ({"D": 768, "Dv": 767, **SINGLE}, {"D": 769, **SINGLE}),
    (TRAINING, "most_segments"): ({"segments": 1024, "rows": 1024, "keys": 1024}, {"segments": 1025, "rows": 1025, "keys": 1025}),
    (TRAINING, "most_rows"): ({"segments": 4, "rows": MILLION}, {"segments": 4, "rows": MILLION + 1, "keys": 4}),
    (TRAINING, "most_heads"): ({"N": 256, "K": 4}, {"N": 260, "K": 5}),
}  # fmt: skip
WITHOUT_A_BOUNDARY = {(TRAINING, "softmax_layout"), (TRAINING, "products")}


def test_every_limit_of_the_table_has_its_boundary_here() -> None:
    assert {(limit.operator, limit.name) for limit in LIMITS} - WITHOUT_A_BOUNDARY == set(BOUNDARIES)


@pytest.mark.parametrize(
    "limit", [x for x in LIMITS if (x.operator, x.name) in BOUNDARIES], ids=lambda x: f"{x.operator} {x.name}"
)
def test_both_sides_of_a_limit(limit: Limit) -> None:
    inside, outside = BOUNDARIES[limit.operator, limit.name]
    directly(limit.operator, **inside)
    through_us(limit.operator, **inside)
    with pytest.raises(RuntimeError, match=r"error code is (161002|561002|561103)"):
        directly(limit.operator, **outside)
    # Outside we plan several calls, another operator or a copy, or say no ourselves: the operator never has to refuse.
    with OperatorCalls() as calls:
        try:
            out = through_us(limit.operator, **outside)
        except NotImplementedError:
            assert not calls.counts
            return
    assert torch.isfinite(out).all()
    assert calls.counts
