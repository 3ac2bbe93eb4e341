"""Flax modules on packed attention: a module of ours, and hooks for those that Flax has."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from interop import npu_packed_attention
from jaxattn import Segments, packed_attention, reference_attention
from jaxattn.nn import PackedMultiHeadAttention, attention_fn

T, F = 12, 32
LENGTHS = [3, 5, 2]
SEGMENTS = Segments.from_lengths(LENGTHS)


def tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def close(got, want, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=atol)


def module(attention=npu_packed_attention, **options) -> PackedMultiHeadAttention:
    """On the simulated NPU, which compiles nothing for a call."""
    return PackedMultiHeadAttention(4, F, num_kv_heads=2, attention=attention, rngs=nnx.Rngs(0), **options)


OPTIONS = [
    {},
    {"causal": True, "rotary_base": 1e4},
    {"causal": True, "rotary_base": 1e4, "normalize_qk": True, "use_bias": True, "head_dim": 6, "out_features": 5},
    {"window_size": (2, 1), "rotary_base": 10.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packing_equals_separate_calls(options: dict) -> None:
    layer = module(**options)
    x = tokens(T, F)
    packed = layer(x, SEGMENTS)
    start = 0
    for n in LENGTHS:
        alone = layer(x[start : start + n], Segments.from_lengths([n]))
        close(packed[start : start + n], alone)
        start += n
    bias = layer.out.bias[...] if options.get("use_bias") else 0
    close(packed[start:], jnp.zeros_like(packed[start:]) + bias)


def test_equals_the_module_of_flax_with_the_same_weights() -> None:
    ours = PackedMultiHeadAttention(4, F, num_kv_heads=2, use_bias=True, causal=True, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(4, F, num_kv_heads=2, decode=False, rngs=nnx.Rngs(1))
    for name in ("query", "key", "value", "out"):
        getattr(theirs, name).kernel[...] = getattr(ours, name).kernel[...]
    x = tokens(6, F)
    close(ours(x, Segments.from_lengths([6])), theirs(x, mask=nnx.make_causal_mask(jnp.ones(6))))


def test_cross_attention_takes_its_context_and_aligns_the_ends() -> None:
    layer = PackedMultiHeadAttention(
        2, F, in_kv_features=7, causal=True, rotary_base=100.0, attention=npu_packed_attention, rngs=nnx.Rngs(0)
    )
    x, context = tokens(3, F), tokens(9, 7)
    segments = Segments.from_lengths([1, 2], [4, 5])
    got = layer(x, segments, context=context)
    close(got[:1], layer(x[:1], Segments.from_lengths([1], [4]), context=context[:4]))
    # A query that is the last of its segment is where its key is: decoding with a cache equals the whole sequence.
    self_layer = module(causal=True, rotary_base=100.0)
    x = tokens(5, F)
    whole = self_layer(x, Segments.from_lengths([5]))
    close(self_layer(x[3:], Segments.from_lengths([2], [5]), context=x), whole[3:])


def test_rotary_positions_depend_on_distance_only() -> None:
    layer = module(rotary_base=50.0, causal=True)
    x = tokens(4, F)
    doubled = layer(jnp.concatenate([x, x]), Segments.from_lengths([4, 4]))
    close(doubled[4:], doubled[:4])
    once = module(causal=True)(x, Segments.from_lengths([4]))
    assert not np.allclose(doubled[:4], once, atol=1e-3)


@pytest.mark.parametrize("traced", [False, True], ids=["concrete", "traced"])
def test_the_attention_function_is_an_argument(traced: bool) -> None:
    x = tokens(T, F)
    outs = []
    for attention in (reference_attention, npu_packed_attention):
        layer = module(causal=True, rotary_base=1e4, normalize_qk=True, attention=attention)
        run = nnx.jit(lambda layer, x, segments: layer(x, segments)) if traced else lambda layer, *a: layer(*a)
        outs.append(run(layer, x, SEGMENTS))
    close(*outs)


HOOKED = [
    lambda hook: nnx.MultiHeadAttention(4, F, num_kv_heads=2, attention_fn=hook, decode=False, rngs=nnx.Rngs(0)),
    lambda hook: partial(
        linen.MultiHeadDotProductAttention(4, attention_fn=hook).apply,
        linen.MultiHeadDotProductAttention(4).init(jax.random.key(0), jnp.ones((3, F)), jnp.ones((3, F))),
    ),
]
FLAX = {"nnx": HOOKED[0], "linen": HOOKED[1]}
DENSE = {"nnx": nnx.dot_product_attention, "linen": linen.dot_product_attention}


def segment_mask(*, causal: bool = False) -> np.ndarray:
    ids = np.repeat([0, 1, 2], LENGTHS)
    mask = ids[:, None] == ids
    return (np.tril(mask) if causal else mask)[None]


@pytest.mark.parametrize("flavour", FLAX)
@pytest.mark.parametrize("causal", [False, True])
def test_modules_of_flax_take_packed_input(flavour: str, causal: bool) -> None:
    x = tokens(sum(LENGTHS), F)
    mask = segment_mask(causal=causal)
    want = FLAX[flavour](DENSE[flavour])(x, x, mask=mask)
    layer = FLAX[flavour](attention_fn(segments=SEGMENTS, causal=causal, attention=reference_attention))
    close(layer(x, x), want)
    close(layer(x, x, mask=mask), want)


ATTENTION = {False: npu_packed_attention, True: packed_attention}


@pytest.mark.parametrize("flavour", FLAX)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_modules_of_flax_take_padded_input(flavour: str, jit: bool) -> None:
    x = tokens(3, 6, F)
    mask = np.arange(6) < np.array(LENGTHS)[:, None]
    full = (mask[:, :, None] & mask[:, None] & np.tri(6, dtype=bool))[:, None]
    want = FLAX[flavour](DENSE[flavour])(x, x, mask=full)

    def run(x, lengths, mask):
        return FLAX[flavour](attention_fn(lengths=lengths, causal=True, attention=ATTENTION[jit]))(x, x, mask=mask)

    got = jax.jit(lambda x, n: run(x, n, None))(x, jnp.array(LENGTHS)) if jit else run(x, LENGTHS, full)
    close(got[mask], want[mask])
    assert np.isfinite(got).all()


def test_a_mask_of_keys_alone_says_the_same_wherever_there_is_a_query() -> None:
    x = tokens(3, 6, F)
    mask = np.arange(6) < np.array(LENGTHS)[:, None]
    layer = nnx_layer(attention_fn(lengths=LENGTHS, attention=npu_packed_attention))
    close(layer(x, mask=mask[:, None, None]), layer(x))


def test_padded_queries_and_keys_of_different_lengths_run_on_the_npu() -> None:
    x, context = tokens(2, 3, F), tokens(2, 5, F, seed=1)
    lengths = (np.array([3, 1]), np.array([2, 5]))
    outs = [
        FLAX["nnx"](attention_fn(lengths=lengths, attention=attention))(x, context)
        for attention in (reference_attention, npu_packed_attention)
    ]
    close(*outs)


def test_traced_lengths_that_do_not_fit_give_nan() -> None:
    @jax.jit
    def run(x, lengths):
        return FLAX["nnx"](attention_fn(lengths=lengths))(x, x)

    for lengths in ([7, 0, 0], [1, -1, 1]):
        assert np.isnan(run(tokens(3, 6, F), jnp.array(lengths))).any()


def test_the_hook_declares_what_linen_would_leave_out() -> None:
    from flax.linen import attention

    declared = inspect.signature(attention_fn(segments=SEGMENTS)).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in declared.values())
    wanted = set(inspect.signature(attention.dot_product_attention).parameters) - {"einsum_dot_general"}
    assert wanted <= set(declared)
    assert set(inspect.signature(nnx.dot_product_attention).parameters) - {"promote_dtype"} <= set(declared)


def told(call, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value).splitlines()[0]


X = jnp.ones((10, F))
PADDED = jnp.ones((3, 6, F))


def nnx_layer(hook, **options) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(4, F, attention_fn=hook, decode=False, rngs=nnx.Rngs(0), **options)


PACKED = attention_fn(segments=SEGMENTS)
TRACED_MASK = (
    "`mask`: a traced value, or one beside traced lengths. It cannot be compared with the segments. Pass the segments to "
    "the hook, jaxattn.nn.attention_fn(segments=...), and mask=None to the module."
)
MESSAGES = {
    "both": (
        lambda: attention_fn(segments=SEGMENTS, lengths=[3]),
        "`segments`, `lengths`: both given. The input is packed or padded. Pass segments for [T, features], lengths for "
        "[B, L, features].",
    ),
    "neither": (
        lambda: attention_fn(causal=True),
        "`segments`, `lengths`: neither given. The input is packed or padded. Pass segments for [T, features], lengths "
        "for [B, L, features].",
    ),
    "padded input for segments": (
        lambda: nnx_layer(PACKED)(PADDED),
        "`segments`: given, and the module's queries have shape (3, 6, 4, 8). With segments the module takes [T, features]. "
        "Use attention_fn(lengths=...) for the other.",
    ),
    "packed input for lengths": (
        lambda: nnx_layer(attention_fn(lengths=LENGTHS))(X),
        "`lengths`: given, and the module's queries have shape (10, 4, 8). With lengths the module takes [B, L, features]. "
        "Use attention_fn(segments=...) for the other.",
    ),
    "dropout": (
        lambda: nnx_layer(PACKED, dropout_rate=0.1)(X, deterministic=False, rngs=nnx.Rngs(dropout=0)),
        "`deterministic`: False with a dropout rate above 0. Packed attention has no weights to drop. Use "
        "deterministic=True, or dropout_rate=0 and dropout after the module.",
    ),
    "sown weights": (
        lambda: nnx_layer(PACKED)(X, sow_weights=True),
        "`sow_weights`: True. Packed attention never makes the matrix of weights. Use sow_weights=False.",
    ),
    "bias": (
        lambda: PACKED(*(jnp.ones((10, 2, 8)),) * 3, jnp.ones((10, 10))),
        "`bias`: an array. Packed attention adds no bias to its scores. Use bias=None.",
    ),
    "einsum": (
        lambda: PACKED(*(jnp.ones((10, 2, 8)),) * 3, qk_attn_weights_einsum=jnp.einsum),
        "`qk_attn_weights_einsum_cls`: a class. Packed attention calls no einsum of others. Use None.",
    ),
    "another mask": (
        lambda: nnx_layer(PACKED)(X, mask=segment_mask(causal=True)),
        "`mask`: differs from the segments in 14 places, first at head 0, query 0, key 1. Segments, causal and window_size "
        "say what is visible. Use mask=None, or segments that say the same.",
    ),
    "another mask of a padded batch": (
        lambda: nnx_layer(attention_fn(lengths=LENGTHS))(PADDED, mask=np.ones((3, 1, 6, 6), bool)),
        "`mask`: differs from the segments in 22 places, first at row 0, head 0, query 0, key 3. Segments, causal and "
        "window_size say what is visible. Use mask=None, or segments that say the same.",
    ),
    "a mask of another shape": (
        lambda: nnx_layer(PACKED)(X, mask=np.ones((1, 9, 9), bool)),
        "`mask`: shape (1, 9, 9). It must broadcast to ('heads', 10, 10). Use mask=None: the segments say all of it.",
    ),
    "a traced mask": (lambda: jax.jit(lambda m: nnx_layer(PACKED)(X, mask=m))(segment_mask()), TRACED_MASK),
    "a mask beside traced lengths": (
        lambda: jax.jit(lambda n: nnx_layer(attention_fn(lengths=n))(PADDED, mask=np.ones((3, 1, 6, 6), bool)))(
            jnp.array(LENGTHS)
        ),
        TRACED_MASK,
    ),
    "is_causal on different lengths": (
        lambda: nnx_layer(attention_fn(segments=Segments.from_lengths([3], [10])))(X[:3], X, is_causal=True),
        "`is_causal`: True for queries and keys of different lengths. Flax lines up the first query with the first key, "
        "segments the last with the last. Use attention_fn(causal=True) and is_causal=False.",
    ),
    "lengths of another batch": (
        lambda: nnx_layer(attention_fn(lengths=[1, 2]))(PADDED),
        "`lengths`: int64[2] for 3 rows of queries. Each row has one. Pass 3 integers, or a pair of such for queries and "
        "keys.",
    ),
    "lengths past the slots": (
        lambda: nnx_layer(attention_fn(lengths=[1, 7, 0]))(PADDED),
        "`lengths`: 7 for queries of 6 slots. A length counts tokens. Pass 0 to 6.",
    ),
    "rank": (
        lambda: module()(PADDED, SEGMENTS),
        "`x`: shape (3, 6, 32). It must be [tokens, 32], with no batch axis. Lay the sequences end to end, as jaxattn.pack "
        "does.",
    ),
    "heads": (
        lambda: PackedMultiHeadAttention(6, F, num_kv_heads=4, rngs=nnx.Rngs(0)),
        "`num_kv_heads`: 4 for 6 query heads. Query heads must be a whole multiple of key/value heads. Use a divisor of 6.",
    ),
    "width": (
        lambda: PackedMultiHeadAttention(5, F, rngs=nnx.Rngs(0)),
        "`in_features`: 32 over 5 heads leaves 2 over. Heads share the width evenly. Use a multiple of the heads, or pass "
        "head_dim.",
    ),
    "odd rotary": (
        lambda: module(head_dim=7, rotary_base=1e4),
        "`head_dim`: 7. Rotary positions turn pairs. Use an even width.",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call, line = MESSAGES[name]
    assert told(call) == line


def test_is_causal_is_used() -> None:
    x = tokens(10, F)
    hook, causal = (
        attention_fn(segments=SEGMENTS, causal=causal, attention=npu_packed_attention) for causal in (False, True)
    )
    close(nnx_layer(hook)(x, is_causal=True), nnx_layer(causal)(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_of_the_module_is_used(dtype) -> None:
    seen = []

    def attention(q, k, v, segments, **options):
        seen.extend(x.dtype for x in (q, k, v))
        return reference_attention(q, k, v, segments, **options)

    assert nnx_layer(attention_fn(segments=SEGMENTS, attention=attention), dtype=dtype)(X).dtype == dtype
    assert seen == [dtype] * 3
