"""A model folder, written whole or not at all: model.onnx, model.onnx.data, genai_config.json, tokenizer files."""

from __future__ import annotations

import json
import shutil
import tempfile
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
from .weights import Weights

MODEL, DATA, CONFIG = "model.onnx", "model.onnx.data", "genai_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
# Either of these is a whole tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


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
        tokenizer_dir: folder whose tokenizer files are copied; it must hold tokenizer.json or tokenizer.model.
        search: defaults of genai_config.json's search options, beside greedy search.

    Raises:
        ModelFolderError: the target exists or cannot be written, or there is no tokenizer.
        InputError: a tensor is missing, of another shape or type, or not finite.
    """
    target = Path(path)
    tokenizer = [] if tokenizer_dir is None else tokenizer_files(Path(tokenizer_dir))
    _require_absent(target)
    try:
        # Beside the target, so that the rename at the end cannot cross file systems.
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".unfinished", dir=target.parent))
    except OSError as error:
        raise _not_writable(target, error) from error
    try:
        unfinished.chmod(0o755)
        _write_files(unfinished, spec, options, weights, search or {})
        for file in tokenizer:
            shutil.copyfile(file, unfinished / file.name)
        unfinished.rename(target)
    except OSError as error:
        raise _not_writable(target, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
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


def tokenizer_files(folder: Path) -> list[Path]:
    """What a model folder takes over from a folder with a tokenizer.

    Raises:
        ModelFolderError: there is none.
    """
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not {file.name for file in files} & set(TOKENIZERS):
        raise ModelFolderError(
            f"there is no {' and no '.join(TOKENIZERS)} in {folder}",
            "the model folder gets its tokenizer from there",
            "name the folder that holds the tokenizer, or leave it out",
        )
    return files


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
