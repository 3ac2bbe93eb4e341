"""Whatever is passed, the answer is the oracle's or a clear error of ours: never a crash, a raw error, a wrong number."""

import re
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from npu_tools import call_arguments, to_host

from jaxattn.testing import Case, compare
from jaxattn.testing.compare import oracle_for
from npu import fused_infer_attention_varlen, fusion_attention_varlen

FUNCTIONS = st.sampled_from([fused_infer_attention_varlen, fusion_attention_varlen])
OURS = re.compile(r"^(NPU packed attention requires |`\w+`|dtype |Head widths |One segment )")
QUICK = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # the oracle is a loop

reach = st.none() | st.integers(-1, 5)


@st.composite
def good_cases(draw: Any) -> Case:
    segments = draw(st.integers(0, 4))
    lengths = st.lists(st.integers(0, 6), min_size=segments, max_size=segments)
    K, R = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Case(
        "fuzz",
        tuple(draw(lengths)),
        tuple(draw(lengths)),
        q_tail=draw(st.integers(0, 2)),
        k_tail=draw(st.integers(0, 2)),
        heads=(K * R, K),
        widths=(draw(st.integers(1, 70)), draw(st.integers(1, 70))),
        causal=draw(st.booleans()),
        window_size=draw(st.none() | st.tuples(reach, reach)),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


@QUICK
@given(good_cases(), st.sampled_from(["float16", "bfloat16", "float32"]), FUNCTIONS)
def test_good_calls_give_the_oracles_answer(case: Case, dtype: str, function: Any) -> None:
    tensors, options = call_arguments(case, dtype)
    out, lse = function(*tensors, return_softmax_lse=True, **options)
    wanted = oracle_for(case, case.inputs(dtype))
    result = compare(case, dtype, to_host(out), to_host(lse), arithmetic="kernel", wanted=wanted)
    assert result.passed, result.problems


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 64, 800]), min_size=1, max_size=4).map(tuple) | st.tuples(
    st.just(4), st.sampled_from([1, 2, 3]), st.sampled_from([1, 64, 800])
)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool])
places = st.sampled_from(["cpu", "npu:0", "npu:0", "npu:0", "npu:1"])
tensors = st.builds(lambda shape, dtype, place: torch.zeros(shape, dtype=dtype).to(place), shapes, dtypes, places)
offset_lists = st.lists(st.integers(-1, 6), max_size=4).map(sorted) | st.lists(st.integers(-1, 2**33), max_size=3)
offsets = st.builds(
    lambda values, dtype, place: torch.tensor(values, dtype=torch.int64).to(dtype).to(place),
    offset_lists,
    st.sampled_from([torch.int32, torch.int32, torch.int64, torch.float32]),
    places,
)
odd = st.sampled_from([None, 1, "x", float("nan"), (), (1,), (1, 2, 3), (-2, 0), (1.5, 0), torch.ones(2)])


@settings(QUICK, max_examples=300)
@given(
    st.tuples(tensors, tensors, tensors) | tensors.map(lambda t: (t, t, t)),
    st.tuples(offsets, offsets) | offsets.map(lambda t: (t, t)),
    st.fixed_dictionaries(
        {},
        optional={
            "cu_seqlens_q_host": st.none() | offset_lists | odd,
            "softmax_scale": st.none() | st.floats() | odd,
            "return_softmax_lse": st.booleans() | odd,
            "causal": st.booleans() | odd,
            "window_size": st.tuples(reach, reach) | odd,
            "sinks": st.none() | tensors | odd,
        },
    ),
    FUNCTIONS,
)
def test_bad_calls_give_a_clear_error(arrays: Any, cu: Any, options: Any, function: Any) -> None:
    try:
        out = function(*arrays, *cu, **options)
    except (ValueError, NotImplementedError) as error:
        for line in str(error).splitlines():
            assert OURS.match(line), line
        return
    out = out[0] if isinstance(out, tuple) else out
    q, _, v = arrays
    assert out.shape == (*q.shape[:2], v.shape[2])
    assert (out == 0).all() or not torch.isfinite(out).all()  # v is 0 everywhere


def test_the_patterns_of_the_errors_are_not_everything() -> None:
    assert not OURS.match("list index out of range")
