"""Every documented refusal of the operators, called directly: the code, and what is wrong."""

from functools import cache
from typing import Any

import pytest
import torch
from operator_calls import infer, ops, qkv, randn, refusal, train, triangle


@cache
def x() -> tuple[torch.Tensor, ...]:
    return qkv([4, 6])


SUMS = [4, 10]
HALF = torch.float16


def with_q(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return q, x()[1], x()[2]


def strided(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


INFERENCE: dict[str, tuple[Any, int, str]] = {
    "lengths of q are missing": (
        lambda: infer(*x(), SUMS, actual_seq_lengths=None),
        161001,
        "actual_seq_lengths is missing",
    ),
    "lengths of k are missing": (
        lambda: infer(*x(), SUMS, actual_seq_lengths_kv=None),
        161001,
        "actual_seq_lengths_kv is missing",
    ),
    "the triangle is missing": (
        lambda: infer(*x(), SUMS, sparse_mode=3, atten_mask=None),
        161001,
        "atten_mask is missing. sparse_mode 3 needs it.",
    ),
    "the triangle is missing in a band": (
        lambda: infer(*x(), SUMS, sparse_mode=4, atten_mask=None),
        161001,
        "sparse_mode 4 needs it.",
    ),
    "two dimensions": (
        lambda: infer(x()[0], x()[1][0], x()[2], SUMS),
        161002,
        "key has 2 dimensions. Layout TND has 3.",
    ),
    "float32": (
        lambda: infer(*qkv([4, 6], dtype=torch.float32), SUMS),
        161002,
        "query has dtype torch.float32. query, key and value are all float16 or all bfloat16.",
    ),
    "mixed dtypes": (
        lambda: infer(x()[0], x()[1].bfloat16(), x()[2], SUMS),
        161002,
        "key has dtype torch.bfloat16",
    ),
    "q is strided": (lambda: infer(*with_q(strided(x()[0])), SUMS), 161002, "query with strides (64, 640, 1) is not"),
    "k is strided": (lambda: infer(x()[0], strided(x()[1]), x()[2], SUMS), 161002, "key with strides"),
    "v is strided": (lambda: infer(x()[0], x()[1], strided(x()[2]), SUMS), 161002, "value with strides"),
    "the mask is strided": (
        lambda: infer(*x(), SUMS, sparse_mode=3, atten_mask=triangle().T),
        161002,
        "atten_mask with strides",
    ),
    "k and v of different rows": (lambda: infer(x()[0], x()[1], x()[2][:9], SUMS), 161002, "(9, 2, 64)"),
    "q and k of different widths": (lambda: infer(randn(10, 2, 128), x()[1], x()[2], SUMS), 161002, "(10, 2, 128)"),
    "the default number of heads": (
        lambda: infer(*x(), SUMS, num_heads=1, num_key_value_heads=0),
        161002,
        "num_heads is 1 for 2 heads, num_key_value_heads 1 for 2.",
    ),
    "a wrong number of key/value heads": (
        lambda: infer(*x(), SUMS, num_key_value_heads=1),
        161002,
        "num_key_value_heads 1 for 2",
    ),
    "heads that do not divide": (lambda: infer(*qkv([10], heads=(3, 2)), [10]), 561002, "3 query heads over 2"),
    "a ratio above 64": (lambda: infer(*qkv([10], heads=(65, 1)), [10]), 561002, "65 query heads over 1"),
    "more than 256 heads": (lambda: infer(*qkv([2], heads=(257, 257)), [2]), 561002, "257 query heads"),
    "width 72": (lambda: infer(*qkv([10], widths=(72, 72)), [10]), 161002, "head widths 72 and 72."),
    "width 80": (lambda: infer(*qkv([10], widths=(80, 80)), [10]), 161002, "head widths 80 and 80."),
    "width 96": (lambda: infer(*qkv([10], widths=(96, 96)), [10]), 161002, "head widths 96 and 96."),
    "width 256": (lambda: infer(*qkv([10], widths=(256, 256)), [10]), 161002, "head widths 256 and 256."),
    "narrow values": (lambda: infer(*qkv([10], widths=(64, 32)), [10]), 161002, "head widths 64 and 32."),
    "width 80, grouped, another precision": (
        lambda: infer(*qkv([10], heads=(4, 2), widths=(80, 80)), [10], inner_precise=1),
        161002,
        "head widths 80 and 80.",
    ),
    "more than a million rows": (
        lambda: infer(*[torch.empty(1_048_577, 1, 64, dtype=HALF, device="npu:0")] * 3, [1_048_577]),
        561002,
        "T is 1048577 for query and 1048577 for key. At most 1048576.",
    ),
    "more than 4096 entries": (lambda: infer(*x(), [0] * 4096 + [10]), 561002, "has 4097 entries. At most 4096."),
    "sums that decrease": (
        lambda: infer(*x(), [6, 4, 10]),
        561002,
        "actual_seq_lengths [6, 4, 10] is negative or decreases. It holds running sums.",
    ),
    "a negative sum": (lambda: infer(*x(), [-1, 10]), 561002, "actual_seq_lengths [-1, 10] is negative"),
    "a last sum below T": (
        lambda: infer(*x(), [4, 9]),
        561002,
        "the last entry of actual_seq_lengths is 9 for T = 10. They must be equal.",
    ),
    "a last sum above T": (lambda: infer(*x(), [4, 11]), 561002, "the last entry of actual_seq_lengths is 11"),
    "a last sum above T, grouped": (
        lambda: infer(*qkv([10], heads=(4, 2)), [11]),
        561002,
        "the last entry of actual_seq_lengths is 11",
    ),
    "a last key sum below T": (
        lambda: infer(*x(), SUMS, [4, 9]),
        561002,
        "the last entry of actual_seq_lengths_kv is 9 for T = 10.",
    ),
    "different counts": (lambda: infer(*x(), SUMS, [10]), 561002, "has 2 entries, actual_seq_lengths_kv 1."),
    "sparse_mode 1": (lambda: infer(*x(), SUMS, sparse_mode=1), 561002, "sparse_mode 1. It is 0, 3 or 4 here."),
    "sparse_mode 99": (lambda: infer(*x(), SUMS, sparse_mode=99), 561002, "sparse_mode 99."),
    "a mask in mode 0": (
        lambda: infer(*x(), SUMS, atten_mask=triangle()),
        561002,
        "atten_mask is given with sparse_mode 0",
    ),
    "a float mask": (
        lambda: infer(*x(), SUMS, sparse_mode=3, atten_mask=triangle().half()),
        161002,
        "atten_mask is torch.float16 (2048, 2048). sparse_mode 3 needs bool [2048, 2048].",
    ),
    "a small mask": (
        lambda: infer(*x(), SUMS, sparse_mode=4, atten_mask=triangle()[:10, :10].contiguous()),
        161002,
        "atten_mask is torch.bool (10, 10).",
    ),
    "a negative left reach": (
        lambda: infer(*x(), SUMS, sparse_mode=4, pre_tokens=-1, next_tokens=3),
        561002,
        "pre_tokens -1 and next_tokens 3.",
    ),
    "a band of nothing": (
        lambda: infer(*x(), SUMS, sparse_mode=4, pre_tokens=1, next_tokens=-2),
        561002,
        "pre_tokens 1 and next_tokens -2.",
    ),
    "inner_precise 4": (lambda: infer(*x(), SUMS, inner_precise=4), 161002, "inner_precise is 4."),
    "bias": (lambda: infer(*x(), SUMS, pse_shift=x()[0]), 161002, "pse_shift in layout TND"),
    "a shared prefix": (
        lambda: infer(*x(), SUMS, key_shared_prefix=x()[1], value_shared_prefix=x()[2]),
        161002,
        "key_shared_prefix, value_shared_prefix in layout TND",
    ),
    "quantised output": (lambda: infer(*x(), SUMS, quant_scale2=x()[0]), 161002, "quant_scale2 in layout TND"),
    "lower case": (lambda: infer(*x(), SUMS, input_layout="tnd"), 161002, "input_layout is 'tnd'"),
    "few keys, legacy kernel": (
        lambda: infer(*qkv([4, 5], [4, 2], heads=(4, 2)), [4, 9], [4, 6], sparse_mode=3, inner_precise=1),
        561002,
        "When layout is TND and sparse = 3 ,Batch[1], need s1[5] <= s2[2].",
    ),
    "no keys, legacy kernel": (
        lambda: infer(*qkv([2, 4], [0, 4], heads=(4, 2), widths=(192, 128)), [2, 6], [0, 4], sparse_mode=3),
        561002,
        "When layout is TND and sparse = 3 ,Batch[0], need s1[2] <= s2[0].",
    ),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_refuses(name: str) -> None:
    call, code, detail = INFERENCE[name]
    refusal(call, code, detail)


def test_the_whole_text() -> None:
    with pytest.raises(RuntimeError) as caught:
        infer(*x(), [4, 9])
    assert str(caught.value) == (
        "npu_fused_infer_attention_score: call aclnnFusedInferAttentionScoreV3 failed, error code is 561002\n"
        "[ERROR] ERR00100 PTA call acl api failed\n"
        "EZ9999: the last entry of actual_seq_lengths is 9 for T = 10. They must be equal. (simulated NPU)"
    )


def test_the_second_version_refuses_under_its_names() -> None:
    def call(**options: Any) -> object:
        lengths = {"actual_seq_qlen": SUMS, "actual_seq_kvlen": SUMS}
        named = {"num_query_heads": 2, "input_layout": "TND"}
        return ops.npu_fused_infer_attention_score_v2(*x(), **named | lengths | options)

    second = "npu_fused_infer_attention_score_v2: call aclnnFusedInferAttentionScoreV5"
    refusal(lambda: call(actual_seq_qlen=None), 161001, "actual_seq_qlen is missing", second)
    refusal(lambda: call(actual_seq_kvlen=[4, 9]), 561002, "the last entry of actual_seq_kvlen is 9", second)
    refusal(lambda: call(num_query_heads=1), 161002, "num_query_heads is 1 for 2 heads", second)
    refusal(
        lambda: call(learnable_sink=randn(2)), 161002, "learnable_sink is torch.float16 (2,). It is bfloat16", second
    )
    refusal(lambda: call(learnable_sink=randn(3).bfloat16()), 161002, "learnable_sink is torch.bfloat16 (3,)", second)
    refusal(lambda: call(quant_scale_out=x()[0]), 161002, "quant_scale_out in layout TND", second)
    refusal(lambda: call(out_dtype=0), None, "no out_dtype in")
    refusal(lambda: call(query_rope=x()[0], key_rope=x()[1]), None, "no key_rope, query_rope in")


def batched(layout: str = "BSND", shape: tuple[int, ...] = (2, 5, 2, 64), **options: Any) -> object:
    t = randn(*shape)
    named = {"num_heads": 2, "input_layout": layout, "scale": 0.125}
    return ops.npu_fused_infer_attention_score(t, t, t, **named | options)


LACKS: dict[str, tuple[Any, str]] = {
    "paging": (lambda: infer(*x(), SUMS, block_table=torch.zeros(1, 1, device="npu:0").int(), block_size=128),
               "no block_size, block_table in npu_fused_infer_attention_score."),
    "separate rope": (lambda: infer(*x(), SUMS, query_rope=x()[0], key_rope=x()[1]), "no key_rope, query_rope"),
    "quantised keys": (lambda: infer(*x(), SUMS, key_antiquant_scale=x()[1], key_antiquant_mode=1), "no key_antiquant_mode"),
    "bias of a batch": (lambda: batched(pse_shift=x()[0]), "no pse_shift"),
    "another layout": (lambda: batched("BNSD_BSND"), "no input_layout 'BNSD_BSND'"),
    "lengths of queries of a batch": (lambda: batched(actual_seq_lengths=[5, 4]), "no actual_seq_lengths in layout BSND"),
    "sparse_mode 2 of a batch": (lambda: batched(sparse_mode=2), "no sparse_mode 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKS)
def test_what_the_simulation_lacks_is_said(name: str) -> None:
    call, detail = LACKS[name]
    refusal(call, None, detail)


BATCHED: dict[str, tuple[Any, int, str]] = {
    "width 72": (lambda: batched(shape=(2, 5, 2, 72)), 161002, "equal multiples of 16 up to 512"),
    "rank": (lambda: batched("BNSD", (2, 5, 64)), 161002, "query has 3 dimensions. Layout BNSD has 4."),
    "heads of BSH": (lambda: batched("BSH", (2, 5, 63)), 161002, "query has width 63, which 2 heads do not share"),
    "too many keys": (lambda: batched(actual_seq_lengths_kv=[5, 6]), 561002, "numbers of keys from 0 to 5"),
    "too many counts": (lambda: batched(actual_seq_lengths_kv=[5, 5, 5]), 561002, "It holds 1 or 2 numbers"),
    "mask shape": (
        lambda: batched(atten_mask=torch.zeros(5, 4, device="npu:0").bool()),
        161002,
        "atten_mask has shape (5, 4). sparse_mode 0 takes (5, 5)",
    ),
    "mask dtype": (lambda: batched(atten_mask=randn(5, 5)), 161002, "atten_mask is torch.float16"),
}


@pytest.mark.parametrize("name", BATCHED)
def test_inference_of_a_batch_refuses(name: str) -> None:
    call, code, detail = BATCHED[name]
    refusal(call, code, detail)


@pytest.mark.parametrize("call", [infer, train])
def test_devices_are_not_mixed_and_the_host_has_no_kernel(call: Any) -> None:
    q, k, v = x()
    for other in (k.cpu(), k.to("npu:1")):
        with pytest.raises(
            RuntimeError, match=r"^Expected all tensors to be on the same device.*npu:0 and (cpu|npu:1)!"
        ):
            call(q, other, v, SUMS)
    with pytest.raises(NotImplementedError, match=r"^Could not run 'npu::npu_fus"):
        call(*(t.cpu() for t in x()), SUMS)
