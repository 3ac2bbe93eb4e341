"""Packed (variable-length) attention in JAX: what every row of the answer is."""

from jaxattn.reference import reference_attention
from jaxattn.segments import Segments

__all__ = ["Segments", "reference_attention"]
