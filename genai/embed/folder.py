"""Folders of encoders: the graph, the length limit, and the modules after the graph.

The files are those of sentence-transformers: `modules.json` (the modules in order, with a folder of settings each),
`sentence_bert_config.json` (the length limit), and `config_sentence_transformers.json` (prompts and the similarity
function). A folder without `modules.json` has no pooling, so the caller must choose one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from genai.common.log import logger

from ..common.reading import file_text, json_object
from ..convert.encoders.score import read_score
from ..convert.encoders.spec import TokenScore
from ..errors import (
    ConfigError,
    InputError,
    ModelFolderError,
    OptionError,
    UnsupportedModelError,
    did_you_mean,
    kind_of,
)
from ..models.exported_config import is_exported_decoder, variants_in
from ..models.folders import ASK_FOR_MODEL, gguf_encoder, not_a_folder
from ..text.backend import load_tokenizer
from ..weight_files.safetensors import read_safetensors
from ..weight_files.torch_file import read_torch
from .pooling import ACTIVATIONS, POOLINGS, DenseModule, LayerNormModule, NormalizeModule, VectorModule

_LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Graphs in the order in which they are tried, relative to the folder.
GRAPHS = ("onnx/model.onnx", "model.onnx")
# A limit that tokenizers use for "no limit".
_NO_LIMIT = 10**9
# The longest sequence of a model whose files name no limit.
_DEFAULT_LENGTH = 512
# Model types without positions: attention adds a bias per distance, for any distance. The default limit bounds the time
# and the memory of a text, which grow with the square of its length.
_WITHOUT_POSITIONS = ("t5", "mt5", "umt5")
_DEFAULT_WITHOUT_POSITIONS = 4096
# Model types whose first position is after the padding id.
_PADDED_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "xlm-roberta-xl",
    "data2vec-text",
    "roberta-prelayernorm",
)
Value = TypeVar("Value")
_log = logger(__name__)


@dataclass(frozen=True)
class EncoderFolder:
    """The description of an encoder in a folder.

    Attributes:
        folder: the folder.
        config: config.json; empty if there is none.
        max_length: maximum number of tokens of a text, special tokens included.
        longest: maximum number of tokens that the graph supports.
        lower_case: True if texts are converted to lower case.
        keeps_end: True if the first tokens of a text that is too long are removed, instead of the last ones.
        has_types: False if the model receives no token types, so that all of them are 0.
        dimensions: number of dimensions that are kept by default; None = all.
        poolings: names of POOLINGS, in the order in which their results are concatenated; empty if the folder has none.
        include_prompt: False if the tokens of a prompt are left out of the pooling.
        pooling_width: number of dimensions that the pooling's file names for rows of tokens; None = it names none.
        modules: the modules after the pooling, in order.
        prompts: texts by name that precede a text.
        default_prompt: name of the prompt that is used if the caller names none; "" = none.
        similarity: one of SIMILARITIES.
        score: for a reranker that is a decoder, the score that its logits give.
        template_variables: variables of the chat template that such a reranker's pairs are rendered with.
        activation: name of the function of a reranker's logits; "" = as config.json says.
    """

    folder: Path
    config: Mapping[str, Any]
    max_length: int
    longest: int
    lower_case: bool = False
    keeps_end: bool = False
    has_types: bool = True
    dimensions: int | None = None
    poolings: tuple[str, ...] = ()
    include_prompt: bool = True
    pooling_width: int | None = None
    modules: tuple[VectorModule, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    similarity: str = "cosine"
    score: TokenScore | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    activation: str = ""

    @property
    def is_classifier(self) -> bool:
        """True if the folder's model scores or classifies texts, instead of embedding them."""
        if self.score is not None:
            return True
        architectures = self.config.get("architectures") or []
        return any(str(name).endswith("ForSequenceClassification") for name in architectures)

    @property
    def normalizes(self) -> bool:
        """True if the last module makes vectors of length 1."""
        return bool(self.modules) and isinstance(self.modules[-1], NormalizeModule)


def _not_an_encoder(path: Path) -> ModelFolderError | UnsupportedModelError:
    """Return the error for a path that is not a folder."""
    if path.suffix.lower() == ".gguf" and path.is_file():
        return gguf_encoder(path)
    error = not_a_folder(path)
    if error.fix == ASK_FOR_MODEL:
        error.fix = "pass a folder with config.json, a tokenizer and a graph, or the name of an encoder: org/name"
    return error


def read_encoder_folder(folder: Path) -> EncoderFolder:
    """Read the description of an encoder.

    Raises:
        ModelFolderError: the folder does not exist or a file is missing.
        ConfigError: a file is malformed, or contradicts another file.
        UnsupportedModelError: the folder has a module that cannot run here.
    """
    if not folder.is_dir():
        raise _not_an_encoder(folder)
    if (folder / "genai_config.json").is_file() or is_exported_decoder(folder):
        raise UnsupportedModelError(
            f"{folder}: this is a model that generates text",
            "embeddings and scores are computed by encoders",
            f"to chat with it, run `genai chat {folder}`; for embeddings, use the folder of an encoder",
        )
    config = read_json(folder / "config.json")
    sizes = read_json(folder / "sentence_bert_config.json")
    tokenizer = read_json(folder / "tokenizer_config.json")
    settings = read_json(folder / "config_sentence_transformers.json")
    if not isinstance(model_type := config.get("model_type"), str | None):
        raise _malformed(folder / "config.json", "model_type", model_type, "a name")
    longest = _longest(folder, config)
    limits = [
        _whole(folder / "sentence_bert_config.json", sizes, "max_seq_length"),
        None if "max_seq_length" in sizes else _whole(folder / "tokenizer_config.json", tokenizer, "model_max_length"),
    ]
    named = [limit for limit in limits if limit and limit < _NO_LIMIT]
    if longest == _NO_LIMIT and not named:
        named = [_DEFAULT_WITHOUT_POSITIONS]
    max_length = min([longest, *named])
    (poolings, include_prompt, pooling_width), modules, score = _modules(folder)
    prompts = _value(folder / "config_sentence_transformers.json", settings, "prompts", dict, {})
    if bad := [name for name, text in prompts.items() if not isinstance(text, str)]:
        raise _malformed(folder / "config_sentence_transformers.json", f"prompts.{bad[0]}", prompts[bad[0]], "a text")
    default = settings.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ConfigError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name is {default!r:.80}",
            f"the prompts are {', '.join(prompts) or 'none'}",
            "correct the name, or remove it",
        )
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise _malformed(
            folder / "config_sentence_transformers.json", "similarity_fn_name", similarity, ", ".join(SIMILARITIES)
        )
    return EncoderFolder(
        folder, config, max_length, longest, bool(sizes.get("do_lower_case", False)), _keeps_end(folder, tokenizer),
        _has_types(folder, tokenizer),
        _whole(folder / "config_sentence_transformers.json", settings, "truncate_dim"), poolings, include_prompt,
        pooling_width, modules, prompts, default, similarity, score, _template_variables(folder, sizes),
        str(settings.get("activation_fn") or "").rpartition(".")[2],
    )  # fmt: skip


def default_token_score(description: EncoderFolder) -> TokenScore | None:
    """Return the score of "yes" less "no" for a decoder's checkpoint without modules.json, as sentence-transformers.

    Returns:
        None if the folder has modules.json or a graph, or if its model is not a decoder that generates text.

    Raises:
        UnsupportedModelError: the vocabulary has no token "yes" or no token "no".
        TokenizerError: the tokenizer is missing or cannot be used.
    """
    folder, config = description.folder, description.config
    names = config.get("architectures") or []
    is_generator = any(str(name).endswith("ForCausalLM") for name in names)
    if not is_generator or (folder / "modules.json").is_file() or has_graph(folder):
        return None
    backend = load_tokenizer(folder).backend
    yes, no = (backend.token_to_id(token) for token in ("yes", "no"))
    if yes is None or no is None:
        raise UnsupportedModelError(
            f"{folder}: the vocabulary has no token {'yes' if yes is None else 'no'!r}",
            'a reranker that generates text answers "yes" or "no"',
            "use a reranker, for example Qwen3-Reranker, or a model with a classification head",
        )
    _log.info('%s has no modules.json: scores are the logit of "yes" less the logit of "no"', folder)
    return TokenScore(yes, no)


def _keeps_end(folder: Path, settings: Mapping[str, Any]) -> bool:
    side = settings.get("truncation_side") or "right"
    if side not in ("left", "right"):
        raise _malformed(folder / "tokenizer_config.json", "truncation_side", side, '"left" or "right"')
    return bool(side == "left")


def _has_types(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return False if tokenizer_config.json lists the inputs that the tokenizer computes, without token types.

    A tokenizer of transformers' class TokenizersBackend computes no token types unless the file lists them.
    """
    if settings.get("model_input_names") is None:
        return bool(settings.get("tokenizer_class") != "TokenizersBackend")
    return "token_type_ids" in _value(folder / "tokenizer_config.json", settings, "model_input_names", list, [])


def _template_variables(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template in sentence_bert_config.json."""
    path = folder / "sentence_bert_config.json"
    given = _value(path, settings, "processing_kwargs", dict, {})
    variables = dict(_value(path, given, "chat_template", dict, {}))
    variables.pop("restore_suffix", None)  # an option of sentence-transformers, not of the template
    return variables


def has_graph(folder: Path) -> bool:
    """Return True if a folder has a graph under one of the usual names, or only one graph."""
    return any((folder / name).is_file() for name in GRAPHS) or len(variants_in(folder)) == 1


def find_graph(folder: Path, file: str | None = None) -> Path:
    """Return the ONNX file of a folder.

    Args:
        file: path of the file in the folder; None = onnx/model.onnx or model.onnx, or the only graph.

    Raises:
        ModelFolderError: there is no such file.
    """
    names = [file] if file else list(GRAPHS)
    for name in names:
        path = folder / name
        if file and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise ModelFolderError(f"{name}: the file is outside the folder", str(folder), "name a file in the folder")
        if path.is_file():
            return path
    if not file and len(variants := variants_in(folder)) == 1:
        return folder / variants[0].decoder
    present = sorted(path.relative_to(folder).as_posix() for path in folder.glob("**/*.onnx"))[:20]
    if present:
        raise ModelFolderError(
            f"{folder}: there is no {' or '.join(names)}",
            f"its graphs are {', '.join(present)}",
            f"choose one, for example file={present[0]!r} in Python or `--file {present[0]}`",
        )
    raise ModelFolderError(
        f"{folder}: there is no ONNX graph",
        f"an encoder needs {' or '.join(names)}",
        "export one with Optimum, or use a checkpoint of a type that docs/how-to/embeddings.md lists",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is no such file."""
    text = file_text(path, ModelFolderError, ConfigError)
    return {} if text is None else json_object(text, path, ConfigError)


def _longest(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens that the model has positions for."""
    path = folder / "config.json"
    if config.get("model_type") in _WITHOUT_POSITIONS:
        return _NO_LIMIT
    found = [_whole(path, config, name) for name in ("max_position_embeddings", "n_positions", "max_trained_positions")]
    longest = next((value for value in found if value), _DEFAULT_LENGTH)
    if config.get("model_type") in _PADDED_POSITIONS:  # positions begin after the padding id
        longest -= (_whole(path, config, "pad_token_id") or 0) + 1
    if longest < 1:
        raise _malformed(path, "max_position_embeddings", longest, "a positive number of tokens")
    return longest


def _modules(folder: Path) -> tuple[_Pooling, tuple[VectorModule, ...], TokenScore | None]:
    """Return the pooling, the modules after it, and the score of a decoder."""
    path = folder / "modules.json"
    text = file_text(path, ModelFolderError, ConfigError)
    if text is None:
        return _Pooling(), (), None
    entries = json_object('{"modules": ' + text + "}", path, ConfigError)["modules"]
    if not isinstance(entries, list):
        raise _malformed(path, "the file", entries, "a list of modules")
    pooling = _Pooling()
    modules: list[VectorModule] = []
    score = None
    for entry in entries:
        kind = str(entry.get("type", "") if isinstance(entry, dict) else "").rpartition(".")[2]
        place = entry.get("path", "") if isinstance(entry, dict) else ""
        if not isinstance(place, str) or Path(place).is_absolute() or ".." in Path(place).parts:
            raise _malformed(path, "path", place, "a folder inside the model's folder")
        if (kind == "Pooling" and modules) or (kind == "Transformer" and (modules or pooling.names)):
            raise ConfigError(
                f"{path}: the {kind} comes after a module that reads its result",
                "the order is Transformer, Pooling, other modules",
                "correct the order, or copy the file again",
            )
        match kind:
            case "Transformer":
                if place:
                    raise UnsupportedModelError(
                        f"{path}: the transformer is in the folder {place!r}",
                        "it must be in the model's folder",
                        "save the model again with a current version of sentence-transformers",
                    )
            case "Pooling":
                pooling = _pooling(folder / place / "config.json")
            case "Dense":
                modules.append(_dense(folder / place))
            case "LayerNorm":
                modules.append(_layer_norm(folder / place))
            case "Normalize":
                _check_names(folder / place / "config.json")
                modules.append(NormalizeModule())
            case "LogitScore":
                score = read_score(folder / place / "config.json")
            case "Dropout":
                pass
            case _:
                raise UnsupportedModelError(
                    f"{path}: the module {kind or entry!r:.80}",
                    "this toolkit runs Transformer, Pooling, Dense, LayerNorm, Normalize, LogitScore and Dropout",
                    "use a model of these modules",
                )
    return pooling, tuple(modules), score


class _Pooling(NamedTuple):
    """The attributes `poolings`, `include_prompt` and `pooling_width` of EncoderFolder."""

    names: tuple[str, ...] = ()
    include_prompt: bool = True
    width: int | None = None


def _pooling(path: Path) -> _Pooling:
    config = read_json(path)
    if not config:
        raise ModelFolderError(
            f"{path}: the file {'has no settings' if path.is_file() else 'is missing'}",
            "modules.json names a pooling, whose settings are in this file",
            'copy the file, or choose a pooling, for example pooling="mean" in Python or `--pooling mean`',
        )
    modes = config.get("pooling_mode")
    if modes is None:
        chosen = [mode for key, mode in _LEGACY_POOLINGS.items() if _value(path, config, key, bool, False)]
        modes = chosen or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or any(mode not in POOLINGS for mode in modes):
        raise _malformed(path, "pooling_mode", modes, f"one or more of {', '.join(POOLINGS)}")
    widths = [_whole(path, config, name) for name in ("embedding_dimension", "word_embedding_dimension")]
    width = next((width for width in widths if width is not None), None)
    return _Pooling(tuple(modes), _value(path, config, "include_prompt", bool, True), width)


def _dense(folder: Path) -> DenseModule:
    path = folder / "config.json"
    config = _check_names(path)
    tensors = _weights(folder)
    weight = _tensor(folder, tensors, "linear.weight", 2)
    for name, size in (("out_features", weight.shape[0]), ("in_features", weight.shape[1])):
        if config.get(name, size) != size:
            raise ConfigError(
                f"{path}: {name} is {config[name]!r:.80}",
                f"linear.weight has {weight.shape[0]} rows and {weight.shape[1]} columns",
                "copy the model again",
            )
    bias = _tensor(folder, tensors, "linear.bias", 1) if config.get("bias", True) else None
    if bias is not None and len(bias) != len(weight):
        raise ConfigError(
            f"{folder}: linear.bias has {len(bias)} numbers, and linear.weight {len(weight)} rows",
            "the two must be equal",
            "copy the model again",
        )
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{path}: the activation function {name!r:.80}",
            f"this toolkit knows {', '.join(ACTIVATIONS)}",
            "use a model with one of these functions",
        )
    has_residual = bool(config.get("use_residual", False))
    residual = _tensor(folder, tensors, "residual.weight", 2) if "residual.weight" in tensors else None
    shapes = {weight.shape, weight.shape[::-1] if residual is None else residual.shape}
    if has_residual and len(shapes) > 1:
        raise ConfigError(
            f"{folder}: residual.weight is {'missing' if residual is None else list(residual.shape)}",
            f"use_residual is true, and linear.weight is {list(weight.shape)}",
            "copy the model again",
        )
    return DenseModule(weight, bias, name, has_residual, residual if has_residual else None)


def _check_names(path: Path) -> dict[str, Any]:
    """Return the settings of a module after the pooling. Raises UnsupportedModelError for a module of other rows."""
    config = read_json(path)
    for name in ("module_input_name", "module_output_name"):
        if (config.get(name) or "sentence_embedding") != "sentence_embedding":
            raise UnsupportedModelError(
                f"{path}: {name} is {config[name]!r:.80}",
                "only a module after the pooling can run here",
                "use a model whose Dense and Normalize modules read and write sentence_embedding",
            )
    return config


def _layer_norm(folder: Path) -> LayerNormModule:
    tensors = _weights(folder)
    weight, bias = (_tensor(folder, tensors, f"norm.{name}", 1) for name in ("weight", "bias"))
    if weight.shape != bias.shape:
        raise ConfigError(f"{folder}: the norm's weight and bias differ in size", "", "copy the model again")
    return LayerNormModule(weight, bias)


def _weights(folder: Path) -> dict[str, NDArray[Any]]:
    path = folder / "model.safetensors"
    if path.is_file():
        return read_safetensors(path)
    if (folder / "pytorch_model.bin").is_file():
        return read_torch(folder / "pytorch_model.bin")
    raise ModelFolderError(
        f"{path}: the file is missing",
        "modules.json names a module with weights, which are in model.safetensors or pytorch_model.bin",
        "copy the file",
    )


def _tensor(folder: Path, tensors: Mapping[str, NDArray[Any]], name: str, axes: int) -> NDArray[np.float32]:
    if name not in tensors or tensors[name].ndim != axes:
        found = f"{list(tensors[name].shape)}" if name in tensors else "missing"
        raise InputError(
            f"{folder / 'model.safetensors'}: {name} is {found}", f"{axes} axes are expected", "copy the model again"
        )
    return np.array(tensors[name], np.float32)


def _whole(path: Path, values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
        raise _malformed(path, name, value, "a positive whole number")
    return int(min(value, 2 * _NO_LIMIT))


def _value(path: Path, values: Mapping[str, Any], name: str, kind: type[Value], default: Value) -> Value:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = {bool: "true or false", dict: "a JSON object", list: "a JSON list"}[kind]
        raise _malformed(path, name, value, expected)
    return value


def _malformed(path: Path, name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{path}: {name} is {value!r:.80}", f"{expected} is expected", "correct the file")


def known_prompt(folder: EncoderFolder, name: str) -> str:
    """Return the text of a prompt. Raises InputError if the folder has no such prompt."""
    if not isinstance(name, str):
        raise InputError(f"prompt_name is {kind_of(name)}", "a name is expected", "pass a str")
    if name not in folder.prompts:
        raise InputError(
            f"prompt_name = {name!r:.80}",
            f"the model's prompts are {', '.join(folder.prompts) or 'none'}",
            did_you_mean(name, folder.prompts, "choose one of them, or leave prompt_name out"),
        )
    return folder.prompts[name]


def chosen_prompt(folder: EncoderFolder, name: str | None, prompt: str | None) -> str:
    """Return the text that a caller chose by name or gave, or the folder's default prompt.

    Raises:
        InputError: there is no such prompt, or `prompt` is not a text.
        OptionError: both are given.
    """
    if prompt is not None and name is not None:
        raise OptionError("prompt and prompt_name contradict each other", "both are given", "leave one of them out")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise InputError(f"prompt is {kind_of(prompt)}", "a text is expected", "pass a str")
        return prompt
    return folder.prompts.get(folder.default_prompt, "") if name is None else known_prompt(folder, name)


def checked_poolings(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return pooling names as a tuple. Raises OptionError for unknown names."""
    names = tuple(value) if isinstance(value, list | tuple) else (value,)
    aliases = {"last": "lasttoken", "cls_token": "cls"}
    names = tuple(aliases.get(name, name) if isinstance(name, str) else "" for name in names)
    if not names or any(name not in POOLINGS for name in names):
        raise OptionError(f"pooling = {value!r:.80}", f"choose from {', '.join(POOLINGS)}", "correct the name")
    return names
