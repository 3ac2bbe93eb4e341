"""Packed (variable-length) attention in JAX: what every row of the answer is."""

from jaxattn.blocked import packed_attention
from jaxattn.mask import draw
from jaxattn.merging import merge
from jaxattn.packing import pack, pack_padded, unpack, unpack_padded
from jaxattn.reference import reference_attention
from jaxattn.segments import Segments

__all__ = [
    "Segments",
    "draw",
    "merge",
    "pack",
    "pack_padded",
    "packed_attention",
    "reference_attention",
    "unpack",
    "unpack_padded",
]
