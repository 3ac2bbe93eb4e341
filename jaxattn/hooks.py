"""Packed attention as the `attention_fn` of the attention modules that Flax has."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxattn.blocked import packed_attention
from jaxattn.mask import dense_mask
from jaxattn.packing import pack_padded, unpack_padded
from jaxattn.segments import Segments
from jaxattn.validation import resolve_options

Attention = Callable[..., Any]
"""A function of the common signature: `packed_attention`, `reference_attention`, the NPU's, or a partial of one."""
Window = tuple[int | None, int | None] | None


def attention_fn(
    *,
    segments: Segments | None = None,
    lengths: Any = None,
    causal: bool = False,
    window_size: Window = None,
    attention: Attention = packed_attention,
) -> Attention:
    """A function for the argument `attention_fn` of `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`.

    With `segments` the module takes packed input `[T, features]`. With `lengths` it takes padded input
    `[B, L, features]`: the function packs the tokens, runs, and unpacks; padding comes out of attention as 0.

    The module's own arguments are used or refused:

    ==================================  ==================================================================================
    `mask`                              concrete: compared with the segments in every row that has one, refused where it
                                        differs. Traced: refused
    `is_causal`                         the same as `causal=True` here; refused for lengths that differ on the two sides,
                                        where Flax aligns the first query with the first key
    `deterministic`, `dropout_rate`     dropout is refused: there are no weights to drop
    `dtype`                             q, k and v are cast to it
    `precision`,                        any: scores, softmax and sums are float32 in full precision
    `force_fp32_for_softmax`
    bias, sown weights, einsum classes  refused
    ==================================  ==================================================================================

    Args:
        segments: of the packed input.
        lengths: tokens of each row of the padded input, integers `[B]`, at its start; a pair for queries and keys that
            differ.
        causal, window_size: as in `attention`.
        attention: the attention function.

    Raises:
        ValueError: not exactly one of `segments` and `lengths`.

    >>> from flax import nnx
    >>> hook = attention_fn(lengths=[2, 3], causal=True)
    >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=hook, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 4, 8))).shape
    (2, 4, 8)
    """
    if (segments is None) == (lengths is None):
        given = "both" if segments is not None else "neither"
        raise ValueError(
            f"`segments`, `lengths`: {given} given. The input is packed or padded. Pass segments for [T, features], "
            f"lengths for [B, L, features]."
        )

    # Every parameter by name: linen leaves out, without a word, what a function does not declare.
    def packed(
        query: Array,
        key: Array,
        value: Array,
        bias: Any = None,
        mask: Any = None,
        *,
        dropout_rng: Any = None,  # noqa: ARG001  whether there is dropout, the next two say
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,  # noqa: ARG001
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,  # noqa: ARG001
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,  # noqa: ARG001
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        _refuse(
            dropout=dropout_rate > 0 and not deterministic,
            bias=bias is not None,
            weights=module is not None,
            einsum=qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None,
        )
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        q, k, v = (x.astype(dtype) for x in (query, key, value))
        options: dict[str, Any] = {"causal": causal or is_causal, "window_size": window_size}
        if segments is not None:
            _check_rank(q, 3, "segments")
            _check_alignment(is_causal, causal, (segments.q_lengths, segments.k_lengths))
            _check_mask(mask, [segments], (q.shape[0],), (k.shape[0],), options)
            out: Array = attention(q, k, v, segments, **options)
            return out
        _check_rank(q, 4, "lengths")
        sides = _sides(lengths, q.shape[:2], k.shape[:2])
        _check_alignment(is_causal, causal, sides)
        rows = [Segments.from_lengths([m], [n]) for m, n in zip(*sides, strict=True)] if _concrete(sides) else []
        _check_mask(mask, rows, q.shape[:2], k.shape[:2], options)
        q_mask, k_mask = (
            (np if _concrete(sides) else jnp).arange(x.shape[1]) < n[:, None]
            for x, n in zip((q, k), sides, strict=True)
        )
        q_total, k_total = (None if _concrete(sides) else x.shape[0] * x.shape[1] for x in (q, k))
        packed_q, _ = pack_padded(q, q_mask, total=q_total)
        (packed_k, packed_v), _ = pack_padded((k, v), k_mask, total=k_total)
        attended = attention(packed_q, packed_k, packed_v, Segments.from_lengths(*sides), **options)
        unpacked: Array = unpack_padded(attended, q_mask)
        return unpacked

    return packed


def _refuse(*, dropout: bool, bias: bool, weights: bool, einsum: bool) -> None:
    problems = []
    if dropout:
        problems.append(
            "`deterministic`: False with a dropout rate above 0. Packed attention has no weights to drop. Use "
            "deterministic=True, or dropout_rate=0 and dropout after the module."
        )
    if bias:
        problems.append("`bias`: an array. Packed attention adds no bias to its scores. Use bias=None.")
    if weights:
        problems.append(
            "`sow_weights`: True. Packed attention never makes the matrix of weights. Use sow_weights=False."
        )
    if einsum:
        problems.append("`qk_attn_weights_einsum_cls`: a class. Packed attention calls no einsum of others. Use None.")
    if problems:
        raise ValueError("\n".join(problems))


def _check_rank(query: Array, rank: int, given: str) -> None:
    if query.ndim != rank:
        takes, other = ("[T, features]", "lengths") if rank == 3 else ("[B, L, features]", "segments")
        raise ValueError(
            f"`{given}`: given, and the module's queries have shape {tuple(query.shape)}. With {given} the module takes "
            f"{takes}. Use attention_fn({other}=...) for the other."
        )


def _check_alignment(is_causal: bool, causal: bool, sides: tuple[Any, Any]) -> None:
    if is_causal and not causal and _concrete(sides) and not np.array_equal(*sides):
        raise ValueError(
            "`is_causal`: True for queries and keys of different lengths. Flax lines up the first query with the first key, "
            "segments the last with the last. Use attention_fn(causal=True) and is_causal=False."
        )


def _concrete(sides: tuple[Any, Any]) -> bool:
    return not any(isinstance(n, Tracer) for n in sides)


def _sides(lengths: Any, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The lengths of queries and keys, `[B]` each. Traced ones that do not fit reach past every row, which gives NaN."""
    pair = lengths if isinstance(lengths, tuple) and len(lengths) == 2 and np.ndim(lengths[0]) == 1 else (lengths,) * 2
    sides, problems = [], []
    for name, side, (B, L) in zip(("queries", "keys"), pair, (q_shape, k_shape), strict=True):
        n: Any = side if isinstance(side, Tracer) else np.asarray(side)
        if n.shape != (B,) or not jnp.issubdtype(n.dtype, jnp.integer):
            problems.append(
                f"`lengths`: {n.dtype}{list(n.shape)} for {B} rows of {name}. Each row has one. Pass {B} integers, or "
                f"a pair of such for queries and keys."
            )
        elif isinstance(n, Tracer):
            n = jnp.where(jnp.any((n < 0) | (n > L)), B * L + 1, n)
        elif n.size and (n.min() < 0 or n.max() > L):
            bad = int(n.min() if n.min() < 0 else n.max())
            problems.append(f"`lengths`: {bad} for {name} of {L} slots. A length counts tokens. Pass 0 to {L}.")
        sides.append(n)
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    return sides[0], sides[1]


def _check_mask(
    mask: Any, rows: list[Segments], q_shape: tuple[int, ...], k_shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Raise unless a mask `[..., heads, Lq, Lk]` says what the segments say, wherever a query belongs to one."""
    if mask is None:
        return
    if isinstance(mask, Tracer) or not rows or not all(s.is_concrete for s in rows):
        raise ValueError(
            "`mask`: a traced value, or one beside traced lengths. It cannot be compared with the segments. Pass the "
            "segments to the hook, jaxattn.nn.attention_fn(segments=...), and mask=None to the module."
        )
    resolved = resolve_options(1, None, options["causal"], options["window_size"], None)
    (Lq, Lk), batch = (q_shape[-1], k_shape[-1]), q_shape[:-1]
    with jax.ensure_compile_time_eval():
        want = np.stack([dense_mask(s, Lq, Lk, left=resolved.left, right=resolved.right) for s in rows])
    ours = np.stack([np.arange(Lq) < int(s.cu_seqlens_q[-1]) for s in rows])
    try:
        given = np.broadcast_to(np.asarray(mask, bool), (*batch, np.shape(mask)[-3], Lq, Lk))
    except (ValueError, IndexError):
        raise ValueError(
            f"`mask`: shape {tuple(np.shape(mask))}. It must broadcast to {(*batch, 'heads', Lq, Lk)}. Use mask=None: the "
            f"segments say all of it."
        ) from None
    differs = (given.reshape(len(rows), -1, Lq, Lk) != want[:, None]) & ours[:, None, :, None]
    if differs.any():
        row, head, i, j = (int(at[0]) for at in np.nonzero(differs))
        place = f"row {row}, " if batch else ""
        raise ValueError(
            f"`mask`: differs from the segments in {int(differs.sum())} places, first at {place}head {head}, query {i}, key "
            f"{j}. Segments, causal and window_size say what is visible. Use mask=None, or segments that say the same."
        )
