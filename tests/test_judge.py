"""The judge is judged: the oracle against numbers worked by hand, the comparison against planted faults."""

import ast
import inspect
import math

import ml_dtypes
import numpy as np
import pytest

from jaxattn.testing import (
    CASES,
    Case,
    Gradients,
    compare,
    cotangents,
    gradient_oracle,
    gradient_problems,
    oracle,
    oracle_attention,
    oracle_gradients,
)
from jaxattn.testing.cases import Poison
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


def test_names_of_cases_are_unique_and_the_table_is_small_enough_to_read() -> None:
    assert len({case.name for case in CASES}) == len(CASES) <= 64
    assert all(max(case.rows) <= 1024 for case in CASES)


@pytest.mark.parametrize("module", [oracle, gradient_oracle], ids=lambda m: m.__name__)
def test_the_oracle_shares_no_code_with_the_library(module) -> None:
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported <= {"math", "collections.abc", "typing", "numpy", "jaxtyping", "jaxattn.testing.oracle"}


def test_gradients_of_two_equal_keys_worked_by_hand() -> None:
    # p = 1/2 each, out = 2, lse = ln 2. With d_out = 1 and d_lse = 3: dv = p; ds = p (v - out + 3) = 1/2 and 5/2;
    # dq = sum ds k = 0 + 0 since the keys are 0; dk = ds q.
    one, zero = np.ones((1, 1, 1)), np.zeros((2, 1, 1))
    v = np.array([0.0, 4.0]).reshape(2, 1, 1)
    got = oracle_gradients(one, zero, v, [0, 1], [0, 2], one, np.full((1, 1), 3.0))
    assert (got.q.item(), got.k.ravel().tolist(), got.v.ravel().tolist()) == (0, [0.5, 2.5], [0.5, 0.5])
    # A sink of ln 2 takes half: p = 1/4 each, out = 1; dsink = 1/2 (3 - 1) = 1.
    got = oracle_gradients(one, zero, v, [0, 1], [0, 2], one, np.full((1, 1), 3.0), sinks=np.array([math.log(2)]))
    assert got.sinks.item() == pytest.approx(1)
    assert got.k.ravel().tolist() == pytest.approx([0.25 * (0 - 1 + 3), 0.25 * (4 - 1 + 3)])


GRADED = Case(
    "graded", (4, 3, 1), (2, 5, 0), q_tail=1, k_tail=2, heads=(4, 2), widths=(3, 2), causal=True, window_size=(2, None),
    softcap=1.5, sinks=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [GRADED, Case("plain", (3, 2), (2, 3), heads=(2, 1), widths=(2, 2))], ids=lambda c: c.name
)
def test_oracle_gradients_are_central_differences_of_the_oracle(case: Case) -> None:
    inputs = case.inputs("float64")
    arrays = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks")}
    offsets = case.segments.cu_seqlens_q.tolist(), case.segments.cu_seqlens_k.tolist()
    d_out, d_lse = cotangents(case, "float64")

    def loss(**arrays) -> float:
        wanted = oracle_attention(arrays.pop("q"), arrays.pop("k"), arrays.pop("v"), *offsets, **arrays, **case.options)
        lse = np.where(np.isfinite(wanted.lse), wanted.lse, 0)
        return float((wanted.out * np.nan_to_num(d_out)).sum() + (lse * np.nan_to_num(d_lse)).sum())

    got = oracle_gradients(inputs.q, inputs.k, inputs.v, *offsets, d_out, d_lse, sinks=inputs.sinks, **case.options)
    step = 1e-5
    for name, array in arrays.items():
        if array is None:
            continue
        array = array.astype(np.float64)
        for index in np.ndindex(*array.shape):
            up, down = array.copy(), array.copy()
            up[index] += step
            down[index] -= step
            slope = (loss(**{**arrays, name: up}) - loss(**{**arrays, name: down})) / (2 * step)
            assert getattr(got, name)[index] == pytest.approx(slope, rel=1e-6, abs=1e-8), (name, index)


def right_gradients(case: Case) -> Gradients:
    inputs, offsets = case.inputs("float32"), (case.segments.cu_seqlens_q.tolist(), case.segments.cu_seqlens_k.tolist())
    got = oracle_gradients(
        inputs.q, inputs.k, inputs.v, *offsets, *cotangents(case, "float32"), sinks=inputs.sinks, **case.options
    )
    return Gradients(*(None if x is None else x.astype(np.float32) for x in got))


GRADIENT_FAULTS = {
    "a gradient in an empty row": lambda g: g.q.__setitem__((0, 0, 0), 1e-30),
    "NaN in an empty row": lambda g: g.q.__setitem__((0, 0, 0), np.nan),
    "a gradient in the tail of q": lambda g: g.q.__setitem__((8, 0, 0), 1e-30),
    "a gradient in the tail of k": lambda g: g.k.__setitem__((8, 0, 0), 1e-30),
    "NaN in the tail of v": lambda g: g.v.__setitem__((7, 1, 0), np.nan),
    "heads not added up": lambda g: g.k.__imul__(0.5),
    "NaN in an ordinary row": lambda g: g.q.__setitem__((5, 1, 1), np.nan),
    "the sink ignored": lambda g: g.sinks.__setitem__(0, 0),
}


def test_right_gradients_pass_and_planted_faults_fail() -> None:
    assert gradient_problems(GRADED, "float32", right_gradients(GRADED)) == []
    for name, fault in GRADIENT_FAULTS.items():
        got = right_gradients(GRADED)
        fault(got)
        assert len(gradient_problems(GRADED, "float32", got)) >= 1, name
    wrong_shape = right_gradients(GRADED)._replace(v=np.zeros((10, 2, 3), np.float32))
    assert gradient_problems(GRADED, "float32", wrong_shape) == [
        "`dv` is float32[10, 2, 3] where float32[9, 2, 2] is due."
    ]


def test_gradients_that_poison_leaves_open_are_not_looked_at_and_all_others_are() -> None:
    # Row 1 of the first segment sees keys 0 and 1 in head group 0; the other segment and group stay specified.
    case = Case("", (2, 2), heads=(2, 2), widths=(2, 2), causal=True, poison=(Poison("q", 1),))
    got = right_gradients(case)
    assert np.isnan(got.q).any(axis=-1).tolist() == [[False, False], [True, False], [False, False], [False, False]]
    assert np.isnan(got.k).any(axis=-1).tolist() == [[True, False], [True, False], [False, False], [False, False]]
    assert gradient_problems(case, "float32", got) == []
    got.k[0, 1] += 1
    assert gradient_problems(case, "float32", got) != []


def test_an_empty_row_of_a_poisoned_sink_is_not_empty() -> None:
    case = Case("", (2,), (0,), sinks=True, q_tail=1, widths=(2, 2), poison=(Poison("sinks", 0, 1),))
    out, lse = answer(case)
    assert np.isnan(out[:2, 1]).all()
    assert not out[:, 0].any()
    assert compare(case, "float32", out, lse).passed
    zero = np.where(np.isnan(out), 0, out)
    assert not compare(case, "float32", zero, lse).passed
    assert compare(case, "float32", zero, lse, poison="segment").passed
    out[2, 1] = np.nan  # tails stay tails
    assert not compare(case, "float32", out, lse, poison="segment").passed
