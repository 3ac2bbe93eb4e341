"""What a wrong call is told, word for word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from interop import npu_packed_attention
from jaxattn import Segments, draw, pack, pack_padded, reference_attention, unpack, unpack_padded
from npu import fused_infer_attention_varlen

CU = torch.tensor([0, 4], dtype=torch.int32)


def on_npu(*shape: int, device: str = "npu:0", dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).to(device)


def told(call, error: type[Exception] = ValueError) -> list[str]:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value).splitlines()


X = (4, 2, 64)
SEEDS = {
    "rank 2 input": (
        lambda: (on_npu(4, 128), on_npu(*X), on_npu(*X)),
        "NPU packed attention requires q, k, and v in [T, N, D] layout; invalid tensors: q. Shapes are q (4, 128), "
        "k (4, 2, 64), v (4, 2, 64). Lay the sequences end to end on the first axis, without a batch axis.",
    ),
    "a CPU tensor among NPU tensors": (
        lambda: (on_npu(*X), on_npu(*X, device="cpu"), on_npu(*X)),
        "NPU packed attention requires q, k, and v on the same NPU; invalid tensors: k. Devices are q npu:0, k cpu, "
        'v npu:0. Move them: k = k.to("npu:0").',
    ),
    "q on the CPU": (
        lambda: (on_npu(*X, device="cpu"), on_npu(*X, device="npu:1"), on_npu(*X, device="npu:1")),
        "NPU packed attention requires q, k, and v on the same NPU; invalid tensors: q, k, v. Devices are q cpu, "
        'k npu:1, v npu:1. Move them: q = q.to("npu:1").',
    ),
    "q on npu:0 with k and v on npu:1": (
        lambda: (on_npu(*X), on_npu(*X, device="npu:1"), on_npu(*X, device="npu:1")),
        "NPU packed attention requires q, k, and v on the same NPU; invalid tensors: k, v. Devices are q npu:0, "
        'k npu:1, v npu:1. Move them: k = k.to("npu:0"); v = v.to("npu:0").',
    ),
    "mixed dtypes": (
        lambda: (on_npu(*X), on_npu(*X, dtype=torch.bfloat16), on_npu(*X)),
        "NPU packed attention requires q, k, and v with the same dtype. Dtypes are q float16, k bfloat16, v float16. "
        "Cast them to one dtype.",
    ),
    "k and v of different token count": (
        lambda: (on_npu(*X), on_npu(*X), on_npu(5, 2, 64)),
        "NPU packed attention requires matching K/V token and head counts. k has 4 tokens and 2 heads, v has 5 tokens "
        "and 2 heads. Pass k and v of the same packing.",
    ),
    "q and k of different width": (
        lambda: (on_npu(4, 2, 32), on_npu(*X), on_npu(*X)),
        "NPU packed attention requires matching Q/K head dimensions. q has width 32, k has width 64. Project both to "
        "one width.",
    ),
}


@pytest.mark.parametrize("name", SEEDS)
def test_the_five_checks_on_torch_tensors(name: str) -> None:
    make, message = SEEDS[name]
    assert told(lambda: fused_infer_attention_varlen(*make(), CU, CU)) == [message]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", [n for n in SEEDS if "CPU" not in n and "npu:" not in n])
def test_the_same_checks_on_jax_arrays(name: str, jit: bool) -> None:
    make, message = SEEDS[name]
    arrays = [jnp.zeros(t.shape, str(t.dtype).removeprefix("torch.")) for t in make()]
    call = jax.jit(npu_packed_attention) if jit else npu_packed_attention
    assert told(lambda: call(*arrays, Segments.from_lengths([4]))) == [message]


def test_all_mismatches_come_at_once_in_a_fixed_order() -> None:
    q, k, v = on_npu(4, 3, 32), on_npu(5, 2, 64, device="npu:1"), on_npu(4, 2, 64, device="npu:1", dtype=torch.float32)
    lines = told(lambda: fused_infer_attention_varlen(q, k, v, CU, torch.tensor([1, 9]), causal=1, window_size=(1,)))
    starts = [
        "on the same NPU",
        "with the same dtype",
        "matching K/V",
        "matching Q/K",
        "`q`: 3 query heads",
        "`causal`: 1",
    ]
    starts += ["`window_size`: (1,)", "`cu_seqlens_k`: the first offset is 1"]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.removeprefix("NPU packed attention requires q, k, and v ").startswith(start) or line.startswith(
            f"NPU packed attention requires {start}"
        )


@pytest.mark.parametrize(
    ("offsets", "line"),
    [
        ([1, 4], "`cu_seqlens_q`: the first offset is 1. Offsets start with 0. Prepend 0 to the running sums."),
        ([], "`cu_seqlens_q`: the first offset is missing. Offsets start with 0. Prepend 0 to the running sums."),
        ([0, 3, 2], "`cu_seqlens_q`: offset 2 follows 3 at index 2. Offsets never decrease. Pass running sums."),
        (
            [0, 9],
            "`cu_seqlens_q`: the last offset is 9, past the 4 rows of `q`. Offsets count rows and end at or before the "
            "last one. Pass the offsets of this batch.",
        ),
        (
            [0, 2, 4],
            "`cu_seqlens_k`: 1 key segments for 2 query segments. Both sides need the same number. Repeat an offset for "
            "a segment that has nothing.",
        ),
        (
            [[0, 4]],
            "`cu_seqlens_q`: int32 of shape (1, 2). Offsets are int32 with one dimension. Pass running sums that start "
            "with 0, as int32.",
        ),
    ],
)
def test_offsets_on_the_torch_side(offsets: list, line: str) -> None:
    cu_q = torch.tensor(offsets, dtype=torch.int32)
    assert told(lambda: fused_infer_attention_varlen(*(on_npu(*X),) * 3, cu_q, CU)) == [line]


SEGMENTS = [
    (
        lambda: Segments.from_lengths([3, -1]),
        "`q`: length -1 at segment 1. Lengths count rows, from 0. Remove the sign.",
    ),
    (lambda: Segments.from_lengths([1.5]), "`q`: lengths of dtype float64. They must be integers. Use .astype(int32)."),
    (
        lambda: Segments.from_lengths([[1, 2]]),
        "`q`: lengths of shape (1, 2). They must have one dimension. Pass a flat list or array.",
    ),
    (
        lambda: Segments.from_lengths([1], [1, 2]),
        "`k`: 2 key segments for 1 query segments. Both sides need the same number. Use length 0 for a side that has "
        "nothing.",
    ),
    (
        lambda: Segments.from_lengths([1, 2, 3], num_segments=2),
        "`num_segments`: 2 is less than the 3 segments given. Padding only adds empty segments. Use num_segments=3 or "
        "more.",
    ),
    (
        lambda: Segments.from_lengths([2**31]),
        f"`q`: length {2**31}, past int32 ({2**31 - 1}). Split the batch.",
    ),
    (lambda: Segments.from_cu_seqlens([]), "`q`: no offsets. They must start with 0. Pass [0] for no segments."),
    (
        lambda: Segments.from_cu_seqlens([2, 5]),
        "`q`: the first offset is 2. Offsets start with 0. Prepend 0 to the running sums.",
    ),
    (
        lambda: Segments.from_cu_seqlens([0, 4, 3]),
        "`q`: offset 3 follows 4 at index 2. Offsets never decrease. Pass running sums, or use Segments.from_lengths "
        "for lengths.",
    ),
]
SEGMENTS += [
    (
        lambda: Segments.from_lengths([1], num_segments=-1),
        "`num_segments`: -1. It must be an int >= 0 or None. Pass a Python int.",
    ),
    (
        lambda: Segments.from_segment_ids([0, 0, 1, 1, 0, 0]),
        "`q`: id 0 comes back at row 4 after a change. The rows of a segment lie together. Sort the rows by id, or give "
        "each run an id of its own.",
    ),
    (
        lambda: Segments.from_segment_ids([1, 2, 9], [2, 2, 1]),
        "`k`: id 2 at row 0 comes in another order than in `q`. Shared ids come in the same order on both sides. Reorder "
        "the segments of one side.",
    ),
    (
        lambda: Segments.from_segment_ids([1, 2], padding_id=0.0),
        "`padding_id`: 0.0. It must be an int or None. Pass the id that marks padding.",
    ),
    (
        lambda: Segments.from_segment_ids([1, 2, 3], num_segments=2),
        "`num_segments`: 2 is less than the 3 segments given. Padding only adds empty segments. Use num_segments=3 or "
        "more.",
    ),
    (
        lambda: Segments.from_segment_ids(jnp.ones((1, 4), int)),
        "`q`: ids of shape (1, 4). They must have one dimension. Pass a flat list or array.",
    ),
    (
        lambda: Segments.from_segment_ids([2**63]),
        "`q`: ids past the range of int64. They are compared as int64. Renumber them.",
    ),
    (
        lambda: jax.jit(Segments.from_segment_ids)(jnp.arange(3)),
        "`num_segments`: None with traced ids. The number of segments is the shape of the offsets. Pass the largest number "
        "expected; the rest become empty segments.",
    ),
    (
        lambda: jax.jit(lambda ids: Segments.from_segment_ids(ids, num_segments=1))(jnp.arange(3, dtype=jnp.uint32)),
        "`q`: traced ids of dtype uint32. They are compared as int32. Use .astype(int32).",
    ),
    (
        lambda: jax.jit(lambda ids: Segments.from_segment_ids(ids, [2**40], num_segments=1))(jnp.arange(3)),
        "`k`: ids past the range of int32. They are compared as int32. Renumber them.",
    ),
    (
        lambda: Segments.from_position_ids([0, 1, -1, 0]),
        "`q`: position -1 at row 2. Positions count from 0; negative ones mark the tail, after the last segment. Use "
        "Segments.from_segment_ids for padding elsewhere.",
    ),
    (
        lambda: Segments.from_position_ids([0, 1], [0, 0]),
        "`k`: 2 key segments for 1 query segments. Both sides need the same number. Use length 0 for a side that has "
        "nothing.",
    ),
    (
        lambda: Segments.from_lengths([2, 3]).q_ids(4),
        "`cu_seqlens_q`: the last offset is 5, past the 4 rows of `q`. Offsets count rows and end at or before the last "
        "one. Pass the offsets of this batch.",
    ),
    (
        lambda: draw(Segments.from_lengths([65])),
        "`segments`: 65 query rows and 65 key rows. At most 64 of each make readable text. Draw a few segments alone.",
    ),
    (
        lambda: jax.jit(lambda s: len(draw(s)))(Segments.from_lengths([1])),
        "`segments`: traced offsets. Only concrete ones can be drawn. Draw outside of jit and vmap.",
    ),
]


@pytest.mark.parametrize(("make", "line"), SEGMENTS)
def test_segments(make, line: str) -> None:
    assert told(make) == [line]


TOKENS = np.ones((2, 3), np.float32)
TWO_THREE = np.ones((2, 3), bool)
PACKING = [
    (
        lambda: pack([]),
        "`sequences`: none. Their structure, dtypes and shapes are those of the result. Pass at least one.",
    ),
    (
        lambda: pack([[1, 2]]),
        "`sequences[0]`: a leaf 1. Every leaf is an array with tokens on the first axis. Use numpy.asarray or reshape.",
    ),
    (
        lambda: pack([TOKENS, TOKENS.astype(np.float16)]),
        "`sequences[1]`: float16[L, 3] after float32[L, 3]. All have one structure, and each leaf one dtype and shape but "
        "for its length. Convert them first.",
    ),
    (
        lambda: pack([{"a": TOKENS, "b": TOKENS[:1]}]),
        "`sequences[0]`: leaves of 2 and 1 tokens. All leaves share the token axis. Pass one length.",
    ),
    (lambda: pack([TOKENS], total=1), "`total`: 1 rows for 2 tokens. Nothing is dropped. Use total=2 or more."),
    (
        lambda: unpack(TOKENS, Segments.from_lengths([3])),
        "`packed`: 2 rows for offsets up to 3. The query segments lie in its rows. Pass the segments of this batch.",
    ),
    (
        lambda: jax.jit(unpack)(TOKENS, Segments.from_lengths([2])),
        "`segments`: traced offsets. The lengths of the results are shapes. Unpack outside of jit, or use unpack_padded.",
    ),
    (
        lambda: pack_padded(TOKENS, TWO_THREE.astype(int)),
        "`mask`: int64[2, 3]. It is a bool array [B, L], True for a token. Use mask.astype(bool).",
    ),
    (
        lambda: pack_padded(TOKENS, TWO_THREE[:1]),
        "`mask`: shape (1, 3) for a batch of (2, 3). It has an entry for every slot of the batch. Pass the mask of this "
        "batch.",
    ),
    (
        lambda: jax.jit(pack_padded)(TOKENS, TWO_THREE),
        "`total`: None with a traced mask. The rows of the result are a shape. Pass a number of rows; 6 hold any mask of "
        "this batch.",
    ),
    (
        lambda: pack_padded(TOKENS, TWO_THREE, total=5),
        "`total`: 5 rows for 6 tokens. Nothing is dropped. Use total=6 or more.",
    ),
    (
        lambda: unpack_padded(TOKENS, TWO_THREE),
        "`mask`: 6 tokens for the 2 rows of `packed`. Every token has a row. Pass the mask that the batch was packed with.",
    ),
    (
        lambda: unpack_padded(np.ones(6, np.uint8), TWO_THREE, fill=-100),
        "`fill`: -100 for uint8. Every leaf must be able to hold it. Unpack the leaves apart.",
    ),
]


@pytest.mark.parametrize(("call", "line"), PACKING)
def test_packing(call, line: str) -> None:
    assert told(call) == [line]


Q = jnp.ones((4, 6, 8))
K = jnp.ones((4, 4, 8))
FOUR = Segments.from_lengths([4])
REFERENCE = {
    "rank": (
        lambda: reference_attention(Q[0], Q, Q, FOUR),
        "`q`: shape (6, 8). Packed attention takes three axes, [tokens, heads, width], with no batch axis. Lay the "
        "sequences end to end on the first axis.",
    ),
    "dtypes": (
        lambda: reference_attention(Q, Q.astype(jnp.float16), Q, FOUR),
        "`q`, `k`, `v`: dtypes float32, float16, float32. They share one dtype. Cast with .astype.",
    ),
    "integer": (
        lambda: reference_attention(*(Q.astype(int),) * 3, FOUR),
        "`q`, `k`, `v`: dtype int32. Supported are float16, bfloat16, float32, float64. Cast with .astype.",
    ),
    "heads": (
        lambda: reference_attention(Q, K, K, FOUR),
        "`q`: 6 query heads over 4 key/value heads leaves 2 over. Query heads must be a whole multiple of key/value "
        "heads. Use 4 or 8 query heads.",
    ),
    "scale": (
        lambda: jax.jit(lambda s: reference_attention(Q, Q, Q, FOUR, softmax_scale=s))(0.5),
        "`softmax_scale`: a traced value. It must be a Python or numpy number, known when the program is traced. "
        "Multiply q by it instead.",
    ),
    "softcap": (
        lambda: reference_attention(Q, Q, Q, FOUR, softcap=0.0),
        "`softcap`: 0.0. It must be greater than 0. Use None for no cap.",
    ),
    "window": (
        lambda: reference_attention(Q, Q, Q, FOUR, window_size=(-2, 0)),
        "`window_size`: (-2, 0). It must be None or (left, right), each an int >= 0, or None or -1 for unlimited. Use "
        "(4, 0) for the key itself and four before it.",
    ),
    "sinks": (
        lambda: reference_attention(Q, Q, Q, FOUR, sinks=jnp.ones(4)),
        "`sinks`: shape (4,), dtype float32. It must be floating, one logit per query head: (6,). Reshape.",
    ),
    "segments": (
        lambda: reference_attention(Q, Q, Q, [0, 4]),
        "`segments`: [0, 4]. It must be Segments. Use Segments.from_cu_seqlens(cu_seqlens).",
    ),
    "past the end": (
        lambda: jax.jit(lambda q: reference_attention(q, q, q, Segments.from_lengths([5])))(Q),
        "`cu_seqlens_q`: the last offset is 5, past the 4 rows of `q`. Offsets count rows and end at or before the last "
        "one. Pass the offsets of this batch.",
    ),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference(name: str) -> None:
    call, line = REFERENCE[name]
    assert told(call)[0] == line


def test_no_npu_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu import device

    monkeypatch.setattr(device, "is_available", lambda: False)
    assert told(device.require, RuntimeError) == [
        "No NPU: torch_npu gives none, and the simulator is not running. Attention on the NPU needs one. Install torch_npu "
        "on an Ascend machine, or simulate: set JAXATTN_NPU=sim, or call npu.simulator.enable()."
    ]


@pytest.mark.parametrize("device", [4, -1, "npu:9", "cpu", "cuda:0", True, 1.5, "nonsense"])
def test_a_device_that_is_not_there(device) -> None:
    x = jnp.ones((4, 1, 64), jnp.float16)
    line = f'`device`: {device!r}. It must be an int or "npu:i" with i from 0 to 3.'
    assert told(lambda: npu_packed_attention(x, x, x, FOUR, device=device)) == [line]
