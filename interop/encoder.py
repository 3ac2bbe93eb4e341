"""A BERT sentence encoder in Flax nnx that takes its attention as an argument, packed or padded."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import rnglib
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer

from jaxattn.mask import query_ids
from jaxattn.segments import Segments

# What the encoder needs of an attention function: q, k, v `[T, N, D]` and segments to out `[T, N, D]`, every option
# at its default (BERT scales by D ** -0.5 and looks both ways). Any function of the common signature is one.
Attention = Callable[[Array, Array, Array, Segments], Array]
Attend = Callable[[Array, Array, Array], Array]

# Full float32 products on every device, so that two routes differ by their attention and not by a fast matmul.
_PRECISION = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes of an encoder.

    `num_heads` heads of width `hidden_size // num_heads`; `max_positions` is the length of the position table, and
    `max_tokens` the most tokens of one sentence, [CLS] and [SEP] included, that the model was made for.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    num_token_types: int
    layer_norm_eps: float
    max_tokens: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"`hidden_size`: {self.hidden_size} over {self.num_heads} heads leaves "
                f"{self.hidden_size % self.num_heads} over. Heads share the width evenly. Use a multiple of the heads."
            )


class EncoderLayer(nnx.Module):
    """One layer: attention, then a feed-forward network, each added to its input and normalised afterwards.

    Everything but `attend` acts on the last axis alone, so the leading axes may be `[T]` or `[B, L]`.
    """

    def __init__(self, config: EncoderConfig, *, rngs: rnglib.Rngs) -> None:
        H = config.hidden_size
        self.num_heads = config.num_heads
        self.query = _linear(H, H, rngs)
        self.key = _linear(H, H, rngs)
        self.value = _linear(H, H, rngs)
        self.attention_out = _linear(H, H, rngs)
        self.attention_norm = _norm(config, rngs)
        self.expand = _linear(H, config.intermediate_size, rngs)
        self.contract = _linear(config.intermediate_size, H, rngs)
        self.out_norm = _norm(config, rngs)

    def __call__(self, x: Float32[Array, "*rows H"], attend: Attend) -> Float32[Array, "*rows H"]:
        """The next hidden states, `[..., H]`; `attend` takes and returns `[..., N, D]`, N * D = H."""
        heads = (*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = (project(x).reshape(heads) for project in (self.query, self.key, self.value))
        x = self.attention_norm(x + self.attention_out(attend(q, k, v).reshape(x.shape)))
        inner = jax.nn.gelu(self.expand(x), approximate=False)
        out: Array = self.out_norm(x + self.contract(inner))
        return out


class Encoder(nnx.Module):
    """A BERT encoder with mean pooling: one unit vector per sentence.

    Two routes share every weight and every layer. Calling the encoder is the packed one: sentences lie end to end,
    nothing is padded, and attention is whatever function is passed. `embed_padded` is the ordinary one: a rectangle
    of token ids with a mask, and dense masked attention that shares no code with the packed route.
    """

    def __init__(self, config: EncoderConfig, *, rngs: rnglib.Rngs) -> None:
        H = config.hidden_size
        self.config = config
        self.words = nnx.Embed(config.vocab_size, H, rngs=rngs)
        self.positions = nnx.Embed(config.max_positions, H, rngs=rngs)
        self.token_types = nnx.Embed(config.num_token_types, H, rngs=rngs)
        self.norm = _norm(config, rngs)
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(
        self,
        ids: Int32[np.ndarray | Array, " T"],
        positions: Int32[np.ndarray | Array, " T"],
        segments: Segments,
        *,
        attention: Attention,
        attention_dtype: DTypeLike | None = None,
    ) -> Float32[Array, "B H"]:
        """The embeddings of a packed batch of sentences, `[B, H]`, float32, each of length 1.

        A segment without tokens gives 0. Rows past the last offset belong to no sentence and change nothing.

        Args:
            ids: token ids `[T]`, int32.
            positions: the place of each token in its sentence `[T]`, int32, starting again at 0 in every segment.
            segments: which rows are one sentence; the same for queries and keys.
            attention: the attention function. It is called once per layer as `attention(q, k, v, segments)` with
                q, k, v `[T, N, D]` and returns `[T, N, D]`.
            attention_dtype: q, k and v are cast to this dtype right before attention and its result back to float32;
                everything else stays in float32. None means float32 all through.

        Raises:
            ValueError: everything that is wrong with ids, positions and segments, one line each. Values are looked at
                where they are concrete; inside jit an index past a table makes its sentence NaN.
        """
        _check_packed(ids, positions, segments, self.config)
        dtype = jnp.float32 if attention_dtype is None else attention_dtype

        def attend(q: Array, k: Array, v: Array) -> Array:
            out = attention(q.astype(dtype), k.astype(dtype), v.astype(dtype), segments)
            return out.astype(jnp.float32)

        hidden = self._hidden(jnp.asarray(ids), jnp.asarray(positions), attend)
        B = segments.num_segments
        sentence = query_ids(segments, hidden.shape[0])
        sentence = jnp.where(sentence < 0, B, sentence)  # the tail goes to a row of its own, which is cut off
        sums = jax.ops.segment_sum(hidden, sentence, num_segments=B + 1)[:B]
        return _unit_mean(sums, jnp.asarray(segments.q_lengths))

    def embed_padded(
        self, ids: Int32[np.ndarray | Array, "B L"], mask: Bool[np.ndarray | Array, "B L"]
    ) -> Float32[Array, "B H"]:
        """The embeddings of a padded batch, `[B, H]`, float32, each of length 1; 0 for a row that is all padding.

        Args:
            ids: token ids `[B, L]`, int32; what stands in a masked slot does not matter, if it is in the vocabulary.
            mask: True where a slot holds a token `[B, L]`, the tokens of a row at its left.

        Raises:
            ValueError: ids and mask that are not matrices of one shape, or rows longer than the position table.
        """
        if ids.ndim != 2 or ids.shape != mask.shape or ids.shape[1] > self.config.max_positions:
            raise ValueError(
                f"`ids`, `mask`: shapes {ids.shape} and {mask.shape}. Both are [sentences, slots] with at most "
                f"{self.config.max_positions} slots. Pass what PackedTokens.padded() returns."
            )
        mask = jnp.asarray(mask)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        hidden = self._hidden(jnp.asarray(ids), positions, lambda q, k, v: _padded_attention(q, k, v, mask))
        return _unit_mean(jnp.sum(jnp.where(mask[..., None], hidden, 0), axis=1), jnp.sum(mask, axis=1))

    def _hidden(
        self, ids: Int32[Array, "*rows"], positions: Int32[Array, "*rows"], attend: Attend
    ) -> Float32[Array, "*rows H"]:
        """The hidden states after the last layer. Every token is of type 0: the model reads single sentences."""
        x: Array = self.norm(self.words(ids) + self.positions(positions) + self.token_types(jnp.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x, attend)
        return x


def _padded_attention(
    q: Float[Array, "B L N D"], k: Float[Array, "B L N D"], v: Float[Array, "B L N D"], mask: Bool[Array, "B L"]
) -> Float[Array, "B L N D"]:
    """Dense attention over the slots of each row that hold a token.

    Hidden scores get the most negative number and not -inf, so a row without tokens stays finite; its mean is 0.
    """
    scores = jnp.einsum("blnd,bmnd->bnlm", q, k, precision=_PRECISION) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None, :], scores, float(np.finfo(np.float32).min))
    return jnp.einsum("bnlm,bmnd->blnd", jax.nn.softmax(scores, axis=-1), v, precision=_PRECISION)


def _unit_mean(sums: Float32[Array, "B H"], counts: Integer[Array, " B"]) -> Float32[Array, "B H"]:
    """`sums / counts`, scaled to length 1. The floors only act on sums that are 0, and leave them 0."""
    mean = sums / jnp.maximum(counts, 1)[:, None]
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def _linear(inputs: int, outputs: int, rngs: rnglib.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, precision=_PRECISION, rngs=rngs)


def _norm(config: EncoderConfig, rngs: rnglib.Rngs) -> nnx.LayerNorm:
    # The fast variance, E[x^2] - E[x]^2, cancels; an epsilon of 1e-12 would not hide that.
    return nnx.LayerNorm(config.hidden_size, epsilon=config.layer_norm_eps, use_fast_variance=False, rngs=rngs)


def _check_packed(
    ids: np.ndarray | Array, positions: np.ndarray | Array, segments: Segments, config: EncoderConfig
) -> None:
    """Raise for ids and positions that are not two int32 `[T]` inside their tables, or segments that do not fit."""
    found: list[str] = []
    if ids.ndim != 1 or ids.shape != positions.shape:
        found.append(
            f"`ids`, `positions`: shapes {ids.shape} and {positions.shape}. A packed batch has one axis, [tokens]. "
            f"Pass the ids and positions of one PackedTokens, or use embed_padded for [sentences, slots]."
        )
    for name, values, rows in (("ids", ids, config.vocab_size), ("positions", positions, config.max_positions)):
        if not jnp.issubdtype(values.dtype, jnp.integer):
            found.append(f"`{name}`: dtype {values.dtype}. They are indices into a table. Use .astype(int32).")
        elif not isinstance(values, Tracer) and values.size and not 0 <= int(values.min()) <= int(values.max()) < rows:
            found.append(
                f"`{name}`: values from {int(values.min())} to {int(values.max())}. The table has rows 0 to "
                f"{rows - 1}. Use the ids and positions that tokenize gives."
            )
    lines = segments.problems(ids.shape[0], ids.shape[0]) if not found else []
    if not found and not lines and segments.is_concrete and not np.array_equal(segments.q_lengths, segments.k_lengths):
        lines = [
            "`segments`: the key segments differ from the query segments. A sentence attends to its own tokens. "
            "Use Segments.from_lengths with one list of lengths."
        ]
    if found + lines:
        raise ValueError("\n".join(found + lines))
