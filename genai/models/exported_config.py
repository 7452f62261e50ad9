"""The configuration of a decoder that an exporter wrote without genai_config.json.

Optimum and the scripts of transformers.js write graphs, config.json and generation_config.json. The names of inputs and
outputs, the layers and the heads are read from the graph. config.json gives the other values, and must not contradict
the graph. The result has the form of genai_config.json, so there is one configuration for all folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.reading import file_text, json_object
from ..engine.sampling import generation_config
from ..engine.sampling.search_options import SEARCH_OPTIONS, checked
from ..errors import ConfigError, ModelFolderError, OptionError, did_you_mean
from ..onnx.layouts import DecoderVariant, decoder_variants, named_variant

MODEL_CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENIZER = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
_GENAI_CONFIG = "genai_config.json"
_LIMIT = 2**31
_NO_LIMIT = 10**9  # what tokenizers write for "no limit"
# Keys of config.json, in the spellings of the model families.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length")
_INNER = ("text_config", "llm_config", "language_config", "decoder")


@dataclass(frozen=True)
class ExportedModel:
    """A decoder that an exporter wrote without genai_config.json.

    Attributes:
        folder: the model's folder.
        variant: the decoder that is used.
        others: the decoders in other precisions.
        raw: the configuration in the form of genai_config.json.
        sources: dotted keys of `raw`, each with the file that the value comes from.
    """

    folder: Path
    variant: DecoderVariant
    others: Sequence[DecoderVariant] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


def variants_in(folder: Path) -> list[DecoderVariant]:
    """Return the graphs in a folder whose names are those of decoders, the most suitable first."""
    paths = [path for pattern in ("*.onnx", "onnx/*.onnx") for path in folder.glob(pattern) if path.is_file()]
    return decoder_variants(path.relative_to(folder).as_posix() for path in paths)


def find_exported(path: Path) -> tuple[Path, DecoderVariant, list[DecoderVariant]] | None:
    """Return the folder, the decoder and the other decoders of a model without genai_config.json; None if it is none.

    Args:
        path: the model's folder, or the graph of one of its decoders.
    """
    if path.suffix.lower() == ".onnx" and path.is_file():
        parents = [path.parent, *([path.parent.parent] if path.parent.name == "onnx" else [])]
        folder = next((parent for parent in parents if (parent / MODEL_CONFIG).is_file()), None)
        if folder is None or (path.parent / _GENAI_CONFIG).exists():
            return None
        variants = variants_in(folder)
        name = path.relative_to(folder).as_posix()
        chosen = next((one for one in variants if one.decoder == name), None) or DecoderVariant("fp32", name)
        return folder, chosen, [one for one in variants if one != chosen]
    if not (path / MODEL_CONFIG).is_file() or (path / _GENAI_CONFIG).exists():
        return None
    if not (variants := variants_in(path)):
        return None
    return path, _chosen(path, variants), variants[1:]


def is_exported_decoder(folder: Path) -> bool:
    """Return True if a folder without genai_config.json has the graph of a decoder.

    Raises:
        ModelFolderError, GraphError: the graph cannot be read, or there are two.
    """
    # A tokenizer reads the configuration, and does not need the package onnx.
    from ..onnx.reader import read_model
    from .graph_interface import is_decoder

    found = find_exported(folder)
    return found is not None and is_decoder(read_model(folder / found[1].decoder).graph)


def chosen_graph(folder: Path, precision: str) -> Path | None:
    """Return the path of the decoder in a precision, such as "q4"; None if the folder is not the one of an exporter.

    Raises:
        OptionError: no decoder in the folder has this precision.
    """
    if find_exported(folder) is None:
        return None
    variants = variants_in(folder)
    if (chosen := named_variant(variants, precision)) is None:
        names = [one.precision for one in variants]
        raise OptionError(
            f"{folder}: there is no graph in the precision {precision!r:.40}",
            f"the graphs of the model are in {', '.join(names)}, and a graph is not converted",
            did_you_mean(precision, names, "choose one of these precisions"),
        )
    return folder / chosen.decoder


def _chosen(folder: Path, variants: Sequence[DecoderVariant]) -> DecoderVariant:
    """Return the most suitable decoder. Raise ModelFolderError if two have the same precision."""
    first = variants[0]
    same = [one.decoder for one in variants if one.precision == first.precision]
    if len(same) > 1:
        raise ModelFolderError(
            f"{folder}: there are {len(same)} graphs of the same precision: {', '.join(same[:8])}",
            "a model is one decoder, and the names do not tell which of the graphs is meant",
            f"pass the path of one graph, for example {folder / same[0]}",
        )
    return first


def read_exported(folder: Path, variant: DecoderVariant, others: Sequence[DecoderVariant]) -> ExportedModel:
    """Derive the configuration of a decoder from its graph and the JSON files beside it.

    Raises:
        ModelFolderError: a file is missing or unreadable.
        ConfigError: a JSON file is malformed, lacks a value, or contradicts the graph.
        UnsupportedModelError: the graph is not a decoder of text with a cache of keys and values.
    """
    facts = _Facts(folder, variant)
    model = {
        "type": facts.model_type(),
        "vocab_size": facts.size("vocab_size", ("vocab_size",), facts.interface.vocab_size),
        "context_length": facts.context_length(),
        **facts.token_ids(),
        "decoder": facts.decoder(),
        **facts.embedding(),
    }
    return ExportedModel(folder, variant, tuple(others), {"model": model, "search": facts.search()}, facts.sources)


class _Facts:
    """The values of a configuration, each noted with its source."""

    def __init__(self, folder: Path, variant: DecoderVariant) -> None:
        # As in is_exported_decoder.
        from ..onnx.reader import read_model
        from .graph_interface import read_interface

        self.folder, self.variant = folder, variant
        self.sources: dict[str, str] = {}
        outer = self._json(MODEL_CONFIG)
        inner: Mapping[str, Any] = next((outer[name] for name in _INNER if isinstance(outer.get(name), dict)), {})
        self._config = {**outer, **{name: value for name, value in inner.items() if value is not None}}
        self._outer, self._generation = outer, self._json(GENERATION)
        path = folder / variant.decoder
        self.interface = read_interface(read_model(path).graph, path, folder, outer)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        text = file_text(path, ModelFolderError, ConfigError)
        return {} if text is None else json_object(text, path, ConfigError)

    def model_type(self) -> str:
        name = self._outer.get("model_type")
        self.sources["model.type"] = MODEL_CONFIG
        return name if isinstance(name, str) and name else "unknown"

    def size(self, key: str, names: Sequence[str], in_graph: int | None, default: int | None = None) -> int:
        """Return a size. If the graph and config.json both have it, they must agree.

        Args:
            key: key of the value, in the block "model".
            names: keys of config.json, of which the first that is present counts.
            in_graph: the size in the graph; None if the graph leaves it open.
            default: the value if neither has it; None = an error.
        """
        name = next((name for name in names if self._config.get(name) is not None), None)
        said = None if name is None else self._config[name]
        if said is not None and (type(said) is not int or not 0 < said < _LIMIT):
            raise ConfigError(
                f"{self.folder / MODEL_CONFIG}: {name} is {said!r:.80}",
                f"a whole number from 1 to {_LIMIT - 1} is expected",
                "correct the file, or copy it again from the original model",
            )
        if said is not None and in_graph is not None and said != in_graph:
            raise ConfigError(
                f"{self.folder / self.variant.decoder}: the graph has {key} {in_graph}, but {name} is {said} in "
                f"{MODEL_CONFIG}",
                "the graph and the file describe different models",
                f"copy both files again from the same model, or set {name} to {in_graph}",
            )
        self.sources[f"model.{key}"] = self.variant.decoder if in_graph is not None else MODEL_CONFIG
        if (value := said or in_graph or default) is None:
            raise ConfigError(
                f"{self.folder / MODEL_CONFIG}: {names[0]} is missing",
                "the graph does not contain this value, and the engine needs it",
                f"add {names[0]}; the model's original config.json has the value",
            )
        return value

    def context_length(self) -> int:
        """Return the context length, or the limit of the tokenizer for a model that has no limit, such as Falcon."""
        limit = self._json(TOKENIZER_CONFIG).get("model_max_length")
        is_known = any(self._config.get(name) is not None for name in _CONTEXT)
        if not is_known and isinstance(limit, int | float) and 1 <= limit < _NO_LIMIT:
            self.sources["model.context_length"] = TOKENIZER_CONFIG
            return int(limit)
        return self.size("context_length", _CONTEXT, None)

    def decoder(self) -> dict[str, Any]:
        found = self.interface
        heads = self.size("decoder.num_attention_heads", _HEADS, None)
        layers = self._layers()
        kv_heads = self.size("decoder.num_key_value_heads", _KV_HEADS, found.kv_heads, heads)
        hidden = self.size("decoder.hidden_size", _HIDDEN, None)
        head_size = self.size("decoder.head_size", ("head_dim",), found.head_size, max(hidden // heads, 1))
        for name in ("filename", "inputs", "outputs"):
            self.sources[f"model.decoder.{name}"] = self.variant.decoder
        return {
            "filename": self.variant.decoder,
            "head_size": head_size,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "inputs": dict(found.inputs),
            "outputs": dict(found.outputs),
        }

    def _layers(self) -> int:
        """Return the number of layers with a cache. Gemma 3n and 4 share the keys and values of their last layers."""
        shared = self._config.get("num_kv_shared_layers")
        if type(shared) is int and shared > 0:
            self.sources["model.decoder.num_hidden_layers"] = self.variant.decoder
            return self.interface.layers
        return self.size("decoder.num_hidden_layers", _LAYERS, self.interface.layers)

    def embedding(self) -> dict[str, Any]:
        """Return the block of the graph that computes embeddings, for a decoder that reads them."""
        if "input_ids" in self.interface.inputs:
            return {}
        if not self.variant.embedding:
            raise ModelFolderError(
                f"{self.folder / self.variant.decoder}: the decoder reads embeddings, and no graph computes them",
                "a graph embed_tokens.onnx beside the decoder must compute embeddings from token ids",
                "copy this file from the original model",
            )
        self.sources["model.embedding.filename"] = self.variant.embedding
        return {"embedding": {"filename": self.variant.embedding}}

    def token_ids(self) -> dict[str, Any]:
        """Return the ids that begin and end a text. The tokenizer's end of a text also ends a reply."""
        ids: dict[str, Any] = {}
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            for name, values in ((GENERATION, self._generation), (MODEL_CONFIG, self._config)):
                if values.get(key) is not None:
                    ids[key], self.sources[f"model.{key}"] = values[key], name
                    break
        declared = ids.get("eos_token_id", [])
        ends = [*declared] if isinstance(declared, list) else [declared]
        if (end := self._tokenizer_end()) is not None and end not in ends:
            ends.append(end)
            file = self.sources.get("model.eos_token_id")
            self.sources["model.eos_token_id"] = f"{file} and {TOKENIZER_CONFIG}" if file else TOKENIZER_CONFIG
        return {**ids, "eos_token_id": ends}

    def _tokenizer_end(self) -> int | None:
        """Return the id of eos_token in tokenizer_config.json; None if it is not there."""
        settings = self._json(TOKENIZER_CONFIG)
        token = settings.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or not content:
            return None
        added = settings.get("added_tokens_decoder")
        if isinstance(added, dict):
            ids = (id_ for id_, one in added.items() if isinstance(one, dict) and one.get("content") == content)
            return next((int(id_) for id_ in ids if id_.isdecimal() and len(id_) < 10), None)
        tokens = self._json(TOKENIZER).get("added_tokens")
        entries = [one for one in tokens if isinstance(one, dict)] if isinstance(tokens, list) else []
        return next(
            (one["id"] for one in entries if one.get("content") == content and type(one.get("id")) is int), None
        )

    def search(self) -> dict[str, Any]:
        """Return the search options of generation_config.json."""
        options = {}
        for name, value in self._generation.items():
            if name not in generation_config.OBEYED or name not in SEARCH_OPTIONS or value is None:
                continue
            if name == "max_length" and value in (0, 20):  # 20 is the default of transformers
                continue
            try:
                options[name] = checked(name, value)
            except OptionError as error:
                raise ConfigError(
                    f"{self.folder / GENERATION}: {error.what}", error.why, "correct the value, or remove the key"
                ) from error
            self.sources[f"search.{name}"] = GENERATION
        return options
