"""The reference equals the float64 oracle on every case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import reference_attention
from jaxattn.testing import CASES, Case, compare


def run_reference(case: Case, dtype: str, *, jit: bool = False) -> tuple[np.ndarray, np.ndarray]:
    inputs = case.inputs(dtype)

    def attend(q, k, v, sinks, segments):
        return reference_attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **case.options)

    attend = jax.jit(attend) if jit else attend
    q, k, v = (jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else jnp.asarray(inputs.sinks)
    out, lse = attend(q, k, v, sinks, case.segments)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_equals_oracle(case: Case, dtype: str) -> None:
    result = compare(case, dtype, *run_reference(case, dtype))
    assert result.passed, result.problems


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_equals_oracle_in_float64(case: Case) -> None:
    with jax.enable_x64(True):
        result = compare(case, "float64", *run_reference(case, "float64"))
    assert result.passed, result.problems


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_equals_oracle_under_jit_with_traced_offsets(case: Case) -> None:
    result = compare(case, "float32", *run_reference(case, "float32", jit=True))
    assert result.passed, result.problems
