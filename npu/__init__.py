"""Packed attention on Ascend NPUs for torch: validated, planned on the host, run by the fused kernels."""

from npu.attention import fused_infer_attention_varlen, fusion_attention_varlen
from npu.device import device_count, is_available, is_simulated, on_same_npu, place
from npu.offsets import checking

__all__ = [
    "checking",
    "device_count",
    "fused_infer_attention_varlen",
    "fusion_attention_varlen",
    "is_available",
    "is_simulated",
    "on_same_npu",
    "place",
]
