"""npu_packed_attention equals the oracle and the reference, eagerly and under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interop import npu_packed_attention
from jaxattn import reference_attention
from jaxattn.testing import CASES, Case, compare

SUPPORTED = [case for case in CASES if case.softcap is None]


def arrays(case: Case, dtype: str) -> tuple:
    inputs = case.inputs(dtype)
    sinks = None if inputs.sinks is None else jnp.asarray(inputs.sinks)
    return *(jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v)), sinks


def attend(case: Case, attention=npu_packed_attention):
    def run(q, k, v, sinks, segments):
        return attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **case.options)

    return run


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", SUPPORTED, ids=lambda c: c.name)
def test_equals_oracle(case: Case, dtype: str, jit: bool) -> None:
    run = jax.jit(attend(case)) if jit else attend(case)
    out, lse = run(*arrays(case, dtype), case.segments)
    result = compare(case, dtype, np.asarray(out), np.asarray(lse), arithmetic="kernel", poison="segment")
    assert result.passed, result.problems


def test_runs_on_the_device_that_is_named() -> None:
    from npu.simulator import counters

    case = SUPPORTED[2]
    before = counters(3)
    out = npu_packed_attention(*arrays(case, "float16")[:3], case.segments, device="npu:3")
    assert counters(3).to_device.count - before.to_device.count == 3
    assert out.shape == case.inputs("float16").q.shape


def test_softcap_is_refused_by_name_and_the_way_out_works() -> None:
    case = next(c for c in CASES if c.softcap is not None)
    with pytest.raises(NotImplementedError, match=r"^`softcap`: 2\.0\. .* Use jaxattn\.packed_attention"):
        attend(case)(*arrays(case, "float16"), case.segments)
    attend(case, reference_attention)(*arrays(case, "float16"), case.segments)


def test_float64_is_refused_by_name() -> None:
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=r"^dtype float64"):
        npu_packed_attention(*(jnp.ones((3, 1, 64), "float64"),) * 3, SUPPORTED[0].segments.from_lengths([3]))


def test_wide_heads_are_refused_by_name_when_traced() -> None:
    x = jnp.ones((3, 1, 1024), jnp.float16)
    with pytest.raises(NotImplementedError, match=r"^Head widths 1024"):
        jax.jit(npu_packed_attention)(x, x, x, SUPPORTED[0].segments.from_lengths([3]))


def test_broken_traced_offsets_raise_with_our_words_and_leave_jax_usable() -> None:
    case = SUPPORTED[1]
    q, k, v, _ = arrays(case, "float16")
    run = jax.jit(npu_packed_attention)
    broken = jax.tree.map(lambda cu: jnp.asarray(cu) + 3, case.segments)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"`cu_seqlens_q`: the first offset is 3. Offsets start with 0"
    ):
        run(q, k, v, broken).block_until_ready()
    assert np.isfinite(run(q, k, v, case.segments)).all()


def test_new_packings_do_not_retrace() -> None:
    traces = 0

    @jax.jit
    def run(q, segments):
        nonlocal traces
        traces += 1
        return npu_packed_attention(q, q, q, segments)

    q = jnp.ones((8, 1, 64), jnp.float16)
    for lengths in ([8, 0], [3, 5], [1, 2]):
        run(q, SUPPORTED[0].segments.from_lengths(lengths))
    assert traces == 1
