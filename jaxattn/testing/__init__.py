"""What packed attention is judged by: named cases, a float64 oracle, and a comparison in ulps."""

from jaxattn.testing.cases import CASES, Case, Inputs
from jaxattn.testing.compare import Comparison, compare, distance
from jaxattn.testing.oracle import oracle_attention

__all__ = ["CASES", "Case", "Comparison", "Inputs", "compare", "distance", "oracle_attention"]
