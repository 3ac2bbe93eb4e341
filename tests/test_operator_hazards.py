"""Hazard mode: what the operators do outside their contract, wrong or unwritten, and that switching it off mends it."""

from typing import Any

import pytest
import torch
from operator_calls import grad, infer, ops, per_segment, qkv, randn, refusal, train, triangle
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from npu import simulator

GROUPED = (4, 2)
ON = pytest.mark.parametrize("on", [True, False], ids=["on", "off"])


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """One segment, in float32 on the host, `[L, N, Dv]`."""
    q, k, v = (x.cpu().float().transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)[0].transpose(0, 1)


def close(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.cpu().float(), want, atol=4e-3)


def causal(Lq: int, Lk: int) -> Tensor:
    return torch.ones(Lq, Lk, dtype=torch.bool).tril(Lk - Lq)


def test_the_mode_is_on_from_the_start_and_switches() -> None:
    from npu.simulator import hazard_mode

    assert hazard_mode.is_on()
    with simulator.hazards(False):
        assert not hazard_mode.is_on()
        with simulator.hazards(True):
            assert hazard_mode.is_on()
        assert not hazard_mode.is_on()
    assert hazard_mode.is_on()
    simulator.hazards(False)
    assert not hazard_mode.is_on()
    simulator.hazards(True)
    with pytest.raises(ValueError, match=r"^`on`: 1\. It must be True or False\. Pass a Python bool\.$"):
        simulator.hazards(1)  # type: ignore[arg-type]


def test_grouped_inference_leaves_rows_past_the_last_sum_unwritten() -> None:
    q, k, v = qkv([10], heads=GROUPED)
    out, lse = infer(q, k, v, [4, 8])
    assert out[8:].isnan().all()
    assert lse[8:].isnan().all()
    assert close(out[4:8], attention(q[4:8], k[4:8], v[4:8]))
    with simulator.hazards(False):
        refusal(lambda: infer(q, k, v, [4, 8]), 561002, "the last entry of actual_seq_lengths is 8 for T = 10.")


def test_grouped_inference_believes_lengths_that_look_like_sums() -> None:
    q, k, v = qkv([2, 3, 4], heads=GROUPED)
    want = infer(q, k, v, [2, 5, 9])[0]
    got = infer(q, k, v, [2, 3, 4])[0]  # the lengths themselves
    assert torch.equal(got[:2], want[:2])
    assert close(got[2:3], attention(q[2:3], k[2:3], v[2:3]))
    assert not close(got[2:3], want[2:3].cpu().float())
    assert got[4:].isnan().all()


@ON
def test_grouped_inference_is_wrong_with_fewer_keys_than_queries(on: bool) -> None:
    q, k, v = qkv([2, 5], [2, 3], heads=GROUPED)
    with simulator.hazards(on):
        out, lse = infer(q, k, v, [2, 7], [2, 5], sparse_mode=3)
    right = torch.cat([torch.zeros(2, 4, 64), attention(q[4:], k[2:], v[2:], attn_mask=causal(3, 3))])
    from_start = attention(q[2:], k[2:], v[2:], attn_mask=torch.ones(5, 3, dtype=torch.bool).tril())
    assert close(out[:2], attention(q[:2], k[:2], v[:2], attn_mask=causal(2, 2)))
    assert close(out[2:], from_start if on else right)
    assert not close(from_start, right)
    assert torch.isposinf(lse[2:4]).all() == (not on)


@ON
def test_grouped_inference_leaves_rows_without_keys_unwritten_in_mode_3(on: bool) -> None:
    q, k, v = qkv([2, 3], [0, 3], heads=GROUPED)
    with simulator.hazards(on):
        out, lse = infer(q, k, v, [2, 5], [0, 3], sparse_mode=3)
    assert out[:2].isnan().all() if on else (out[:2] == 0).all()
    assert lse[:2].isnan().all() if on else torch.isposinf(lse[:2]).all()
    assert close(out[2:], attention(q[2:], k, v, attn_mask=causal(3, 3)))


def test_the_template_kernel_is_right_about_empty_rows() -> None:
    q, k, v = qkv([2, 5, 2], [2, 3, 0])
    out, lse = infer(q, k, v, [2, 7, 9], [2, 5, 5], sparse_mode=3)
    empty = [2, 3, 7, 8]
    assert (out[empty] == 0).all()
    assert torch.isposinf(lse[empty]).all()
    assert torch.isfinite(lse[[0, 1, 4, 5, 6]]).all()
    assert close(out[4:7], attention(q[4:7], k[2:5], v[2:5], attn_mask=causal(3, 3)))


def test_rows_without_keys_have_lse_plus_infinity_in_every_mode() -> None:
    q, k, v = qkv([2, 3], [0, 3], heads=GROUPED)
    for options in ({}, {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1}):
        out, lse = infer(q, k, v, [2, 5], [0, 3], **options)
        assert (out[:2] == 0).all()
        assert torch.isposinf(lse[:2]).all()


def test_the_reach_of_mode_0_counts_from_the_first_key() -> None:
    q, k, v = qkv([3], [6])
    out, lse = infer(q, k, v, [3], [6], pre_tokens=1, next_tokens=1)
    seen = torch.ones(3, 6, dtype=torch.bool).tril(1).triu(-1)
    assert close(out, attention(q, k, v, attn_mask=seen))
    late = infer(q[:, :, :], k[:1], v[:1], [3], [1], pre_tokens=0, next_tokens=0)
    assert torch.isposinf(late[1][1:]).all()
    assert torch.isfinite(lse).all()


@ON
@pytest.mark.parametrize("inner_precise", [0, 1, 2, 3])
def test_a_row_that_the_callers_mask_hides_becomes_the_average_of_v(inner_precise: int, on: bool) -> None:
    q, k, v = (randn(1, 2, 4, 64, seed=i) for i in range(3))
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    with simulator.hazards(on):
        out, lse = ops.npu_fused_infer_attention_score(
            q, k, v, num_heads=2, scale=0.125, input_layout="BNSD", atten_mask=mask.to("npu:0"),
            inner_precise=inner_precise, softmax_lse_flag=True,
        )  # fmt: skip
    averaged = on and inner_precise < 2
    want = v.cpu().float().mean(2) if averaged else torch.zeros(1, 2, 64)
    assert close(out[:, :, 1], want)
    assert torch.isposinf(lse[:, :, 1]).all() == (not averaged)


@ON
@pytest.mark.parametrize("mode", [3, 4])
def test_training_without_the_triangle_is_full_attention(mode: int, on: bool) -> None:
    q, k, v = qkv([4, 6])
    with simulator.hazards(on):
        out = train(q, k, v, [4, 10], sparse_mode=mode, atten_mask=None)[0]
    assert torch.equal(out, train(q, k, v, [4, 10])[0])
    assert not torch.equal(out, train(q, k, v, [4, 10], sparse_mode=3)[0])


@ON
@pytest.mark.parametrize("marked", [False, True], ids=["no zero", "zero at the end"])
@pytest.mark.parametrize("order", ["", "TND"])
def test_training_leaves_rows_past_the_last_sum_unwritten_without_a_zero(order: str, marked: bool, on: bool) -> None:
    q, k, v = qkv([10])
    lengths = [3, 8, 0] if marked else [3, 8]
    with simulator.hazards(on):
        out, top, total, *_ = train(q, k, v, lengths, softmax_layout=order)
        grads = grad(
            q, k, v, q, lengths, softmax_max=top, softmax_sum=total, attention_in=out, softmax_layout=order
        )[:3]  # fmt: skip
    for x in (out, top, total, *grads):
        written, tail = x.cpu()[:8], x.cpu()[8:]
        assert torch.isfinite(written).all()
        assert tail.isnan().all() if on and not marked else (tail == 0).all()


@ON
def test_training_rows_that_a_callers_mask_hides_are_undefined(on: bool) -> None:
    q, k, v = (randn(1, 2, 4, 64, seed=i) for i in range(3))
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    with simulator.hazards(on):
        out, top, *_ = ops.npu_fusion_attention(q, k, v, 2, "BNSD", atten_mask=mask.to("npu:0"))
    for x in (out, top):
        assert x[:, :, 1].isnan().all() if on else (x[:, :, 1] == 0).all()
        assert torch.isfinite(x[:, :, [0, 2, 3]]).all()


def test_training_rows_without_keys_are_zero_with_statistics_zero() -> None:
    q, k, v = qkv([2, 3], [0, 3])
    out, top, total, *_ = train(q, k, v, [2, 5], [0, 3])
    assert (out[:2] == 0).all()
    assert (per_segment(top, [2, 3])[:2] == 0).all()
    assert (per_segment(total, [2, 3])[:2] == 0).all()
    assert (per_segment(total, [2, 3])[2:] > 0).all()


def test_the_shape_of_statistics_lies_about_their_order() -> None:
    q, k, v = qkv([3, 5])
    default, true = (train(q, k, v, [3, 8], softmax_layout=order)[1].cpu() for order in ("", "TND"))
    assert default.shape == true.shape == (8, 2, 8)
    assert not torch.equal(default, true)
    assert torch.equal(true, true[..., :1].expand(8, 2, 8))
    # Memory: a segment of S rows from row a on is [N, S, 8] at float a * N * 8.
    assert torch.equal(default.flatten()[: 3 * 16].view(2, 3, 8).transpose(0, 1), true[:3])
    assert torch.equal(default.flatten()[3 * 16 :].view(2, 5, 8).transpose(0, 1), true[3:])


def test_gradients_from_statistics_in_the_other_order_are_wrong() -> None:
    q, k, v = qkv([3, 5])
    out, top, total, *_ = train(q, k, v, [3, 8])
    given = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
    right = grad(q, k, v, q, [3, 8], **given)[0].cpu().float()
    wrong = grad(q, k, v, q, [3, 8], **given, softmax_layout="TND")[0].cpu().float()
    assert not torch.allclose(right, wrong, atol=0.05)


@ON
def test_statistics_whose_copies_differ_give_undefined_gradients(on: bool) -> None:
    q, k, v = qkv([3, 5])
    out, top, total, *_ = train(q, k, v, [3, 8], softmax_layout="TND")
    top[1, 0, 5] = 0
    with simulator.hazards(on):
        dq = grad(
            q, k, v, q, [3, 8], softmax_max=top, softmax_sum=total, attention_in=out, softmax_layout="TND"
        )[0].cpu()  # fmt: skip
    assert dq[1, 0].isnan().all() == on
    assert torch.isfinite(dq[3:]).all()


@ON
@pytest.mark.parametrize("call", [infer, train])
def test_a_triangle_of_the_wrong_side_is_used_as_it_is(call: Any, on: bool) -> None:
    q, k, v = qkv([4, 6])
    right = attention(q[4:], k[4:], v[4:], attn_mask=causal(6, 6))
    lower = torch.ones(2048, 2048, dtype=torch.bool).tril().to("npu:0")
    upper = torch.ones(6, 6, dtype=torch.bool).triu(1)
    with simulator.hazards(on):
        inverted = call(q, k, v, [4, 10], sparse_mode=3, atten_mask=lower)[0][4:9]
        nothing = call(q, k, v, [4, 10], sparse_mode=3, atten_mask=torch.zeros_like(lower))[0][4:]
    assert close(inverted, attention(q[4:], k[4:], v[4:], attn_mask=upper)[:5] if on else right[:5])
    assert close(nothing, attention(q[4:], k[4:], v[4:]) if on else right)


def test_a_band_uses_its_triangle_on_both_sides() -> None:
    q, k, v = qkv([6])
    reach = {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1}
    seen = torch.ones(6, 6, dtype=torch.bool).tril(1).triu(-2)
    assert close(infer(q, k, v, [6], **reach)[0], attention(q, k, v, attn_mask=seen))
    hollow = triangle()
    hollow[0, 3] = False  # one cell: three keys past the last visible one
    assert not close(infer(q, k, v, [6], **reach, atten_mask=hollow)[0], attention(q, k, v, attn_mask=seen))


@pytest.mark.parametrize("call", [infer, train])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_poison_spreads_over_its_segment_and_head_group_and_no_further(call: Any, place: str, value: float) -> None:
    q, k, v = qkv([3, 4, 3], heads=GROUPED)
    out = call(q, k, v, [3, 7, 10], sparse_mode=3)[0].cpu()
    tensors = {"q": q, "k": k, "v": v}
    tensors[place][6, -1, 0] = value  # the last row of the second segment, which causal rows before it do not see
    spoiled = call(q, k, v, [3, 7, 10], sparse_mode=3)[0].cpu()
    assert spoiled[3:7, 2:].isnan().all()
    assert torch.equal(spoiled[3:7, :2], out[3:7, :2])
    assert torch.equal(spoiled[[0, 1, 2, 7, 8, 9]], out[[0, 1, 2, 7, 8, 9]])


def test_poison_in_v_does_not_reach_lse() -> None:
    q, k, v = qkv([3, 4])
    lse = infer(q, k, v, [3, 7])[1]
    v[5] = float("nan")
    assert torch.equal(infer(q, k, v, [3, 7])[1], lse)
    k[5] = float("nan")
    assert infer(q, k, v, [3, 7])[1][3:].isnan().all()
