"""JAX arrays on the NPU: the bridge, and packed attention across it."""

from interop.attention import CHECKPOINT_NAMES, npu_packed_attention
from interop.dlpack import to_jax, to_torch
from interop.pending import raise_pending

__all__ = ["CHECKPOINT_NAMES", "npu_packed_attention", "raise_pending", "to_jax", "to_torch"]
