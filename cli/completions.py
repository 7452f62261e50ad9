"""Completion of values in the shell: models for MODEL, files for PATH and FILE, and the values of options."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# The Python names of parameters that take a model, and of parameters of type str that take a file.
MODELS = ("model", "checkpoint", "base", "other", "draft", "reference")
FILES = ("json_schema", "grammar", "file")
# Parameters with a fixed set of values: the values, or the module and the name of a collection of the values. The names
# before the colon limit an entry to a command.
_VALUES: dict[str, tuple[str, ...] | str] = {
    "accuracy": "genai.models.model_options.ACCURACIES",
    "other_accuracy": "genai.models.model_options.ACCURACIES",
    "kv_type": "genai.models.model_options.KV_DTYPES",
    "other_kv_type": "genai.models.model_options.KV_DTYPES",
    "device": "genai.models.model_options.DEVICES",
    "precision": "genai.convert.options.PRECISIONS",
    "head_precision": "genai.convert.options.PRECISIONS",
    "embedding_precision": "genai.convert.options.PRECISIONS",
    "speculate": "genai.llm.speculation.WAYS",
    "on_overflow": "genai.llm.chat.OVERFLOWS",
    "pooling": "genai.embed.pooling.POOLINGS",
    "early_stopping": ("true", "false", "never"),
    "against": ("onnxruntime", "reference"),
    "dtype": ("float32", "float16"),
    "batch:format": "genai.llm.batch.lines.FORMATS",
    "embed:format": "genai.llm.batch.lines.FORMATS",
    "rerank:format": "genai.llm.batch.lines.FORMATS",
    "quantize:format": "genai.quantize.choices.FORMATS",
    "quantize:method": "genai.quant.methods.METHODS",
    "quantize:target_runtime": "genai.quantize.options.TARGET_RUNTIMES",
    "quantize-onnx:format": ("QDQ", "QOperator"),
    "quantize-onnx:method": ("MinMax", "Entropy", "Percentile"),
    "quantize-onnx:activation_type": ("QUInt8", "QInt8", "QUInt16", "QInt16"),
    "quantize-onnx:weight_type": ("QInt8", "QUInt8", "QInt4", "QUInt4"),
}
_MOST_PATHS = 200


def complete(parameters: Iterable[Any]) -> None:
    """Give the parameters of a command their completions of values."""
    for parameter in parameters:
        if getattr(parameter, "_custom_shell_complete", None) is not None:
            continue
        if takes_model(parameter):
            parameter._custom_shell_complete = lambda ctx, parameter, begun: models_like(begun)
        elif parameter.name == "name" and parameter.param_type_name == "argument":
            parameter._custom_shell_complete = lambda ctx, parameter, begun: _beginning(begun, _cached_names())
        elif parameter.name in FILES:
            parameter._custom_shell_complete = lambda ctx, parameter, begun: paths_like(begun)
        elif any(key.rpartition(":")[2] == parameter.name for key in _VALUES):
            parameter._custom_shell_complete = _complete_value


def takes_model(parameter: Any) -> bool:
    """Return True if a parameter takes the name or the path of a model."""
    return parameter.name in MODELS and parameter.metavar != "MODEL.onnx"


def values_of(command: str, parameter: str) -> list[str]:
    """Return the values of a parameter of a command; empty if the parameter has no fixed set of values."""
    values = _VALUES.get(f"{command}:{parameter}", _VALUES.get(parameter, ()))
    if isinstance(values, str):
        module, _, name = values.rpartition(".")
        values = getattr(import_module(module), name)
    return list(values)


def _complete_value(ctx: Any, parameter: Any, begun: str) -> list[str]:
    return _beginning(begun, values_of(ctx.command.name or "", parameter.name))


def models_like(begun: str) -> list[str]:
    """Return the models whose names begin with a text: short names, cached models, built models, and paths."""
    from genai.hub.known import BUNDLED_MODEL, known_models
    from genai.lora.named import registered_adapters

    names = [BUNDLED_MODEL, *known_models(), *_cached_names()]
    base, plus, _ = begun.rpartition("+")
    if plus:
        with suppress(Exception):  # a damaged record, or an unreadable folder
            names += [f"{base}+{adapter}" for adapter in registered_adapters(base)]
    return list(dict.fromkeys([*_beginning(begun, names), *paths_like(begun, {".gguf", ".onnx"})]))


def paths_like(begun: str, endings: set[str] | None = None) -> list[str]:
    """Return the paths that begin with a text. A folder ends in a separator. `endings` limits the files."""
    folder, name = os.path.split(begun)
    found = []
    with suppress(OSError, RuntimeError, ValueError):
        for path in sorted(Path(folder or ".").expanduser().iterdir())[: 10 * _MOST_PATHS]:
            if not path.name.startswith(name) or (path.name.startswith(".") and not name):
                continue
            shown = f"{folder.rstrip('/') if folder != '/' else ''}/{path.name}" if folder else path.name
            if path.is_dir():
                found.append(f"{shown}/")
            elif endings is None or path.suffix.lower() in endings:
                found.append(shown)
    return found[:_MOST_PATHS]


def _cached_names() -> list[str]:
    from genai.hub.built import built_models
    from genai.hub.store import models

    with suppress(Exception):  # without a cache, there are no names; an error would appear in the command line
        return [*(model.name for model in models()), *(model.name for model in built_models())]
    return []


def _beginning(begun: str, values: Iterable[str]) -> list[str]:
    return [value for value in values if value.lower().startswith(begun.lower())]
