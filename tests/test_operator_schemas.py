"""The operators have the real schemas, and their shapes are known without running them."""

from importlib.resources import files
from typing import Any

import pytest
import torch
from operator_calls import infer, ops, qkv, randn, train
from torch._subclasses.fake_tensor import FakeTensorMode

NAMES = (
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
)


def test_schemas_are_those_of_torch_npu() -> None:
    lines = files("npu.simulator").joinpath("schemas.txt").read_text().splitlines()
    real = {schema.name: schema for schema in map(torch._C.parse_schema, lines)}
    assert sorted(real) == sorted(f"npu::{name}" for name in NAMES)
    for name in NAMES:
        assert getattr(ops, name).default._schema == real[f"npu::{name}"]


def test_defaults_that_bite() -> None:
    defaults = {name: {a.name: a.default_value for a in getattr(ops, name).default._schema.arguments} for name in NAMES}
    first, second, forward, backward = (defaults[name] for name in NAMES)
    assert (first["scale"], first["num_heads"], first["input_layout"]) == (1.0, 1, "BSH")
    assert (second["softmax_scale"], second["num_query_heads"], second["input_layout"]) == (1.0, 1, "BSH")
    assert (forward["scale"], forward["pre_tockens"], forward["next_tockens"]) == (1.0, 2**31 - 1, 2**31 - 1)
    assert (backward["scale_value"], backward["keep_prob"]) == (1.0, 1.0)
    types = {a.name: str(a.type) for a in ops.npu_fusion_attention.default._schema.arguments}
    assert types["actual_seq_qlen"] == "Optional[List[int]]"


def call(name: str, layout: str, device: str, *, lse: bool = True, widths: tuple[int, int] = (64, 64)) -> Any:
    """One call in any layout: 10 rows, 4 query heads over 2, or a batch of 2 times 5 rows."""

    def tensor(heads: int, width: int) -> torch.Tensor:
        shape = {
            "TND": (10, heads, width),
            "BSND": (2, 5, heads, width),
            "BNSD": (2, heads, 5, width),
            "BSH": (2, 5, heads * width),
        }[layout]
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    q, k, v = tensor(4, widths[0]), tensor(2, widths[0]), tensor(2, widths[1])
    sums = [4, 10] if layout == "TND" else None
    if name == "npu_fused_infer_attention_score":
        return ops.npu_fused_infer_attention_score(
            q, k, v, num_heads=4, num_key_value_heads=2, input_layout=layout, actual_seq_lengths=sums,
            actual_seq_lengths_kv=sums, softmax_lse_flag=lse,
        )  # fmt: skip
    if name == "npu_fused_infer_attention_score_v2":
        return ops.npu_fused_infer_attention_score_v2(
            q, k, v, num_query_heads=4, num_key_value_heads=2, input_layout=layout, actual_seq_qlen=sums,
            actual_seq_kvlen=sums, return_softmax_lse=lse,
        )  # fmt: skip
    out, top, total, *rest = ops.npu_fusion_attention(
        q, k, v, 4, layout, actual_seq_qlen=sums, actual_seq_kvlen=sums
    )  # fmt: skip
    if name == "npu_fusion_attention":
        return out, top, total, *rest
    sink = torch.zeros(4, device=device) if lse else None
    return ops.npu_fusion_attention_grad(
        q, k, v, out, 4, layout, softmax_max=top, softmax_sum=total, attention_in=out, actual_seq_qlen=sums,
        actual_seq_kvlen=sums, sink=sink,
    )  # fmt: skip


def facts(results: Any) -> list[Any]:
    return [(tuple(x.shape), x.dtype, x.stride()) if isinstance(x, torch.Tensor) else x for x in results]


@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("layout", ["TND", "BSND", "BNSD", "BSH"])
@pytest.mark.parametrize("name", NAMES)
def test_meta_and_fake_tensors_have_the_shapes_of_real_ones(name: str, layout: str, lse: bool) -> None:
    widths = (192, 128) if layout == "TND" else (64, 64)
    real = call(name, layout, "npu:0", lse=lse, widths=widths)
    assert facts(call(name, layout, "meta", lse=lse, widths=widths)) == facts(real)
    with FakeTensorMode():
        fake = call(name, layout, "npu:1", lse=lse, widths=widths)
    assert facts(fake) == facts(real)
    assert {x.device for x in fake if isinstance(x, torch.Tensor)} == {torch.device("npu:1")}


def test_an_lse_that_nobody_asked_for_has_no_elements() -> None:
    assert [tuple(x.shape) for x in call(NAMES[0], "TND", "meta", lse=False)] == [(10, 4, 64), (0,)]
    assert [tuple(x.shape) for x in call(NAMES[0], "TND", "npu:0", lse=False)] == [(10, 4, 64), (0,)]
    assert [tuple(x.shape) for x in call(NAMES[0], "TND", "npu:0")] == [(10, 4, 64), (10, 4, 1)]


def test_the_shape_functions_check_nothing_like_the_real_ones() -> None:
    q = torch.zeros(10, 4, 72, device="meta")
    out, lse = ops.npu_fused_infer_attention_score(q, q, q, num_heads=9, input_layout="TND", sparse_mode=99)
    assert (tuple(out.shape), tuple(lse.shape)) == ((10, 4, 72), (0,))


def test_opcheck_finds_nothing() -> None:
    q, k, v = qkv([4, 6], dtype=torch.float16)
    lengths = {"actual_seq_lengths": [4, 10], "actual_seq_lengths_kv": [4, 10]}
    shared: dict[str, Any] = {"input_layout": "TND"}
    check(
        ops.npu_fused_infer_attention_score, (q, k, v), {**shared, **lengths, "num_heads": 2, "softmax_lse_flag": True}
    )
    lengths = {"actual_seq_qlen": [4, 10], "actual_seq_kvlen": [4, 10]}
    check(
        ops.npu_fused_infer_attention_score_v2,
        (q, k, v),
        {**shared, **lengths, "num_query_heads": 2, "learnable_sink": randn(2).bfloat16()},
    )
    check(ops.npu_fusion_attention, (q, k, v, 2, "TND"), lengths)
    # With gradients opcheck can do all but one check, whose code knows the devices CPU, CUDA and XPU only.
    leaves = [x.requires_grad_() for x in qkv([4, 6])]
    check(
        ops.npu_fusion_attention,
        (*leaves, 2, "TND"),
        lengths,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    out, top, total, *_ = train(q, k, v, [4, 10])
    statistics = {"softmax_max": top, "softmax_sum": total, "attention_in": out, "scale_value": 64**-0.5}
    check(ops.npu_fusion_attention_grad, (q, k, v, q, 2, "TND"), lengths | statistics)


def check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **which: Any) -> None:
    results = torch.library.opcheck(op.default, args, kwargs, **which)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_programs_may_call_them(backend: str) -> None:
    q, k, v = qkv([4, 6], dtype=torch.float32)

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = infer(q.half() * 2, k.half(), v.half(), [4, 10])
        return train(q, k, v, [4, 10])[0].relu() + out + lse

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v).cpu(), program(q, k, v).cpu())
