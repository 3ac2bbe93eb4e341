"""Packed attention in Flax: a module of its own, and `attention_fn` for the modules that Flax has."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import rnglib
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn.blocked import packed_attention
from jaxattn.hooks import Attention, Window, attention_fn
from jaxattn.segments import Segments

__all__ = ["PackedMultiHeadAttention", "attention_fn"]


class PackedMultiHeadAttention(nnx.Module):
    """Multi-head attention over a packed batch: `[T, features]` and its segments to `[T, features]`.

    Projects to `num_heads` query heads and `num_kv_heads` key/value heads of width `head_dim`, optionally normalises
    queries and keys per head (RMS norm), optionally turns them by their rotary positions, attends inside each segment,
    and projects back. A row that sees no key comes out as the bias of the last projection, or 0.

    Rotary positions restart with every segment: key j has position j, and a query has the position of the key that it
    lines up with, so that distances are those that `causal` and `window_size` count.

    Args:
        num_heads: query heads.
        in_features: width of the input.
        num_kv_heads: key/value heads, a divisor of `num_heads`; None means as many.
        head_dim: None means `in_features // num_heads`.
        in_kv_features: width of the context in cross attention; None means `in_features`.
        out_features: None means `in_features`.
        use_bias: whether the four projections add a bias.
        rotary_base: the base of the rotary frequencies, 10000.0 for example; None means no rotary positions.
        normalize_qk: whether queries and keys are normalised.
        causal, window_size: as in `attention`.
        attention: the attention function.
        dtype: what the projections and attention compute in; None means the dtype of the input and parameters.
        param_dtype: the dtype of the parameters.
        rngs: for their initial values.

    Raises:
        ValueError: head counts or widths that do not fit.

    >>> layer = PackedMultiHeadAttention(4, 16, num_kv_heads=2, rotary_base=1e4, causal=True, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((5, 16)), Segments.from_lengths([2, 3])).shape
    (5, 16)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        in_kv_features: int | None = None,
        out_features: int | None = None,
        use_bias: bool = False,
        rotary_base: float | None = None,
        normalize_qk: bool = False,
        causal: bool = False,
        window_size: Window = None,
        attention: Attention = packed_attention,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: rnglib.Rngs,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"`num_kv_heads`: {num_kv_heads} for {num_heads} query heads. Query heads must be a whole multiple of "
                f"key/value heads. Use a divisor of {num_heads}."
            )
        if head_dim is None and in_features % num_heads:
            raise ValueError(
                f"`in_features`: {in_features} over {num_heads} heads leaves {in_features % num_heads} over. Heads share "
                f"the width evenly. Use a multiple of the heads, or pass head_dim."
            )
        head_dim = in_features // num_heads if head_dim is None else head_dim
        if rotary_base is not None and head_dim % 2:
            raise ValueError(f"`head_dim`: {head_dim}. Rotary positions turn pairs. Use an even width.")

        def project(features: int, heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                features, (heads, head_dim), use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        kv_features = in_features if in_kv_features is None else in_kv_features
        self.query = project(in_features, num_heads)
        self.key = project(kv_features, num_kv_heads)
        self.value = project(kv_features, num_kv_heads)
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim), in_features if out_features is None else out_features, axis=(-2, -1),
            use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip

        def norm() -> nnx.RMSNorm | None:
            rms: nnx.RMSNorm = nnx.RMSNorm(head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            return rms if normalize_qk else nnx.data(None)

        self.query_norm, self.key_norm = norm(), norm()
        self.rotary_base = rotary_base
        self.causal = causal
        self.window_size = window_size
        self.attention = attention

    def __call__(
        self, x: Float[Array, "T F"], segments: Segments, *, context: Float[Array, "Tk G"] | None = None
    ) -> Float[Array, "T H"]:
        """The attended rows `[T, out_features]`.

        Args:
            x: `[T, in_features]`.
            segments: which rows belong together; in cross attention, of x on the query side and of the context on the
                key side.
            context: `[Tk, in_kv_features]`, what keys and values are made of; None means x.

        Raises:
            ValueError: rank or width that do not fit, and what the attention function refuses.
        """
        context = x if context is None else context
        problems = [
            f"`{name}`: shape {tuple(array.shape)}. It must be [tokens, {layer.in_features[0]}], with no batch axis. Lay "
            f"the sequences end to end, as jaxattn.pack does."
            for name, array, layer in (("x", x, self.query), ("context", context, self.key))
            if array.ndim != 2 or array.shape[1] != layer.in_features[0]
        ]
        if problems:
            raise ValueError("\n".join(problems[:1] if context is x else problems))
        q, k, v = self.query(x), self.key(context), self.value(context)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary_base is not None:
            q = _rotate(q, _partner_positions(segments, q.shape[0]), self.rotary_base)
            k = _rotate(k, segments.k_positions(k.shape[0]), self.rotary_base)
        attended = self.attention(q, k, v, segments, causal=self.causal, window_size=self.window_size)
        out: Array = self.out(attended)
        return out


def _partner_positions(segments: Segments, Tq: int) -> Int32[Array, " Tq"]:
    """The position of the key that each query lines up with: `i + Lk - Lq`; anything in the tail."""
    shift = jnp.append(jnp.asarray(segments.k_lengths) - jnp.asarray(segments.q_lengths), 0)
    return jnp.asarray(segments.q_positions(Tq)) + shift[jnp.asarray(segments.q_ids(Tq))]


def _rotate(x: Float[Array, "T H D"], positions: Int32[np.ndarray | Array, " T"], base: float) -> Float[Array, "T H D"]:
    """Each pair `(x[i], x[i + D / 2])`, turned by `position * base ** (-2 i / D)`; in float32, rounded once."""
    half = x.shape[-1] // 2
    angle = jnp.asarray(positions, jnp.float32)[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
