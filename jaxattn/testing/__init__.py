"""What packed attention is judged by: named cases, a float64 oracle, and a comparison in ulps."""

from jaxattn.testing.cases import CASES, Case, Inputs
from jaxattn.testing.compare import Comparison, compare, distance
from jaxattn.testing.gradient_oracle import Gradients, oracle_gradients
from jaxattn.testing.gradients import cotangents, gradient_problems
from jaxattn.testing.oracle import oracle_attention

__all__ = [
    "CASES",
    "Case",
    "Comparison",
    "Gradients",
    "Inputs",
    "compare",
    "cotangents",
    "distance",
    "gradient_problems",
    "oracle_attention",
    "oracle_gradients",
]
