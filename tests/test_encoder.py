"""The encoder is the real model, packed or padded, whatever the attention function."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jaxtyping import Array, Float
from safetensors.torch import load_file

from interop.encoder import Attention, Encoder, EncoderConfig
from interop.pretrained import PackedTokens, load_encoder, model_folder, tokenize
from interop.sentences import PARAPHRASES, SENTENCES
from jaxattn import Segments, reference_attention

Embeddings = Float[np.ndarray, "B H"]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder()


@pytest.fixture(scope="module")
def batch() -> PackedTokens:
    return tokenize(SENTENCES)


@pytest.fixture(scope="module")
def embeddings(encoder: Encoder, batch: PackedTokens) -> Embeddings:
    return embed(encoder, batch)


def embed(
    encoder: Encoder, batch: PackedTokens, attention: Attention = reference_attention, dtype: str | None = None
) -> Embeddings:
    @nnx.jit
    def run(encoder: Encoder, ids: Array, positions: Array, segments: Segments) -> Array:
        return encoder(ids, positions, segments, attention=attention, attention_dtype=dtype)

    return np.asarray(run(encoder, batch.ids, batch.positions, batch.segments))


def embed_padded(encoder: Encoder, batch: PackedTokens) -> Embeddings:
    ids, mask = batch.padded()
    return np.asarray(nnx.jit(lambda encoder, ids, mask: encoder.embed_padded(ids, mask))(encoder, ids, mask))


def cosines(a: Embeddings, b: Embeddings) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Short matrices: with several threads on a busy machine torch spends its time waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.inference_mode()
def torch_embeddings(batch: PackedTokens, dtype: torch.dtype) -> Embeddings:
    """The same model from torch's own encoder layers, one sentence at a time: no packing, no padding, no mask."""
    weights = {name: w.to(dtype) for name, w in load_file(model_folder() / "model.safetensors").items()}
    layers = [torch_layer(weights, f"encoder.layer.{i}.", dtype) for i in range(6)]
    rows = []
    for ids in np.split(batch.ids, np.asarray(batch.segments.cu_seqlens_q)[1:-1]):
        x = weights["embeddings.word_embeddings.weight"][torch.tensor(ids)]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = x + weights["embeddings.token_type_embeddings.weight"][0]
        norm = (weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"])
        x = torch.nn.functional.layer_norm(x, (384,), *norm, eps=1e-12)[None]
        for layer in layers:
            x = layer(x)
        rows.append(torch.nn.functional.normalize(x[0].mean(dim=0), dim=0))
    return torch.stack(rows).numpy()


def torch_layer(weights: dict[str, torch.Tensor], at: str, dtype: torch.dtype) -> torch.nn.TransformerEncoderLayer:
    layer = torch.nn.TransformerEncoderLayer(
        384, 12, 1536, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True, dtype=dtype
    )
    state = {}
    for kind in ("weight", "bias"):
        qkv = [weights[f"{at}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(qkv)
        state[f"self_attn.out_proj.{kind}"] = weights[f"{at}attention.output.dense.{kind}"]
        state[f"norm1.{kind}"] = weights[f"{at}attention.output.LayerNorm.{kind}"]
        state[f"linear1.{kind}"] = weights[f"{at}intermediate.dense.{kind}"]
        state[f"linear2.{kind}"] = weights[f"{at}output.dense.{kind}"]
        state[f"norm2.{kind}"] = weights[f"{at}output.LayerNorm.{kind}"]
    layer.load_state_dict(state)
    return layer


@pytest.mark.usefixtures("one_torch_thread")
def test_both_routes_are_torchs_transformer_on_the_same_weights(
    encoder: Encoder, batch: PackedTokens, embeddings: Embeddings
) -> None:
    exact = torch_embeddings(batch, torch.float64)
    # Twice what torch itself loses in float32, and one rounding of the result.
    bound = 2 * np.abs(torch_embeddings(batch, torch.float32) - exact).max() + np.finfo(np.float32).eps
    assert np.abs(embeddings - exact).max() <= bound
    assert np.abs(embed_padded(encoder, tokenize(SENTENCES[:28])) - exact[:28]).max() <= bound


def test_embeddings_are_unit_vectors_one_per_sentence(embeddings: Embeddings) -> None:
    assert embeddings.shape == (64, 384)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings.astype(np.float64), axis=1), 1, rtol=1e-6)


def test_paraphrases_are_each_others_nearest_neighbours(embeddings: Embeddings) -> None:
    similar = embeddings @ embeddings.T
    np.fill_diagonal(similar, -1)
    nearest = [SENTENCES[i] for i in similar.argmax(axis=1)]
    for one, other in PARAPHRASES:
        assert nearest[SENTENCES.index(one)] == other
        assert nearest[SENTENCES.index(other)] == one


def test_other_tokens_of_the_same_length_leave_every_other_sentence_bit_identical(
    encoder: Encoder, batch: PackedTokens, embeddings: Embeddings
) -> None:
    ids = batch.ids.copy()
    start, end = batch.segments.cu_seqlens_q[5:7]
    ids[start + 1 : end - 1] = 2000
    changed = embed(encoder, PackedTokens(ids, batch.positions, batch.segments, batch.tokens_cut))
    assert cosines(changed[5:6], embeddings[5:6])[0] < 0.9
    np.testing.assert_array_equal(np.delete(changed, 5, axis=0), np.delete(embeddings, 5, axis=0))


def test_a_sentence_of_another_length_moves_every_other_one_by_rounding_only(
    encoder: Encoder, embeddings: Embeddings
) -> None:
    other = embed(encoder, tokenize([*SENTENCES[:5], "Hedgehogs!", *SENTENCES[6:]]))
    moved = np.abs(np.delete(other, 5, axis=0) - np.delete(embeddings, 5, axis=0)).max()
    # The rows sit elsewhere and the compiler may sum in another order; the same size as between the two routes.
    assert moved <= 1e-6


@pytest.mark.parametrize(("dtype", "least"), [("float16", 0.999999), ("bfloat16", 0.9999)])
def test_attention_sees_the_dtype_asked_for_and_the_rest_stays_float32(
    encoder: Encoder, batch: PackedTokens, embeddings: Embeddings, dtype: str, least: float
) -> None:
    seen = []

    def attention(q: Array, k: Array, v: Array, segments: Segments) -> Array:
        seen.append({x.dtype.name for x in (q, k, v)})
        assert q.shape == k.shape == v.shape == (len(batch.ids), 12, 32)
        return reference_attention(q, k, v, segments)

    rounded = embed(encoder, batch, attention, dtype)
    assert seen == [{dtype}] * 6
    assert rounded.dtype == np.float32
    assert not np.array_equal(rounded, embeddings)
    # Rounding at u moves an embedding by a few u, and the cosine by its square: u is 5e-4 and 4e-3.
    assert cosines(rounded, embeddings).min() >= least


def test_attention_may_be_a_callback_to_the_host(encoder: Encoder) -> None:
    batch = tokenize(["Rain.", "Snow is on its way."])

    def on_host(q: np.ndarray, k: np.ndarray, v: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        out = np.zeros_like(q)
        for a, z in pairwise(offsets):
            weights = np.exp(np.einsum("qnd,knd->nqk", q[a:z], k[a:z]) * q.shape[-1] ** -0.5)
            out[a:z] = np.einsum("nqk,knd->qnd", weights / weights.sum(axis=-1, keepdims=True), v[a:z])
        return out

    def attention(q: Array, k: Array, v: Array, segments: Segments) -> Array:
        def call(*arrays: Array) -> np.ndarray:
            return on_host(*(np.asarray(x) for x in arrays))

        return jax.pure_callback(call, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v, segments.cu_seqlens_q)

    assert cosines(embed(encoder, batch, attention), embed(encoder, batch)).min() >= 1 - 1e-9


@pytest.fixture(scope="module")
def small() -> Encoder:
    return Encoder(EncoderConfig(50, 8, 2, 2, 16, 20, 2, 1e-12, 20), rngs=nnx.Rngs(0))


def rows(*lengths: int) -> PackedTokens:
    """Tokens 1, 2, 3, ... in segments of these lengths."""
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    ids = np.arange(1, len(positions) + 1, dtype=np.int32)
    return PackedTokens(ids, positions, Segments.from_lengths(list(lengths)), (0,) * len(lengths))


def test_an_empty_batch_has_no_embeddings(small: Encoder) -> None:
    batch = tokenize([])
    packed = small(batch.ids, batch.positions, batch.segments, attention=reference_attention)
    assert packed.shape == small.embed_padded(*batch.padded()).shape == (0, 8)


def test_a_segment_without_tokens_is_zero_and_the_tail_belongs_to_no_sentence(small: Encoder) -> None:
    batch = rows(4, 0, 6)
    tail = PackedTokens(np.pad(batch.ids, (0, 3)), np.pad(batch.positions, (0, 3)), batch.segments, batch.tokens_cut)
    out = embed(small, tail)
    np.testing.assert_array_equal(out[1], 0)
    assert cosines(out[[0, 2]], embed(small, rows(4, 6))).min() >= 1 - 1e-11


def test_masked_slots_may_hold_any_token_and_a_row_of_them_is_zero(small: Encoder) -> None:
    batch = rows(4, 0, 6)
    ids, mask = batch.padded()
    plain = np.asarray(small.embed_padded(ids, mask))
    np.testing.assert_array_equal(small.embed_padded(np.where(mask, ids, 49), mask), plain)
    np.testing.assert_array_equal(plain[1], 0)
    assert cosines(plain[[0, 2]], embed(small, batch)[[0, 2]]).min() >= 1 - 1e-11


INTS = np.arange(4, dtype=np.int32)
FOUR = Segments.from_lengths([4])
REFUSED: dict[str, tuple[Callable[[Encoder], object], str]] = {
    "a padded rectangle on the packed route": (
        lambda encoder: encoder(INTS[None], INTS[None], FOUR, attention=reference_attention),
        "`ids`, `positions`: shapes (1, 4) and (1, 4). A packed batch has one axis, [tokens]. Pass the ids and "
        "positions of one PackedTokens, or use embed_padded for [sentences, slots].",
    ),
    "floats and a position past the table": (
        lambda encoder: encoder(INTS * 1.0, INTS + 509, FOUR, attention=reference_attention),
        "`ids`: dtype float64. They are indices into a table. Use .astype(int32).\n"
        "`positions`: values from 509 to 512. The table has rows 0 to 511. Use the ids and positions that tokenize "
        "gives.",
    ),
    "a negative token": (
        lambda encoder: encoder(INTS - 1, INTS, FOUR, attention=reference_attention),
        "`ids`: values from -1 to 2. The table has rows 0 to 30521. Use the ids and positions that tokenize gives.",
    ),
    "other keys than queries": (
        lambda encoder: encoder(INTS, INTS, Segments.from_lengths([4], [3]), attention=reference_attention),
        "`segments`: the key segments differ from the query segments. A sentence attends to its own tokens. Use "
        "Segments.from_lengths with one list of lengths.",
    ),
    "a mask of another shape": (
        lambda encoder: encoder.embed_padded(INTS[None], INTS[None, :3] > 0),
        "`ids`, `mask`: shapes (1, 4) and (1, 3). Both are [sentences, slots] with at most 512 slots. Pass what "
        "PackedTokens.padded() returns.",
    ),
    "heads that do not divide the width": (
        lambda _: EncoderConfig(9, 10, 1, 4, 8, 8, 2, 1e-12, 8),
        "`hidden_size`: 10 over 4 heads leaves 2 over. Heads share the width evenly. Use a multiple of the heads.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_makes_no_sense_is_refused(encoder: Encoder, name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared
        call(encoder)
    assert str(caught.value) == message


def test_segments_past_the_rows_are_refused(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="the last offset is 5, past the 4 rows"):
        encoder(INTS, INTS, Segments.from_lengths([5]), attention=reference_attention)


def test_inside_jit_a_token_past_the_vocabulary_makes_its_sentence_nan_and_no_other(encoder: Encoder) -> None:
    batch = tokenize(["Rain.", "Snow is on its way."])
    ids = np.where(np.arange(len(batch.ids)) == 1, 30522, batch.ids).astype(np.int32)
    out = embed(encoder, PackedTokens(ids, batch.positions, batch.segments, batch.tokens_cut))
    assert np.all(np.isnan(out[0]))
    assert jnp.all(jnp.isfinite(out[1]))
