"""The reference equals the float64 oracle on every case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import reference_attention
from jaxattn.testing import CASES, Case, Comparison, compare


def judge(case: Case, dtype: str, transform=jax.jit) -> Comparison:
    inputs = case.inputs(dtype)

    def attend(q, k, v, sinks, segments):
        return reference_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **case.options)

    q, k, v = (jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else jnp.asarray(inputs.sinks)
    out, lse = transform(attend)(q, k, v, sinks, case.segments)
    return compare(case, dtype, np.asarray(out), np.asarray(lse))


# float16 and bfloat16 differ from float32 by the casts at both ends only, so a sixth of the cases is enough for each.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(c, "float32") for c in CASES]
    + [(c, "float64") for c in CASES]
    + [(c, "float16") for c in CASES[::6]]
    + [(c, "bfloat16") for c in CASES[3::6]],
    ids=lambda x: getattr(x, "name", x),
)
def test_reference_equals_oracle_under_jit_with_traced_offsets(case: Case, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        result = judge(case, dtype)
    assert result.passed, result.problems


@pytest.mark.parametrize("case", CASES[::12], ids=lambda c: c.name)
def test_reference_equals_oracle_eagerly(case: Case) -> None:
    result = judge(case, "float32", transform=lambda f: f)
    assert result.passed, result.problems
