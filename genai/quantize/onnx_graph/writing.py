"""Functions that read models to quantise and write quantised models."""

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
        source: path, or onnx.ModelProto.
        external: see `write_quantised`.

    Raises:
        OptionError: the target path is not valid.
        GenaiError: the model cannot be read, quantised or written.
    """
    require_writable_path(target)
    model = read_model(source)
    quantize(model)
    write_quantised(model, target, external)


def write_quantised(model: OnnxModel, path: str | Path, external: bool) -> None:
    """Write a model.

    Args:
        external: True to write the weights to a separate file, `path` + ".data".

    Raises:
        GraphError: the model needs more than 2 GiB, and `external` is False.
        ModelFolderError: a file cannot be written.
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
            "a single file can hold at most 2 GiB",
            "pass use_external_data_format=True",
        )
    write_model(model, path)


def weight_bytes(model: OnnxModel) -> int:
    """Return the size in bytes of all constants."""
    return sum(tensor.nbytes for graph in model.graphs() for tensor in graph.initializers.values())


def require_writable_path(path: object) -> None:
    """Raise OptionError if no model can be written to the path. Call this function before hours of work."""
    if not isinstance(path, str | Path):
        raise OptionError(
            f"the output path is a {type(path).__name__}", "the output must be a path", "pass the path of the new file"
        )
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise OptionError(
            f"the output folder {str(folder)!r} does not exist",
            "the folder of the output must exist",
            "create the folder first",
        )
