"""Gradients through fusion_attention_varlen equal the float64 oracle's."""

import numpy as np
import pytest
import torch
from npu_tools import OperatorCalls, call_arguments, to_host, to_npu

from jaxattn.testing import CASES, Case, Gradients, cotangents, gradient_problems
from npu import fusion_attention_varlen
from npu.simulator import counters

CLEAN = [case for case in CASES if case.softcap is None and not case.poison]
MORE_QUERIES_THAN_KEYS = next(case for case in CASES if case.name == "rows before the first key are empty")


def gradients(case: Case, dtype: str, device: str = "npu:0") -> Gradients:
    tensors, options = call_arguments(case, dtype, device)
    leaves = [*tensors[:3], options["sinks"]]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    results = fusion_attention_varlen(*tensors, return_softmax_lse=True, **options)
    torch.autograd.backward(results, [to_npu(d, device) for d in cotangents(case, dtype)])
    return Gradients(*(None if leaf is None else to_host(leaf.grad) for leaf in leaves))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CLEAN, ids=lambda c: c.name)
def test_gradients_equal_the_oracles(case: Case, dtype: str) -> None:
    assert gradient_problems(case, dtype, gradients(case, dtype), arithmetic="kernel") == []


@pytest.mark.parametrize(
    "case",
    [
        Case("width 200", (5, 3), widths=(200, 70), causal=True),
        Case("260 heads in 2 groups", (4, 2), heads=(260, 2), widths=(16, 16), causal=True),
        Case("300 heads, each with its keys", (3, 2), heads=(300, 300), widths=(8, 8), sinks=True),
        Case("1030 segments", (1, 2) * 515, heads=(1, 1), widths=(8, 8)),
    ],
    ids=lambda c: c.name,
)
def test_what_one_call_does_not_take(case: Case) -> None:
    assert gradient_problems(case, "float32", gradients(case, "float32"), arithmetic="kernel") == []


@pytest.mark.parametrize("device", ["npu:1", "npu:3"])
def test_every_device_has_gradients(device: str) -> None:
    case = MORE_QUERIES_THAN_KEYS
    assert gradient_problems(case, "float16", gradients(case, "float16", device), arithmetic="kernel") == []


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gradient_that_is_a_tenth_too_large_fails(name: str, dtype: str) -> None:
    case = MORE_QUERIES_THAN_KEYS
    right = gradients(case, dtype)
    wrong = right._replace(**{name: (getattr(right, name) * np.float32(1.1)).astype(right.q.dtype)})
    assert any(f"`d{name}` is off" in line for line in gradient_problems(case, dtype, wrong, arithmetic="kernel"))


def test_only_what_is_used_is_computed() -> None:
    tensors, options = call_arguments(MORE_QUERIES_THAN_KEYS, "float16")
    tensors[0].requires_grad_()
    with OperatorCalls() as calls:
        out, lse = fusion_attention_varlen(*tensors, return_softmax_lse=True, **options)
        lse[:, 4].sum().backward()
        assert calls.counts == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}
    assert (tensors[0].grad[4] != 0).any()
    assert (tensors[0].grad[:3] == 0).all()
    assert out.grad_fn is not None


def test_nothing_is_read_back_from_the_device() -> None:
    tensors, options = call_arguments(MORE_QUERIES_THAN_KEYS, "float16")
    tensors[1].requires_grad_()
    before = counters(0)
    fusion_attention_varlen(*tensors, **options).float().sum().backward()
    assert (counters(0) - before).syncs == 0


def test_poison_in_tails_and_unread_cotangents_changes_no_gradient() -> None:
    clean = Case("clean", (4, 3), (3, 5), q_tail=2, k_tail=2, causal=True, sinks=True)
    results = []
    for poisoned in (False, True):
        tensors, options = call_arguments(clean, "float32")
        d_out, d_lse = (to_npu(np.nan_to_num(d)) for d in cotangents(clean, "float32"))
        if poisoned:
            tensors[0][7:], tensors[1][8:], tensors[2][8:] = torch.nan, torch.inf, torch.nan
            d_out[0], d_out[7:], d_lse[:, 7:] = torch.nan, torch.nan, torch.nan
        leaves = [*tensors[:3], options["sinks"]]
        for leaf in leaves:
            leaf.requires_grad_()
        torch.autograd.backward(fusion_attention_varlen(*tensors, return_softmax_lse=True, **options), (d_out, d_lse))
        results.append([leaf.grad for leaf in leaves])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)
    assert all((gradient[rows:] == 0).all() for gradient, rows in zip(results[1][:3], (7, 8, 8), strict=True))


def test_second_order_is_refused_by_torch() -> None:
    tensors, options = call_arguments(MORE_QUERIES_THAN_KEYS, "float16")
    tensors[0].requires_grad_()
    out = fusion_attention_varlen(*tensors, **options)
    (gradient,) = torch.autograd.grad((out.float() ** 2).sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().sum().backward()
