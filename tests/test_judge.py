"""The judge is judged: the oracle against numbers worked by hand, the comparison against planted faults."""

import math

import ml_dtypes
import numpy as np
import pytest

from jaxattn.testing import CASES, Case, compare, oracle_attention
from jaxattn.testing.compare import oracle_for, plain_kernel_run, tolerance, ulp

CASE = Case("judge", (4, 3), (2, 5), q_tail=1, k_tail=1, causal=True)


def answer(case: Case = CASE, dtype: str = "float32"):
    wanted = oracle_for(case, case.inputs(dtype))
    return wanted.out.astype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)), wanted.lse.astype(np.float32)


def test_weights_of_a_quarter_and_three_quarters() -> None:
    q, k = np.ones((1, 1, 1)), np.array([0, math.log(3)]).reshape(2, 1, 1)
    wanted = oracle_attention(q, k, np.array([0.0, 4.0]).reshape(2, 1, 1), [0, 1], [0, 2])
    assert wanted.out.item() == pytest.approx(3)
    assert wanted.lse.item() == pytest.approx(math.log(4))
    assert wanted.largest_score.item() == pytest.approx(math.log(3))


def test_a_sink_takes_its_share_and_softcap_comes_before_it() -> None:
    q, k = np.ones((1, 1, 1)), np.array([100.0]).reshape(1, 1, 1)
    wanted = oracle_attention(q, k, np.ones((1, 1, 1)), [0, 1], [0, 1], softcap=2.0, sinks=np.array([2.0]))
    assert wanted.out.item() == pytest.approx(0.5)
    assert wanted.lse.item() == pytest.approx(2 + math.log(2))


def test_empty_rows_tails_and_poison() -> None:
    q = np.zeros((4, 1, 1))
    k = np.array([0.0, np.nan, np.inf]).reshape(3, 1, 1)
    wanted = oracle_attention(q, k, np.ones((3, 1, 1)), [0, 1, 3], [0, 1, 1], sinks=np.array([0.5]))
    assert wanted.lse[0].tolist() == [pytest.approx(math.log(1 + math.exp(0.5))), 0.5, 0.5, -math.inf]
    assert wanted.out[1:].tolist() == [[[0.0]]] * 3
    wanted = oracle_attention(q, k, np.ones((3, 1, 1)), [0, 1, 4], [0, 1, 3], causal=True)
    assert np.isnan(wanted.out).ravel().tolist() == [False, False, True, True]
    assert wanted.lse[0, 1] == -math.inf


def test_two_wrongs_that_other_judges_let_pass() -> None:
    q, v = np.zeros((1, 4, 1)), np.repeat(np.arange(2.0), 4).reshape(2, 4).T.reshape(4, 2, 1)
    wanted = oracle_attention(q, np.zeros((4, 2, 1)), v, [0, 1], [0, 4])
    assert wanted.out.ravel().tolist() == [0, 0, 1, 1]  # heads repeat, they do not tile
    assert wanted.lse[0, 0] == pytest.approx(1.386294, abs=1e-6)  # natural, not base 2


@pytest.mark.parametrize(
    ("value", "dtype", "size"), [(20, "bfloat16", 0.125), (1, "float16", 2**-10), (0, "float16", 2**-24)]
)
def test_ulps(value: float, dtype: str, size: float) -> None:
    assert float(ulp(np.array(float(value)), dtype)) == size


def test_the_oracle_passes_and_reports_no_error() -> None:
    for case in CASES:
        result = compare(case, "float32", *answer(case))
        assert result.passed, result.problems
        assert result.max_ulps <= 0.5


def shift_row(out, lse):
    out[5], lse[:, 5] = out[6].copy(), lse[:, 6].copy()


def top_left(out, lse):
    q, k, v = (
        x.astype(np.float64) for x in (CASE.inputs("float32").q, CASE.inputs("float32").k, CASE.inputs("float32").v)
    )
    for h in range(2):
        for i in range(3):
            s = k[2 : 3 + i, h] @ q[4 + i, h] / 8
            lse[h, 4 + i] = np.log(np.exp(s).sum())
            out[4 + i, h] = np.exp(s - lse[h, 4 + i]) @ v[2 : 3 + i, h]


FAULTS = {
    "average in an empty row": lambda out, lse: out.__setitem__(0, 1.0),
    "NaN in an empty row": lambda out, lse: out.__setitem__((0, 0, 0), np.nan),
    "tail written": lambda out, lse: out.__setitem__((7, 0, 0), 1e-30),
    "lse +inf in an empty row": lambda out, lse: lse.__setitem__((0, 0), np.inf),
    "lse finite in a tail": lambda out, lse: lse.__setitem__((1, 7), -1e30),
    "lse in base 2": lambda out, lse: lse.__imul__(1 / math.log(2)),
    "heads exchanged": lambda out, lse: out.__setitem__(slice(None), out[:, ::-1].copy()),
    "a row shifted": shift_row,
    "top-left alignment": top_left,
    "one element off by 8 times what is allowed": lambda out, lse: out.__setitem__(
        (5, 1, 3), out[5, 1, 3] + 8 * ALLOWED[1]
    ),
    "infinity in a good row": lambda out, lse: out.__setitem__((5, 1, 3), np.inf),
}
ALLOWED = tolerance(CASE, CASE.inputs("float32"), oracle_for(CASE, CASE.inputs("float32")), "float32", "accumulate").out


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault: str) -> None:
    out, lse = answer()
    FAULTS[fault](out, lse)
    assert not compare(CASE, "float32", out, lse).passed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_fault_of_8_times_the_kernel_bound_fails_and_a_plain_run_passes(dtype: str) -> None:
    inputs = CASE.inputs(dtype)
    allowed = tolerance(CASE, inputs, oracle_for(CASE, inputs), dtype, "kernel").out
    out, lse = answer(dtype=dtype)
    plain = plain_kernel_run(CASE, inputs, dtype).astype(out.dtype)
    assert compare(CASE, dtype, plain, lse, arithmetic="kernel").passed
    out[5, 1, 3] = out[5, 1, 3].astype(float) + 8 * allowed[1]
    assert not compare(CASE, dtype, out, lse, arithmetic="kernel").passed


def test_shape_and_dtype_are_part_of_the_answer() -> None:
    out, lse = answer()
    assert compare(CASE, "float32", out, lse.T).problems == ("`lse` is float32[8, 2] where float32[2, 8] is due.",)
    assert not compare(CASE, "float32", out.astype(np.float64), lse).passed


def test_the_worst_place_is_named() -> None:
    out, lse = answer()
    out[5, 1, 3] += 1
    result = compare(CASE, "float32", out, lse)
    assert result.worst == "segment 1, row 1, head 1"
    assert "`out` is off by" in result.problems[0]
    assert "at segment 1, row 1, head 1: got" in result.problems[0]


def test_a_weaker_promise_about_poison_frees_only_its_segment_and_head_group() -> None:
    case = next(c for c in CASES if c.name == "NaN in one query")
    out, lse = answer(case)
    out[0, 0] = np.nan
    assert compare(case, "float32", out, lse, poison="segment").passed
    assert not compare(case, "float32", out, lse, poison="row").passed
    out[4, 0] = np.nan
    assert not compare(case, "float32", out, lse, poison="segment").passed
