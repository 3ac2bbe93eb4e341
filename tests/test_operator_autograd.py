"""Gradients: the inference operators have none and say so once; the training operator's are right on every device."""

import warnings
from typing import Any

import pytest
import torch
from operator_calls import grad, infer, ops, per_segment, qkv, randn, sums, train
from torch import Tensor

STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
PACKINGS = {
    "equal segments": ([4, 4, 4], [4, 4, 4], {}),
    "unequal segments, causal": ([3, 5, 1], [3, 9, 4], {"sparse_mode": 3}),
    "a band": ([6, 4], [8, 4], {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1}),
    "empty segments": ([0, 3, 2], [2, 0, 4], {}),
}


def wanted(
    tensors: list[Tensor], dy: Tensor, lengths: tuple[list[int], list[int]], options: dict[str, Any],
    sink: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """out and the gradients of q, k, v and sink, in float64 on the host."""
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in tensors)
    sink = torch.full((q.shape[1],), -torch.inf).double() if sink is None else sink.detach().cpu().double()
    sink.requires_grad_()
    scale, group = q.shape[2] ** -0.5, q.shape[1] // k.shape[1]
    parts, q0, k0 = [], 0, 0
    for Lq, Lk in zip(*lengths, strict=True):
        kk, vv = (x[k0 : k0 + Lk].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("inc,jnc->nij", q[q0 : q0 + Lq], kk) * scale
        partner = torch.arange(Lq)[:, None] + Lk - Lq
        far, right = options.get("pre_tockens", 1000), options.get("next_tockens", 0)
        key = torch.arange(Lk)
        if options:
            scores = scores.masked_fill((key > partner + right) | (key < partner - far), -torch.inf)
        with_sink = torch.cat([scores, sink[:, None, None].expand(-1, Lq, 1)], -1)
        weights = with_sink.softmax(-1)[..., :-1] if Lk else scores
        parts.append(torch.einsum("nij,jnc->inc", weights, vv))
        q0, k0 = q0 + Lq, k0 + Lk
    out = torch.cat(parts)
    out.backward(dy.cpu().double())
    return [out.detach(), *(x.grad for x in (q, k, v)), sink.grad]


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Within twelve roundings of the largest value: of P, of dS, of the result, and their sums."""
    assert got.dtype == dtype
    size = want.abs().max().item() if want.numel() else 1.0
    torch.testing.assert_close(got.cpu().double(), want, atol=12 * STEP[dtype] * size, rtol=0)


@pytest.mark.parametrize("device", ["npu:0", "npu:2"])
@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_gradients_are_right(name: str, dtype: torch.dtype, device: str) -> None:
    *lengths, options = PACKINGS[name]
    tensors = [x.requires_grad_() for x in qkv(*lengths, heads=(4, 2), widths=(64, 48), dtype=dtype, device=device)]
    dy = randn(sum(lengths[0]), 4, 48, dtype=dtype, seed=9, device=device)
    out = train(*tensors, *map(sums, lengths), **options)[0]
    out.backward(dy)
    want = wanted(tensors, dy, lengths, options)
    near(out.detach(), want[0], dtype)
    for tensor, gradient in zip(tensors, want[1:], strict=False):
        assert tensor.grad.device == torch.device(device)
        near(tensor.grad, gradient, dtype)


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH"])
def test_gradients_of_a_batch_are_right(layout: str) -> None:
    def arrange(x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, 5))
        return {"BSND": x, "BNSD": x.transpose(1, 2), "BSH": x.flatten(2)}[layout]

    tensors = [x.requires_grad_() for x in qkv([5, 5], heads=(4, 2), dtype=torch.float32)]
    dy = randn(10, 4, 64, dtype=torch.float32, seed=9)
    out = ops.npu_fusion_attention(*(arrange(x) for x in tensors), 4, layout, scale=64**-0.5)[0]
    out.backward(arrange(dy))
    for tensor, gradient in zip(tensors, wanted(tensors, dy, ([5, 5], [5, 5]), {})[1:], strict=False):
        near(tensor.grad, gradient, torch.float32)


def test_a_sink_has_a_gradient() -> None:
    *lengths, options = PACKINGS["unequal segments, causal"]
    tensors = qkv(*lengths, heads=(4, 2), dtype=torch.float32)
    sink = randn(4, dtype=torch.float32, seed=5).requires_grad_()
    dy = randn(sum(lengths[0]), 4, 64, dtype=torch.float32, seed=9)
    out = train(*tensors, *map(sums, lengths), **options, sink=sink)[0]
    out.backward(dy)
    want = wanted(list(tensors), dy, lengths, options, sink)
    near(out.detach(), want[0], torch.float32)
    near(sink.grad, want[4], torch.float32)


@pytest.mark.parametrize("order", ["", "TND"])
def test_any_maximum_and_sum_of_the_same_lse_will_do(order: str) -> None:
    q, k, v = qkv([3, 5], dtype=torch.float32)
    dy = randn(8, 2, 64, dtype=torch.float32, seed=9)
    out, top, total, *_ = train(q, k, v, [3, 8], softmax_layout=order)
    given = {"attention_in": out, "softmax_layout": order}
    want = grad(q, k, v, dy, [3, 8], softmax_max=top, softmax_sum=total, **given)
    got = grad(q, k, v, dy, [3, 8], softmax_max=top + total.log(), softmax_sum=torch.ones_like(total), **given)
    for a, b in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), atol=1e-5, rtol=1e-5)
    assert [tuple(x.shape) for x in got[3:]] == [(0,), (0,)]


def test_attention_in_is_used_so_that_a_spare_column_carries_the_gradient_of_lse() -> None:
    q, k, v = qkv([3, 5], dtype=torch.float32)
    dy, dlse = randn(8, 2, 64, dtype=torch.float32, seed=9), randn(8, 2, 1, dtype=torch.float32, seed=8)
    out, top, total, *_ = train(q, k, v, [3, 8])
    zero = torch.zeros(8, 2, 1, device="npu:0")
    wide = [torch.cat([x, zero], -1) for x in (q, k, v)]
    got = grad(
        *wide, torch.cat([dy, zero + 1], -1), [3, 8], softmax_max=top, softmax_sum=total,
        attention_in=torch.cat([out, -dlse], -1), scale=64**-0.5,
    )  # fmt: skip

    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    for start, stop in ((0, 3), (3, 8)):
        qs, ks, vs = (x[start:stop].transpose(0, 1) for x in leaves)
        scores = qs @ ks.transpose(-1, -2) * 64**-0.5
        loss = ((scores.softmax(-1) @ vs).transpose(0, 1) * dy[start:stop].cpu()).sum()
        (loss + (scores.logsumexp(-1).T[..., None] * dlse[start:stop].cpu()).sum()).backward()
    for result, leaf in zip(got, leaves, strict=False):
        torch.testing.assert_close(result.cpu()[..., :64].double(), leaf.grad, atol=1e-5, rtol=1e-5)


def test_only_the_first_output_has_a_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv([4, 6]))
    out, top, total, rest, *_ = train(q, k, v, [4, 10])
    assert [x.requires_grad for x in (out, top, total, rest)] == [True, False, False, False]
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.float().sum().backward()
    with torch.no_grad():
        assert not train(q, k, v, [4, 10])[0].requires_grad
    assert torch.isfinite(per_segment(top, [4, 6])).all()


def test_compiled_gradients_are_those_of_plain_ones() -> None:
    def gradients(run: Any) -> list[Tensor]:
        tensors = [x.requires_grad_() for x in qkv([4, 6], dtype=torch.float32)]
        run(*tensors).backward()
        return [x.grad.cpu() for x in tensors]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return train(q * 2, k, v, [4, 10], sparse_mode=0)[0].square().sum()

    torch._dynamo.reset()
    for got, want in zip(gradients(torch.compile(loss, backend="aot_eager")), gradients(loss), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("version", ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"])
def test_inference_has_no_gradient_and_warns_instead_of_raising(version: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv([10]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if version.endswith("v2"):
            lengths = {"actual_seq_qlen": [10], "actual_seq_kvlen": [10]}
            out, _ = getattr(ops, version)(q, k, v, num_query_heads=2, input_layout="TND", **lengths)
        else:
            out, _ = infer(q, k, v, [10])
        out.float().sum().backward()
    assert q.grad is None
    assert k.grad is None
    assert v.grad is None
    assert [f"npu::{version}: an autograd kernel was not registered" in str(w.message) for w in caught] == [True]
