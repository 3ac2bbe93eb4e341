"""The varlen functions for torch users: every case, few kernel calls, offsets read once."""

import gc
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from npu_tools import OperatorCalls, call_arguments, to_host, to_npu

import npu
from jaxattn.testing import CASES, Case, compare
from npu import fused_infer_attention_varlen, fusion_attention_varlen
from npu.plan import make_plan
from npu.simulator import counters

SUPPORTED = [case for case in CASES if case.softcap is None]


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# float32 runs on the training operator in either function, and the gradients judge that operator in every dtype.
@pytest.mark.parametrize(
    ("function", "case", "dtype"),
    [(fused_infer_attention_varlen, case, dtype) for case in SUPPORTED for dtype in ("float16", "bfloat16", "float32")]
    + [(fusion_attention_varlen, case, "float16") for case in SUPPORTED],
    ids=lambda x: getattr(x, "__name__", getattr(x, "name", x)),
)
def test_equals_oracle(function, case: Case, dtype: str) -> None:
    tensors, options = call_arguments(case, dtype)
    out, lse = function(*tensors, return_softmax_lse=True, **options)
    result = compare(case, dtype, to_host(out), to_host(lse), arithmetic="kernel", poison="segment")
    assert result.passed, result.problems


@pytest.mark.parametrize("function", [fused_infer_attention_varlen, fusion_attention_varlen], ids=["infer", "fusion"])
@pytest.mark.parametrize(
    "case",
    [
        Case("width 256", (5, 3), widths=(256, 256), causal=True),
        Case("width 193 with v of 65", (5, 3), widths=(193, 65)),
        Case("v wider than any inference width", (5, 3), widths=(64, 200)),
        Case("80 query heads on one key head", (5, 3), (3, 4), heads=(80, 1), causal=True, sinks=True),
        Case("260 heads in 2 groups", (4, 2), heads=(260, 2), widths=(64, 64), causal=True),
        Case("300 heads, each with its keys", (3, 2), heads=(300, 300), widths=(16, 16)),
        Case("4100 segments", (1,) * 4100, heads=(1, 1), widths=(16, 16), causal=True),
    ],
    ids=lambda c: c.name,
)
def test_what_one_call_does_not_take(function, case: Case) -> None:
    tensors, options = call_arguments(case, "float16")
    out, lse = function(*tensors, return_softmax_lse=True, **options)
    result = compare(case, "float16", to_host(out), to_host(lse), arithmetic="kernel", poison="segment")
    assert result.passed, result.problems


def test_a_causal_pack_of_1000_segments_is_one_kernel_call() -> None:
    rng = np.random.default_rng(0)
    cu_q = torch.tensor([0, *rng.integers(0, 4, 1000).cumsum()], dtype=torch.int32)
    cu_k = torch.tensor([0, *rng.integers(0, 4, 1000).cumsum()], dtype=torch.int32)
    q, k = (torch.randn(int(cu[-1]), 2, 64).half().to("npu") for cu in (cu_q, cu_k))
    with OperatorCalls() as calls:
        out = fused_infer_attention_varlen(q, k, k, cu_q, cu_k, causal=True)
    assert calls.counts == {"npu_fused_infer_attention_score": 1}
    assert torch.isfinite(out).all()


def test_a_long_padded_packing_is_planned_in_little_memory() -> None:
    offsets = (0, 40_000, 63_232 - 63)
    tracemalloc.start()
    made = make_plan((63_232, 2, 128), (63_232, 2, 128), (63_232, 2, 128), "bfloat16", offsets, offsets, right=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert (made.tail_start, made.calls[0].q_rows) == (63_169, ((0, 63_169),))


def test_device_offsets_are_read_once_per_tensor_and_never_with_host_copies() -> None:
    q = torch.ones(6, 2, 64, dtype=torch.float16, device="npu")
    cu = torch.tensor([0, 2, 6], dtype=torch.int32).to("npu")
    host = [0, 2, 6]

    def syncs(**given) -> int:
        before = counters(0)
        fused_infer_attention_varlen(q, q, q, cu, cu, **given)
        return (counters(0) - before).syncs

    assert syncs(cu_seqlens_q_host=host, cu_seqlens_k_host=host) == 0
    assert syncs() == 1
    assert [syncs() for _ in range(50)] == [0] * 50
    cu[1] = 3  # a new version
    assert syncs() == 1


def test_offsets_of_a_dead_tensor_are_not_taken_for_those_of_the_next() -> None:
    q = torch.randn(6, 1, 64).half().to("npu")
    outs = []
    for split in (1, 2, 3, 4):
        cu = torch.tensor([0, split, 6], dtype=torch.int32).to("npu")
        outs.append(fused_infer_attention_varlen(q, q, q, cu, cu))
        del cu
        gc.collect()
    assert not any(torch.equal(a, b) for a, b in pairwise(outs))
    with torch.inference_mode():
        cu = torch.tensor([0, 1, 6], dtype=torch.int32).to("npu")
        first = fused_infer_attention_varlen(q, q, q, cu, cu)
        cu[1] = 4  # no version: read at every call
        assert torch.equal(first, outs[0])
        assert torch.equal(fused_infer_attention_varlen(q, q, q, cu, cu), outs[3])


def test_a_host_copy_that_disagrees_is_an_error_when_checking() -> None:
    q = torch.ones(6, 2, 64, dtype=torch.float16, device="npu")
    cu = torch.tensor([0, 2, 6], dtype=torch.int32).to("npu")
    with npu.checking():
        fused_infer_attention_varlen(q, q, q, cu, cu, cu_seqlens_q_host=[0, 2, 6])
        with pytest.raises(
            ValueError, match=r"^`cu_seqlens_k_host`: \[0, 3, 6\] where `cu_seqlens_k` holds \[0, 2, 6\]\."
        ):
            fused_infer_attention_varlen(q, q, q, cu, cu, cu_seqlens_k_host=[0, 3, 6])
    fused_infer_attention_varlen(q, q, q, cu, cu, cu_seqlens_q_host=[0, 3, 6], cu_seqlens_k_host=[0, 3, 6])


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_strided_tensors_give_the_same(which: str) -> None:
    tensors, options = call_arguments(named("grouped heads, unequal lengths, causal"), "float16")
    want = fused_infer_attention_varlen(*tensors, **options)
    i = "qkv".index(which)
    tensors[i] = tensors[i].transpose(0, 1).contiguous().transpose(0, 1)
    assert not tensors[i].is_contiguous()
    assert torch.equal(fused_infer_attention_varlen(*tensors, **options), want)


def test_a_contiguous_call_copies_no_input() -> None:
    q = torch.randn(64, 4, 64).half().to("npu")
    cu = torch.tensor([0, 30, 64], dtype=torch.int32)
    fused_infer_attention_varlen(q, q, q, cu, cu, causal=True)
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    out = fused_infer_attention_varlen(q, q, q, cu, cu, causal=True)
    assert torch.npu.max_memory_allocated() - before <= out.nbytes


def test_the_triangle_is_made_anew_when_somebody_wrote_into_it() -> None:
    from npu.kernels import triangle

    mask = triangle(torch.device("npu:0"))
    assert triangle(torch.device("npu:0")) is mask
    mask.zero_()
    assert triangle(torch.device("npu:0"))[0, 1]
    assert not triangle(torch.device("npu:0"))[1, 0]


def test_sglangs_nine_parameters_come_first_with_their_defaults() -> None:
    import inspect

    for function in (fused_infer_attention_varlen, fusion_attention_varlen):
        parameters = list(inspect.signature(function).parameters.values())
        assert [p.name for p in parameters[:9]] == [
            "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k",
            "cu_seqlens_q_host", "cu_seqlens_k_host", "softmax_scale", "return_softmax_lse",
        ]  # fmt: skip
        assert [p.default for p in parameters[5:]] == [None, None, None, False, False, (-1, -1), None]


def test_placing_and_asking_where_tensors_are() -> None:
    x = torch.ones(2)
    a, b = npu.place(x, x, device="npu:2")
    assert npu.on_same_npu(a, b)
    assert npu.place(a, device=2)[0] is a
    assert not npu.on_same_npu(a, x)
    assert not npu.on_same_npu(a, npu.place(x, device=1)[0])
    assert not npu.on_same_npu(x, x)
    assert not npu.on_same_npu(a, "npu:2")
    assert (npu.device_count(), npu.is_available(), npu.is_simulated()) == (4, True, True)
    assert to_npu(np.ones(2)).device == torch.device("npu:0")
