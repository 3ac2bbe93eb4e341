"""The sentence encoder run packed with a given attention, held against the ordinary padded run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from interop.encoder import Attention, Encoder
from interop.pretrained import PackedTokens, load_encoder, tokenize
from interop.sentences import SENTENCES
from jaxattn.reference import reference_attention
from jaxattn.segments import Segments

# The smallest cosine between an embedding and its padded float32 twin. The loss 1 - cosine is half the square of the
# relative error. Packed and padded float32 do the same sums in another order: on a CPU the loss is 6e-13. Of the
# built-in sentences the worst has a cosine of 0.24 when segments are ignored, 0.73 with one key too many, 0.65 with a
# causal mask, 0.97 with a window of 128, 0.79 with positions that start at 1, 0.998 with a scale that is 5 % off.
MIN_COSINE_FLOAT32 = 0.9999
# q, k and v rounded to 11 bits (float16) lose 5e-8, to 8 bits (bfloat16) 3e-6. This bound fails all of the faults
# above, and leaves a kernel that also rounds its probabilities ten times the error of bfloat16.
MIN_COSINE_HALF = 0.999

Values = np.ndarray | Array

_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Neighbour:
    """A sentence, the sentence nearest to it, and the cosine of their embeddings."""

    sentence: str
    nearest: str
    cosine: float


@dataclass(frozen=True)
class EncoderComparison:
    """What came out of one comparison.

    `sentences` and `tokens` count what was embedded, `padded_slots` the token slots of the padded batch (sentences
    times the longest). `cosine_reference` is the smallest cosine between packed reference attention in float32 and
    the padded run in float32; `cosine_given` the same for the given attention on q, k, v in `attention_dtype`.
    `neighbours` holds the nearest neighbour of every sentence under the given attention, in the order of the sentences;
    `nearest_kept` counts those that are also nearest in the padded run.
    """

    sentences: int
    tokens: int
    padded_slots: int
    attention_dtype: str
    cosine_reference: float
    cosine_given: float
    nearest_kept: int
    neighbours: tuple[Neighbour, ...]

    @property
    def slots_saved(self) -> int:
        """The padding that packing leaves out, in token slots."""
        return self.padded_slots - self.tokens

    @property
    def percent_saved(self) -> float:
        """`slots_saved` in percent of the slots of the padded batch."""
        return 100 * self.slots_saved / self.padded_slots

    @property
    def min_cosine_given(self) -> float:
        """What `cosine_given` has to reach: `MIN_COSINE_FLOAT32` or `MIN_COSINE_HALF`."""
        return MIN_COSINE_FLOAT32 if self.attention_dtype == "float32" else MIN_COSINE_HALF

    def closest(self, count: int) -> tuple[Neighbour, ...]:
        """The `count` pairs of neighbours with the largest cosines, largest first, each pair once."""
        pairs = {frozenset((each.sentence, each.nearest)): each for each in reversed(self.neighbours)}
        return tuple(sorted(pairs.values(), key=lambda each: -each.cosine)[:count])

    @property
    def passed(self) -> bool:
        """True when both cosines reach their thresholds; a NaN never does."""
        return self.cosine_reference >= MIN_COSINE_FLOAT32 and self.cosine_given >= self.min_cosine_given


def compare_encoders(
    attention: Attention,
    *,
    attention_dtype: DTypeLike = jnp.float16,
    sentences: Sequence[str] = SENTENCES,
    encoder: Encoder | None = None,
) -> EncoderComparison:
    """The embeddings of real sentences by a given attention function, compared with the padded run.

    Three runs of one encoder, each compiled once: padded in float32, packed with `reference_attention` in float32,
    packed with `attention` on q, k, v in `attention_dtype`.

    Args:
        attention: a function of the common signature, called inside jit as `attention(q, k, v, segments)` with
            q, k, v `[T, 12, 32]` in `attention_dtype`, T about 1600 for the built-in sentences.
        attention_dtype: float16, bfloat16 or float32.
        sentences: at least two; none longer than the model takes.
        encoder: the encoder; None loads the pretrained one.

    Raises:
        ModuleNotFoundError: the model's package is not installed.
        ValueError: fewer than two sentences, one that is too long, or another dtype.
    """
    dtype = jnp.dtype(attention_dtype).name
    if dtype not in _DTYPES:
        raise ValueError(f"`attention_dtype`: {dtype}. Supported are {', '.join(_DTYPES)}. Use one of these.")
    if len(sentences) < 2:
        raise ValueError(
            f"`sentences`: {len(sentences)}. A nearest neighbour needs another sentence. Pass two or more."
        )
    encoder = load_encoder() if encoder is None else encoder
    batch = tokenize(sentences)
    ids, mask = batch.padded()

    padded = _float64(_run_padded(encoder, ids, mask))
    reference = _float64(_run_reference(encoder, batch))
    given = _float64(_packed(attention, dtype)(encoder, batch))

    nearest, cosines = _nearest(given)
    return EncoderComparison(
        sentences=len(sentences),
        tokens=batch.ids.size,
        padded_slots=mask.size,
        attention_dtype=dtype,
        cosine_reference=_min_cosine(reference, padded),
        cosine_given=_min_cosine(given, padded),
        nearest_kept=int(np.sum(nearest == _nearest(padded)[0])),
        neighbours=tuple(
            Neighbour(sentence, sentences[near], float(cosine))
            for sentence, near, cosine in zip(sentences, nearest, cosines, strict=True)
        ),
    )


@nnx.jit
def _run_padded(encoder: Encoder, ids: Values, mask: Values) -> Array:
    return encoder.embed_padded(ids, mask)


def _packed(attention: Attention, dtype: str) -> Callable[[Encoder, PackedTokens], Array]:
    """The packed run with this attention, compiled at its first call for each shape."""

    @nnx.jit
    def run(encoder: Encoder, ids: Values, positions: Values, segments: Segments) -> Array:
        return encoder(ids, positions, segments, attention=attention, attention_dtype=dtype)

    return lambda encoder, batch: run(encoder, batch.ids, batch.positions, batch.segments)


_run_reference = _packed(reference_attention, "float32")


def _float64(embeddings: Array) -> Float[np.ndarray, "B H"]:
    """In float32 a cosine near 1 would be off by more than the loss that is measured."""
    return np.asarray(embeddings).astype(np.float64)


def _min_cosine(a: Float[np.ndarray, "B H"], b: Float[np.ndarray, "B H"]) -> float:
    """The smallest cosine between row i of `a` and row i of `b`; NaN when a row is NaN or 0."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore"):
        return float(np.min(np.sum(a * b, axis=1) / norms))


def _nearest(embeddings: Float[np.ndarray, "B H"]) -> tuple[np.ndarray, np.ndarray]:
    """For each sentence the index of the other sentence nearest to it, and their cosine."""
    cosines = embeddings @ embeddings.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argmax(cosines, axis=1)
    return nearest, cosines[np.arange(len(cosines)), nearest]
