"""JAX arrays on the NPU: the bridge, and packed attention across it."""

from interop.attention import npu_packed_attention
from interop.dlpack import to_jax, to_torch

__all__ = ["npu_packed_attention", "to_jax", "to_torch"]
