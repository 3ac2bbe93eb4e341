"""The plan of a call: which rows go into the kernel, with which arguments. No device is touched."""

import pytest

from npu.contract import INFERENCE, TRAINING, Profile
from npu.plan import KernelCall, make_plan

F16 = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.125, "input_layout": "TND", "softmax_lse_flag": False}


def plan(cu_q, cu_k, *, D=64, Dv=None, N=4, K=2, dtype="float16", q_tail=0, k_tail=0, **options):
    Tq, Tk = cu_q[-1] + q_tail, cu_k[-1] + k_tail
    return make_plan((Tq, N, D), (Tk, K, D), (Tk, K, D if Dv is None else Dv), dtype, cu_q, cu_k, **options)


def call(q_rows, k_rows, q_sums, k_sums, *, mask=False, **kwargs) -> KernelCall:
    kwargs = {**F16, "sparse_mode": 0, "actual_seq_lengths": q_sums, "actual_seq_lengths_kv": k_sums, **kwargs}
    return KernelCall(q_rows, k_rows, mask, tuple(sorted(kwargs.items())))


def test_lengths_become_running_sums_without_the_leading_zero() -> None:
    assert plan((0, 3, 5, 9), (0, 3, 5, 9)).calls == (call(((0, 9),), ((0, 9),), (3, 5, 9), (3, 5, 9)),)


def test_segments_empty_on_both_sides_are_dropped() -> None:
    assert plan((0, 0, 3, 3, 5), (0, 0, 3, 3, 5)).calls == (call(((0, 5),), ((0, 5),), (3, 5), (3, 5)),)


def test_keys_without_queries_stay_out() -> None:
    assert plan((0, 2, 2, 4), (0, 3, 5, 6)).calls == (call(((0, 4),), ((0, 3), (5, 6)), (2, 4), (3, 4)),)


def test_queries_without_keys_stay_out() -> None:
    assert plan((0, 2, 4, 5), (0, 3, 3, 4)).calls == (call(((0, 2), (4, 5)), ((0, 4),), (2, 3), (3, 4)),)


def test_tails_stay_out_and_nothing_moves() -> None:
    made = plan((0, 5), (0, 5), q_tail=3, k_tail=2)
    assert made.calls == (call(((0, 5),), ((0, 5),), (5,), (5,)),)
    assert (made.shape, made.tail_start) == ((8, 4, 64), 5)


def test_leading_rows_that_see_nothing_stay_out() -> None:
    expected = call(((3, 6),), ((0, 5),), (2, 3), (2, 5), sparse_mode=3, mask=True)
    assert plan((0, 5, 6), (0, 2, 5), right=0).calls == (expected,)


def test_a_right_reach_lets_more_leading_rows_in() -> None:
    assert plan((0, 9), (0, 3), left=1, right=2).calls[0].q_rows == ((4, 9),)


@pytest.mark.parametrize(
    ("reach", "mode"),
    [
        ({}, {"sparse_mode": 0}),
        ({"right": 0}, {"sparse_mode": 3}),
        ({"left": 2, "right": 0}, {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0}),
        ({"left": 2, "right": 1}, {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1}),
        ({"right": 1}, {"sparse_mode": 4, "pre_tokens": 6, "next_tokens": 1}),
        ({"left": 2}, {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 6}),
        ({"left": 2**40, "right": 10**9}, {"sparse_mode": 4, "pre_tokens": 6, "next_tokens": 6}),
    ],
)
def test_the_reach_becomes_a_mode_and_is_cut_to_the_longest_segment(reach, mode) -> None:
    made = plan((0, 2, 6), (0, 6, 10), **reach)
    assert made.calls == (call(((0, 6),), ((0, 10),), (2, 6), (6, 10), mask=mode["sparse_mode"] != 0, **mode),)


@pytest.mark.parametrize(
    ("D", "Dv", "operator", "widths"),
    [
        (1, 1, INFERENCE, (64, 64)),
        (32, 32, INFERENCE, (64, 64)),
        (64, 65, INFERENCE, (128, 128)),
        (72, 72, INFERENCE, (128, 128)),
        (129, 1, INFERENCE, (192, 128)),
        (192, 128, INFERENCE, (192, 128)),
        (192, 129, TRAINING, (192, 129)),
        (64, 200, TRAINING, (200, 200)),
        (193, 64, TRAINING, (193, 64)),
        (256, 256, TRAINING, (256, 256)),
        (768, 768, TRAINING, (768, 768)),
    ],
)
def test_widths_are_padded_to_one_that_every_route_takes(
    D: int, Dv: int, operator: str, widths: tuple[int, int]
) -> None:
    made = plan((0, 2), (0, 2), D=D, Dv=Dv)
    assert (made.operator, made.widths) == (operator, widths)
    assert dict(made.calls[0].kwargs)["scale"] == D**-0.5


def test_float32_runs_on_the_training_operator() -> None:
    made = plan((0, 5, 9, 9), (0, 2, 5, 7), dtype="float32", right=0, k_tail=2)
    kwargs = {
        "head_num": 4, "input_layout": "TND", "scale": 0.125, "softmax_layout": "TND", "sparse_mode": 3,
        "actual_seq_qlen": (2, 5), "actual_seq_kvlen": (2, 5),
    }  # fmt: skip
    expected = KernelCall(((3, 5), (6, 9)), ((0, 5),), True, tuple(sorted(kwargs.items())))
    assert (made.operator, made.calls) == (TRAINING, (expected,))
    band = dict(plan((0, 4), (0, 4), dtype="float32", left=9, right=1).calls[0].kwargs)
    assert (band["sparse_mode"], band["pre_tockens"], band["next_tockens"]) == (4, 4, 1)


def test_the_gradient_is_planned_on_the_training_operator_with_a_spare_column_of_v() -> None:
    made = plan((0, 3), (0, 3), D=64, Dv=64, gradient=True)
    assert (made.operator, made.widths) == (TRAINING, (65, 65))
    assert plan((0, 3), (0, 3), D=80, Dv=16, gradient=True).widths == (80, 80)


def test_more_segments_than_one_call_takes_become_several_calls() -> None:
    cu = tuple(range(0, 2 * 5000 + 1, 2))
    made = plan(cu, cu, N=1, K=1)
    assert [c.q_rows for c in made.calls] == [((0, 8192),), ((8192, 10000),)]
    assert [len(dict(c.kwargs)["actual_seq_lengths"]) for c in made.calls] == [4096, 904]


def test_more_rows_than_one_call_takes_become_several_calls() -> None:
    cu = (0, 700_000, 1_400_000, 1_400_010)
    assert [c.k_rows for c in plan(cu, cu).calls] == [((0, 700_000),), ((700_000, 1_400_010),)]


def test_one_segment_that_is_too_long_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"^One segment has 1048577 rows\. One kernel call takes 1048576"):
        plan((0, 2**20 + 1), (0, 5))


def test_nothing_left_is_no_call() -> None:
    assert plan((0, 3), (0, 0), Dv=32).calls == ()
    assert plan((0,), (0,), q_tail=3).calls == ()


@pytest.mark.parametrize(
    ("N", "K", "dtype", "chunks"),
    [
        (65, 1, "float16", [((0, 1), (0, 64)), ((0, 1), (64, 65))]),
        (300, 3, "float16", [((0, 3), (0, 64)), ((0, 3), (64, 100))]),
        (300, 3, "float32", [((0, 3), (0, 85)), ((0, 3), (85, 100))]),
        (512, 512, "float16", [((0, 256), (0, 1)), ((256, 512), (0, 1))]),
        (256, 4, "float16", [(None, None)]),
    ],
)
def test_heads_that_one_call_does_not_take_are_divided_inside_their_key_head_first(N, K, dtype, chunks) -> None:
    made = plan((0, 2), (0, 2), N=N, K=K, dtype=dtype)
    assert [(c.kv_heads, c.group) for c in made.calls] == chunks
    for c in made.calls:
        kwargs = dict(c.kwargs)
        assert kwargs.get("num_heads", kwargs.get("head_num")) <= 256
        assert kwargs.get("num_heads", 0) <= 64 * kwargs.get("num_key_value_heads", 1)


def test_what_no_kernel_takes_is_refused_by_name() -> None:
    with pytest.raises(
        NotImplementedError, match=r"^dtype float64\. .* float32. Cast .* or use jaxattn.packed_attention"
    ):
        plan((0, 2), (0, 2), dtype="float64")
    with pytest.raises(NotImplementedError, match=r"^Head widths 769 \(q, k\) and 64 \(v\)\. The widest .* is 768"):
        plan((0, 2), (0, 2), D=769, Dv=64)
    with pytest.raises(NotImplementedError, match=r"^Head widths 768 \(q, k\) and 768 \(v\) and one spare column\."):
        plan((0, 2), (0, 2), D=768, gradient=True)
    with pytest.raises(NotImplementedError, match=r"on 310P: it has no packed layout .* Plans are made for A2, A3\."):
        plan((0, 2), (0, 2), profile=Profile(chip="310P"))


def test_plans_are_values_cached_and_readable() -> None:
    first, second = plan((0, 2, 4), (0, 2, 4), right=0), plan((0, 2, 4), (0, 2, 4), right=0)
    assert first is second
    assert {first: 1}[second] == 1
    assert str(first) == (
        "npu_fused_infer_attention_score: out [4, 4, 64], head widths padded to 64 and 64\n"
        "  call 0: q rows 0:4, k rows 0:4: actual_seq_lengths=[2, 4], actual_seq_lengths_kv=[2, 4], input_layout='TND', "
        "num_heads=4, num_key_value_heads=2, scale=0.125, softmax_lse_flag=False, sparse_mode=3, "
        "atten_mask=triangle(2048, 2048)\n"
        "  by npu_fused_infer_attention_score, A2/A3, CANN 8.3: dtypes = ('float16', 'bfloat16') (operator documents; "
        "float32 is not in the list)\n"
        "  by npu_fused_infer_attention_score, A2/A3, CANN 8.3: widths = ((64, 64), (128, 128), (192, 128)) (tiling "
        "sources: what every route takes, as (q and k, v); grouped heads take more on recent releases)"
    )
    assert "no call: no row sees a key" in str(plan((0, 3), (0, 0)))
