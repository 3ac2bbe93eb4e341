"""Every documented refusal of the training operators, called directly: the code, and what is wrong."""

from functools import cache
from typing import Any

import pytest
import torch
from operator_calls import grad, ops, qkv, randn, refusal, train, triangle

SUMS = [4, 10]


@cache
def x() -> tuple[torch.Tensor, ...]:
    return qkv([4, 6])


TRAINING: dict[str, tuple[Any, int, str]] = {
    "lengths of q are missing": (lambda: train(*x(), SUMS, actual_seq_qlen=None), 161001, "actual_seq_qlen is missing"),
    "lengths of k are missing": (
        lambda: train(*x(), SUMS, actual_seq_kvlen=None),
        161001,
        "actual_seq_kvlen is missing",
    ),
    "no lengths": (lambda: train(*x(), []), 561002, "actual_seq_qlen is empty"),
    "different counts": (lambda: train(*x(), SUMS, [10]), 561002, "actual_seq_qlen has 2 entries, actual_seq_kvlen 1."),
    "more than 1024 entries": (lambda: train(*x(), [0] * 1024 + [10]), 561002, "has 1025 entries. At most 1024."),
    "sums that decrease": (
        lambda: train(*x(), [4, 3, 10]),
        561002,
        "actual_seq_qlen [4, 3, 10] is negative or decreases.",
    ),
    "a zero in the middle": (lambda: train(*x(), [4, 0, 10]), 561002, "decreases"),
    "a last sum above T": (lambda: train(*x(), [4, 11]), 561002, "is 11 for T = 10. It must not be above."),
    "float64": (lambda: train(*qkv([10], dtype=torch.float64), [10]), 161002, "query has dtype torch.float64"),
    "mixed dtypes": (lambda: train(x()[0], x()[1].float(), x()[2], SUMS), 161002, "key has dtype torch.float32"),
    "head_num": (lambda: ops.npu_fusion_attention(*x(), 1, "TND"), 161002, "head_num is 1 for 2 heads."),
    "heads that do not divide": (lambda: train(*qkv([10], heads=(3, 2)), [10]), 561002, "3 query heads over 2"),
    "more than 256 heads": (lambda: train(*qkv([2], heads=(257, 257)), [2]), 561002, "257 query heads"),
    "width above 768": (lambda: train(*qkv([10], widths=(769, 769)), [10]), 161002, "head widths 769, 769 and 769."),
    "values wider than keys": (lambda: train(*qkv([10], widths=(64, 65)), [10]), 161002, "head widths 64, 64 and 65."),
    "fewer keys than queries, causal": (
        lambda: train(*qkv([4, 5], [4, 2]), [4, 9], [4, 6], sparse_mode=3),
        561002,
        "segment 1 has 5 queries and 2 keys, sparse_mode 3 hides all keys from the first 3.",
    ),
    "fewer keys than a band reaches": (
        lambda: train(*qkv([5], [2]), [5], [2], sparse_mode=4, pre_tockens=9, next_tockens=2),
        561002,
        "sparse_mode 4 hides all keys from the first 1.",
    ),
    "a band of nothing": (
        lambda: train(*x(), SUMS, sparse_mode=4, pre_tockens=1, next_tockens=-2),
        561002,
        "pre_tockens 1 and next_tockens -2.",
    ),
    "sparse_mode 99": (lambda: train(*x(), SUMS, sparse_mode=99), 161002, "sparse_mode is 99."),
    "a small mask": (lambda: train(*x(), SUMS, sparse_mode=3, atten_mask=triangle()[:9]), 161002, "(9, 2048)"),
    "keep_prob 0": (lambda: train(*x(), SUMS, keep_prob=0.0), 161002, "keep_prob is 0.0."),
    "softmax_layout": (lambda: train(*x(), SUMS, softmax_layout="BSH"), 161002, "softmax_layout is 'BSH'."),
    "softmax_layout of a batch": (
        lambda: ops.npu_fusion_attention(*[randn(1, 4, 2, 64)] * 3, 2, "BSND", softmax_layout="TND"),
        161002,
        "softmax_layout 'TND' with input_layout 'BSND'.",
    ),
    "sink": (lambda: train(*x(), SUMS, sink=randn(2)), 161002, "sink is torch.float16 (2,). It is float32 (2,)"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_refuses(name: str) -> None:
    call, code, detail = TRAINING[name]
    refusal(call, code, detail, "npu_fusion_attention: call aclnnFlashAttention")


def gradient(**options: Any) -> object:
    out, top, total, *_ = train(*x(), SUMS)
    given = {"softmax_max": top, "softmax_sum": total, "attention_in": out} | options
    return grad(*x(), given.pop("dy", x()[0]), SUMS, **given)


GRADIENT: dict[str, tuple[Any, int, str]] = {
    "softmax_max is missing": (lambda: gradient(softmax_max=None), 161001, "softmax_max is missing."),
    "softmax_sum is missing": (lambda: gradient(softmax_sum=None), 161001, "softmax_sum is missing."),
    "attention_in is missing": (lambda: gradient(attention_in=None), 161001, "attention_in is missing."),
    "statistics of one number": (
        lambda: gradient(softmax_max=torch.zeros(10, 2, 1, device="npu:0")),
        161002,
        "softmax_max is torch.float32 (10, 2, 1). It is torch.float32 (10, 2, 8) here.",
    ),
    "dy of another width": (lambda: gradient(dy=randn(10, 2, 32)), 161002, "dy is torch.float16 (10, 2, 32)."),
    "lengths are missing": (lambda: gradient(actual_seq_qlen=None), 161001, "actual_seq_qlen is missing"),
}


@pytest.mark.parametrize("name", GRADIENT)
def test_the_gradient_refuses(name: str) -> None:
    call, code, detail = GRADIENT[name]
    refusal(call, code, detail, "npu_fusion_attention_grad: call aclnnFlashAttentionUnpaddingScoreGrad")


LACKS: dict[str, tuple[Any, str]] = {
    "bias": (lambda: train(*x(), SUMS, pse=x()[0]), "no pse in npu_fusion_attention."),
    "dropout": (lambda: train(*x(), SUMS, keep_prob=0.9), "no dropout (keep_prob 0.9)"),
    "a dropout mask": (lambda: train(*x(), SUMS, dropout_mask=x()[0]), "no dropout_mask"),
    "a prefix": (lambda: train(*x(), SUMS, prefix=[1, 1]), "no prefix"),
    "padding_mask": (lambda: train(*x(), SUMS, padding_mask=x()[0]), "no padding_mask"),
    "inner_precise": (lambda: train(*x(), SUMS, inner_precise=2), "no inner_precise 2"),
    "sparse_mode 6": (lambda: train(*x(), SUMS, sparse_mode=6), "no sparse_mode 6"),
    "a reach in mode 0": (lambda: train(*x(), SUMS, pre_tockens=3), "no pre_tockens and next_tockens in sparse_mode 0"),
    "a mask in mode 0": (lambda: train(*x(), SUMS, atten_mask=triangle()), "no atten_mask in sparse_mode 0 of layout TND"),
    "SBH": (lambda: ops.npu_fusion_attention(*x(), 2, "SBH"), "no input_layout 'SBH'"),
    "lengths of a batch": (
        lambda: ops.npu_fusion_attention(*[randn(1, 4, 2, 64)] * 3, 2, "BSND", actual_seq_qlen=[4], actual_seq_kvlen=[4]),
        "no actual_seq_qlen and actual_seq_kvlen in layout BSND",
    ),
    "bias of the gradient": (lambda: gradient(pse=x()[0]), "no pse in npu_fusion_attention_grad."),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKS)
def test_what_the_simulation_lacks_is_said(name: str) -> None:
    call, detail = LACKS[name]
    refusal(call, None, detail)
