"""Reads models to quantise, and writes what was quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import GraphError, OptionError
from ...onnx.ir import OnnxModel
from ...onnx.reader import MAX_PROTOBUF_BYTES, read_model
from ...onnx.writer import write_model


def quantize_file(
    source: Any, target: str | Path, quantize: Callable[[OnnxModel], None], *, external: bool = False
) -> None:
    """Read a model, quantise it in place, and write it.

    Args:
        source: path, or onnx.ModelProto. external: see `write_quantised`.

    Raises:
        OptionError: nothing can be written there. GenaiError: the model cannot be read, quantised or written.
    """
    require_writable_path(target)
    model = read_model(source)
    quantize(model)
    write_quantised(model, target, external)


def write_quantised(model: OnnxModel, path: str | Path, external: bool) -> None:
    """Write a model.

    Args:
        external: the weights go into a file beside it, `path` + ".data".

    Raises:
        GraphError: it needs more than 2 GiB, and was to be one file.
        ModelFolderError: it cannot be written.
    """
    path = Path(path)
    model.producer_name = "onnx-genai-toolkit"
    if external:
        write_model(model, path, external_data=f"{path.name}.data")
        return
    weights = weight_bytes(model)
    if weights > MAX_PROTOBUF_BYTES:
        raise GraphError(
            f"the model for {str(path)!r} has {weights} bytes of weights",
            "one file holds at most 2 GiB",
            "pass use_external_data_format=True",
        )
    write_model(model, path)


def weight_bytes(model: OnnxModel) -> int:
    """Bytes of all constants."""
    return sum(tensor.nbytes for graph in model.graphs() for tensor in graph.initializers.values())


def require_writable_path(path: object) -> None:
    """Raise OptionError unless a model can be written there, before hours are spent on it."""
    if not isinstance(path, str | Path):
        raise OptionError(
            f"where to write the model is a {type(path).__name__}", "it is a path", "pass the path of the new file"
        )
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise OptionError(f"there is no folder {str(folder)!r} to write into", "it must exist", "make it first")
