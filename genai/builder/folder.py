"""A model folder, written whole or not at all: model.onnx, model.onnx.data, genai_config.json, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import ModelFolderError
from .data_file import DataFile
from .decoder import write_decoder
from .export import Export
from .genai_config import genai_config
from .graph_writer import GraphWriter
from .options import ExportOptions
from .spec import DecoderSpec
from .tokenizer_files import copy_tokenizer, require_tokenizer
from .unfinished import unfinished_folder
from .weights import Weights

MODEL, DATA, CONFIG = "model.onnx", "model.onnx.data", "genai_config.json"


def write_model_folder(
    path: str | Path,
    spec: DecoderSpec,
    options: ExportOptions,
    weights: Mapping[str, NDArray[Any]],
    *,
    tokenizer_dir: str | Path | None = None,
    search: Mapping[str, Any] | None = None,
) -> Path:
    """Write a decoder that onnxruntime-genai loads as it is; returns the folder.

    Args:
        path: the folder to make; its parent must exist, itself not.
        weights: arrays by Hugging Face name, such as "model.layers.0.self_attn.q_proj.weight", of any float type.
            It may load them lazily: they are read one after the other and freed.
        tokenizer_dir: folder whose tokenizer is taken over: tokenizer.json, or a SentencePiece model.
        search: defaults of genai_config.json's search options, beside greedy search.

    Raises:
        ModelFolderError: the target exists or cannot be written, or there is no tokenizer.
        InputError: a tensor is missing, of another shape or type, or not finite.
    """
    target = Path(path)
    if tokenizer_dir is not None:
        require_tokenizer(Path(tokenizer_dir))
    _require_absent(target)
    try:
        with unfinished_folder(target) as unfinished:
            _write_files(unfinished, spec, options, weights, search or {})
            if tokenizer_dir is not None:
                copy_tokenizer(Path(tokenizer_dir), unfinished)
            _require_absent(target)
            unfinished.rename(target)
    except OSError as error:
        raise _not_writable(target, error) from error
    return target


def _write_files(
    folder: Path,
    spec: DecoderSpec,
    options: ExportOptions,
    weights: Mapping[str, NDArray[Any]],
    search: Mapping[str, Any],
) -> None:
    with DataFile(folder / DATA) as data:
        graph = GraphWriter(data)
        write_decoder(Export(graph, spec, options, Weights(weights)))
    (folder / MODEL).write_bytes(graph.model().SerializeToString(deterministic=True))
    config = json.dumps(genai_config(spec, options, search), indent=4)
    (folder / CONFIG).write_text(config + "\n", encoding="utf-8")


def _require_absent(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ModelFolderError(
            f"{target} exists already", "a model folder is never overwritten", "remove it or choose another place"
        )


def _not_writable(target: Path, error: OSError) -> ModelFolderError:
    return ModelFolderError(
        f"cannot write the model folder {target}",
        str(error),
        "check that the parent folder exists, can be written and has room",
    )
