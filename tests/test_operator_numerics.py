"""Valid calls of the operators give the right numbers, in every layout, and round where the kernels round."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from npu_tools import to_npu
from operator_calls import grad, infer, ops, per_segment, qkv, randn, sums, train, triangle

from jaxattn.testing import Case, compare
from npu import simulator

CASES = (
    Case("three segments", (5, 3, 9)),
    Case("equal segments, causal", (8, 8, 8, 3), causal=True),
    Case("more keys than queries, causal", (2, 3, 1), (5, 40, 9), causal=True),
    Case("grouped heads", (33, 5), (20, 7), heads=(8, 2)),
    Case("grouped heads, causal, width 128", (17, 5), (40, 5), heads=(4, 2), widths=(128, 128), causal=True),
    Case("widths 192 and 128", (17, 20), widths=(192, 128), causal=True),
    Case("a band", (30, 4), (34, 9), window_size=(5, 2)),
    Case("a band with one side unlimited", (30, 4), window_size=(None, 2)),
    Case("segments empty on either side", (0, 3, 2), (2, 0, 2)),
    Case("scale given", (9, 4), softmax_scale=0.5, causal=True),
    Case("scale below zero", (9, 4), softmax_scale=-0.5, causal=True),
    Case("scale of zero", (9, 4), softmax_scale=0.0, causal=True),
    Case("large scores", (40, 9), gain=6.0),
)
BIG = 2147483647


def options_of(case: Case) -> dict[str, Any]:
    """The options of the inference operator."""
    chosen: dict[str, Any] = {"scale": case.widths[0] ** -0.5 if case.softmax_scale is None else case.softmax_scale}
    if case.causal:
        chosen["sparse_mode"] = 3
    elif case.window_size is not None:
        left, right = (BIG if reach is None else reach for reach in case.window_size)
        chosen |= {"sparse_mode": 4, "pre_tokens": left, "next_tokens": right}
    return chosen


def run(case: Case, dtype: str, *, training: bool = False, **more: Any) -> Any:
    inputs = case.inputs(dtype)
    q, k, v = (to_npu(x) for x in (inputs.q, inputs.k, inputs.v))
    options = options_of(case)
    if training:
        options = {name.replace("tokens", "tockens"): value for name, value in options.items()}
    k_lengths = case.q_lengths if case.k_lengths is None else case.k_lengths
    operator = train if training else infer
    return operator(q, k, v, sums(list(case.q_lengths)), sums(list(k_lengths)), **options, **more)


def judged(case: Case, dtype: str, out: torch.Tensor, lse: torch.Tensor) -> tuple[str, ...]:
    """What is wrong with out and lse `[T, N]`, whose empty rows have -inf."""
    host = out.cpu()
    array = host.float().numpy() if dtype == "bfloat16" else host.numpy()
    array = array.astype(case.inputs(dtype).q.dtype)
    return compare(case, dtype, array, np.ascontiguousarray(lse.cpu().numpy().T), arithmetic="kernel").problems


@pytest.mark.parametrize("hazards", [True, False], ids=["hazards", "safe"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_inference_equals_the_oracle(case: Case, dtype: str, hazards: bool) -> None:
    with simulator.hazards(hazards):
        out, lse = run(case, dtype)
        unasked, _ = run(case, dtype, softmax_lse_flag=False)
    assert torch.equal(unasked.cpu(), out.cpu())
    lse = lse.squeeze(-1).cpu()
    assert not torch.isneginf(lse).any()
    assert not judged(case, dtype, out, torch.where(torch.isposinf(lse), -torch.inf, lse))


@pytest.mark.parametrize("layout", ["", "TND"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_training_equals_the_oracle(case: Case, dtype: str, layout: str) -> None:
    out, top, total, rest, *dropout = run(case, dtype, training=True, softmax_layout=layout)
    assert (tuple(rest.shape), dropout) == ((0,), [0, 0, 0])
    assert top.shape == total.shape == (*out.shape[:2], 8)
    top, total = (per_segment(x, list(case.q_lengths), layout) for x in (top, total))
    keyless = (top == 0) & (total == 0)
    assert not judged(case, dtype, out, torch.where(keyless, -torch.inf, top + total.log()))


def test_weights_are_rounded_before_they_meet_v_and_the_sum_is_not() -> None:
    # Two keys with scores 0 and -0.3: weights 1 and w. With v = (-w rounded, 1) out is exactly 0 if w was rounded to
    # bfloat16 before, and about 1e-3 if not.
    q = torch.zeros(1, 1, 64)
    k = torch.zeros(2, 1, 64)
    q[..., 0], k[1, 0, 0] = 1.0, -0.25
    weight = torch.tensor(-0.25).exp()
    rounded = weight.bfloat16().float()
    assert rounded != weight
    v = torch.stack([-rounded, torch.tensor(1.0)])[:, None, None].expand(2, 1, 64)
    packed = [x.bfloat16().contiguous().to("npu:0") for x in (q, k, v)]
    out, lse = infer(*packed, [1], [2], scale=1.0)
    assert (out == 0).all()
    assert (train(*packed, [1], [2], scale=1.0)[0] == 0).all()
    assert lse.item() == pytest.approx(float((1 + weight).log()), rel=1e-6)
    exact = train(*(x.float() for x in packed), [1], [2], scale=1.0)[0]
    assert exact[0, 0, 0].item() == pytest.approx(float((weight - rounded) / (1 + weight)), rel=1e-3)


def as_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`[B, S, N, D]` in another layout of a batch, contiguous."""
    return {"BSND": x, "BNSD": x.transpose(1, 2), "BSH": x.flatten(2)}[layout].contiguous()


@pytest.mark.parametrize("mode", [0, 3, 4])
@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH"])
def test_a_batch_is_a_packing_of_equal_segments(layout: str, mode: int) -> None:
    q, k, v = randn(3, 6, 4, 64), randn(3, 9, 2, 64, seed=1), randn(3, 9, 2, 64, seed=2)
    mask = triangle() if mode else None
    reach = (3, 1) if mode == 4 else (BIG, BIG)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    lengths = sums([6] * 3), sums([9] * 3)
    shared = {"scale": 0.125, "sparse_mode": mode, "atten_mask": mask}

    named = {"pre_tokens": reach[0], "next_tokens": reach[1]}
    want, want_lse = infer(*packed, *lengths, **shared, **named)
    out, lse = ops.npu_fused_infer_attention_score(
        *(as_layout(x, layout) for x in (q, k, v)), num_heads=4, num_key_value_heads=2, input_layout=layout,
        softmax_lse_flag=True, **shared, **named,
    )  # fmt: skip
    assert torch.equal(out, as_layout(want.unflatten(0, (3, 6)), layout))
    assert torch.equal(lse, want_lse.unflatten(0, (3, 6)).transpose(1, 2))

    named = {"pre_tockens": reach[0], "next_tockens": reach[1]}
    want, top, total, *_ = train(*packed, *lengths, **shared, **named)
    got, got_top, got_total, *_ = ops.npu_fusion_attention(
        *(as_layout(x, layout) for x in (q, k, v)), 4, layout, **shared, **named
    )
    assert torch.equal(got, as_layout(want.unflatten(0, (3, 6)), layout))
    for statistic, packed_statistic in ((got_top, top), (got_total, total)):
        assert statistic.shape == (3, 4, 6, 8)
        assert torch.equal(
            statistic[..., 0].transpose(1, 2).flatten(0, 1).cpu(), per_segment(packed_statistic, [6] * 3)
        )


def test_a_batch_may_have_fewer_valid_keys() -> None:
    q, k, v = randn(2, 4, 2, 64), randn(2, 9, 2, 64, seed=1), randn(2, 9, 2, 64, seed=2)
    options: dict[str, Any] = {"num_heads": 2, "scale": 0.125, "sparse_mode": 3, "atten_mask": triangle()}
    got = ops.npu_fused_infer_attention_score(q, k, v, input_layout="BSND", actual_seq_lengths_kv=[5, 9], **options)[0]
    short = torch.cat([k[0, :5], k[1]]), torch.cat([v[0, :5], v[1]])
    want = infer(q.flatten(0, 1), *short, [4, 8], [5, 14], sparse_mode=3)[0]
    assert torch.equal(got.flatten(0, 1), want)
    same = ops.npu_fused_infer_attention_score(q, k, v, input_layout="BSND", actual_seq_lengths_kv=[5], **options)[0]
    assert torch.equal(same[0], got[0])


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7)])
def test_a_caller_may_hide_keys_of_a_batch(shape: tuple[int, ...]) -> None:
    q, k, v = randn(2, 4, 5, 64), randn(2, 4, 7, 64, seed=1), randn(2, 4, 7, 64, seed=2)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[..., 2] = False
    shared = {"scale": 0.125, "atten_mask": mask.to("npu:0")}
    scores = (q.cpu().float() @ k.cpu().float().transpose(-1, -2) * 0.125).masked_fill(mask, -torch.inf)
    want = scores.softmax(-1) @ v.cpu().float()
    got = ops.npu_fused_infer_attention_score(q, k, v, num_heads=4, input_layout="BNSD", **shared)[0]
    trained = ops.npu_fusion_attention(q, k, v, 4, "BNSD", **shared)[0]
    torch.testing.assert_close(got.cpu().float(), want, atol=4e-3, rtol=0)
    torch.testing.assert_close(trained.cpu().float(), want, atol=4e-3, rtol=0)


def test_sinks_take_part_of_the_weight() -> None:
    case = Case("sinks", (9, 4), causal=True, sinks=True, heads=(4, 2))
    inputs = case.inputs("bfloat16")
    assert inputs.sinks is not None
    rounded = torch.from_numpy(inputs.sinks).bfloat16()
    q, k, v = (to_npu(x) for x in (inputs.q, inputs.k, inputs.v))
    out, lse = ops.npu_fused_infer_attention_score_v2(
        q, k, v, atten_mask=triangle(), actual_seq_qlen=[9, 13], actual_seq_kvlen=[9, 13], num_query_heads=4,
        num_key_value_heads=2, softmax_scale=64**-0.5, input_layout="TND", sparse_mode=3, return_softmax_lse=True,
        learnable_sink=rounded.to("npu:0"),
    )  # fmt: skip
    plain, plain_lse = infer(q, k, v, [9, 13], sparse_mode=3)
    want_lse = torch.logaddexp(plain_lse[..., 0].cpu(), rounded.float())
    torch.testing.assert_close(lse[..., 0].cpu(), want_lse)
    want = plain.cpu().float() * torch.exp(plain_lse[..., 0].cpu() - want_lse)[..., None]
    torch.testing.assert_close(out.cpu().float(), want, atol=0.01, rtol=0.01)
    trained, top, total, *_ = train(q, k, v, [9, 13], sparse_mode=3, sink=torch.from_numpy(inputs.sinks).to("npu:0"))
    trained_lse = (per_segment(top, [9, 4]) + per_segment(total, [9, 4]).log()).contiguous()
    assert not judged(case, "bfloat16", trained, trained_lse)


def test_training_takes_strided_tensors_and_zeroes_a_marked_tail() -> None:
    q, k, v = qkv([4, 6])
    want = train(q, k, v, [4, 9, 0], [4, 9, 0])
    rows_apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    numbers_apart = [x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v)]
    for strided in (rows_apart, numbers_apart):
        got = train(*strided, [4, 9, 0], [4, 9, 0])
        assert all(torch.equal(a, b) for a, b in zip(want[:3], got[:3], strict=True))
    assert (want[0][9:] == 0).all()
    assert (want[1][9:] == 0).all()
    assert torch.equal(want[0][:9], train(q[:9], k[:9], v[:9], [4, 9])[0])


def test_training_takes_odd_widths() -> None:
    for dtype, widths in product(("float16", "float32"), ((1, 1), (80, 72), (256, 256), (768, 32))):
        case = Case("odd widths", (6, 4), widths=widths, causal=True)
        out, top, total, *_ = run(case, dtype, training=True)
        assert not judged(case, dtype, out, per_segment(top, [6, 4]) + per_segment(total, [6, 4]).log())


def test_empty_calls_give_empty_tensors() -> None:
    q, k, v = qkv([0])
    assert [tuple(x.shape) for x in infer(q, k, v, [0])] == [(0, 2, 64), (0, 2, 1)]
    assert [tuple(x.shape) for x in train(q, k, v, [0])[:3]] == [(0, 2, 64), (0, 2, 8), (0, 2, 8)]
    assert [tuple(x.shape) for x in grad(q, k, v, q, [0], softmax_max=torch.zeros(0, 2, 8, device="npu:0"),
            softmax_sum=torch.zeros(0, 2, 8, device="npu:0"), attention_in=q)[:3]] == [(0, 2, 64)] * 3  # fmt: skip


def test_neither_autocast_nor_default_device_of_the_host_reach_into_the_kernels() -> None:
    q, k, v = qkv([4, 6])
    mask = triangle()

    def results() -> list[torch.Tensor]:
        out, top, total, *_ = train(q, k, v, [4, 10], sparse_mode=3, atten_mask=mask)
        statistics = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
        gradients = grad(q, k, v, q, [4, 10], sparse_mode=3, atten_mask=mask, **statistics)
        return [*infer(q, k, v, [4, 10], sparse_mode=3, atten_mask=mask), out, top, total, *gradients]

    want = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = results()
    with torch.device("npu:1"):
        elsewhere = results()
    for a, b, c in zip(want, lowered, elsewhere, strict=True):
        assert a.device == b.device == c.device == torch.device("npu:0")
        assert torch.equal(a, b)
        assert torch.equal(a, c)
