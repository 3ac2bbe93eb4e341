"""The comparison passes for the right attention, and for no other."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from interop.encoder import Attention, Encoder
from interop.encoder_comparison import (
    MIN_COSINE_FLOAT32,
    MIN_COSINE_HALF,
    EncoderComparison,
    Neighbour,
    compare_encoders,
)
from interop.pretrained import load_encoder
from interop.sentences import PARAPHRASES, SENTENCES
from jaxattn import Segments, reference_attention

PAIRS = [sentence for pair in PARAPHRASES[:6] for sentence in pair]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder()


def test_the_reference_in_float16_passes_on_all_sentences() -> None:
    result = compare_encoders(reference_attention)
    assert result.passed
    assert result.sentences == len(set(SENTENCES)) == 64
    assert (result.tokens, result.padded_slots) == (1603, 64 * 186)
    assert result.slots_saved == 64 * 186 - 1603
    assert 86 < result.percent_saved < 87
    assert result.cosine_reference >= 1 - 1e-11
    assert MIN_COSINE_HALF < result.cosine_given < result.cosine_reference
    assert result.min_cosine_given == MIN_COSINE_HALF
    assert [each.sentence for each in result.neighbours] == list(SENTENCES)
    assert result.nearest_kept == 64
    for each in result.closest(5):
        assert (each.sentence, each.nearest) in PARAPHRASES


def of_one_segment(q: Array, k: Array, v: Array, segments: Segments) -> Array:  # noqa: ARG001 the planted fault
    return reference_attention(q, k, v, Segments.from_lengths([q.shape[0]]))


def with_a_key_of_the_next_sentence(q: Array, k: Array, v: Array, segments: Segments) -> Array:
    cu_seqlens_k = jnp.asarray(segments.cu_seqlens_k).at[1:-1].add(1)
    return reference_attention(q, k, v, Segments.from_cu_seqlens(segments.cu_seqlens_q, cu_seqlens_k))


def looking_back_only(q: Array, k: Array, v: Array, segments: Segments) -> Array:
    return reference_attention(q, k, v, segments, causal=True)


def with_the_scale_ten_percent_off(q: Array, k: Array, v: Array, segments: Segments) -> Array:
    return reference_attention(q, k, v, segments, softmax_scale=1.1 * q.shape[-1] ** -0.5)


def with_one_nan(q: Array, k: Array, v: Array, segments: Segments) -> Array:
    return reference_attention(q, k, v, segments).at[3, 0, 0].set(jnp.nan)


@pytest.mark.parametrize(
    "attention",
    [
        of_one_segment,
        with_a_key_of_the_next_sentence,
        looking_back_only,
        with_the_scale_ten_percent_off,
        with_one_nan,
    ],
)
def test_a_planted_fault_fails(encoder: Encoder, attention: Attention) -> None:
    result = compare_encoders(attention, sentences=PAIRS, encoder=encoder)
    assert result.cosine_reference >= MIN_COSINE_FLOAT32
    assert not result.passed


def test_float32_is_held_to_the_stricter_threshold(encoder: Encoder) -> None:
    result = compare_encoders(reference_attention, attention_dtype=jnp.float32, sentences=PAIRS, encoder=encoder)
    assert result.passed
    assert result.attention_dtype == "float32"
    assert result.min_cosine_given == MIN_COSINE_FLOAT32
    assert result.cosine_given == result.cosine_reference


@pytest.mark.parametrize(
    ("reference", "given", "dtype", "passed"),
    [
        (0.9999, 0.999, "float16", True),
        (0.99989, 0.999, "float16", False),
        (0.9999, 0.9989, "float16", False),
        (0.9999, 0.9989, "bfloat16", False),
        (0.9999, 0.9998, "float32", False),
        (np.nan, 1.0, "float16", False),
        (1.0, np.nan, "float16", False),
    ],
)
def test_both_cosines_decide(reference: float, given: float, dtype: str, passed: bool) -> None:
    assert EncoderComparison(2, 9, 12, dtype, reference, given, 2, ()).passed is passed


def test_the_closest_pairs_come_once_and_in_order() -> None:
    a, b, c = Neighbour("a", "b", 0.5), Neighbour("b", "a", 0.5), Neighbour("c", "a", 0.7)
    result = EncoderComparison(3, 9, 12, "float16", 1.0, 1.0, 3, (a, b, c))
    assert result.closest(5) == (c, a)
    assert result.closest(1) == (c,)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared
        compare_encoders(reference_attention, sentences=["Alone."])
    assert str(caught.value) == ("`sentences`: 1. A nearest neighbour needs another sentence. Pass two or more.")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared
        compare_encoders(reference_attention, attention_dtype=jnp.int8)
    assert str(caught.value) == ("`attention_dtype`: int8. Supported are float16, bfloat16, float32. Use one of these.")
