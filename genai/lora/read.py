"""A reader for adapters in all supported formats."""

from __future__ import annotations

from pathlib import Path

from ..weight_files.gguf import is_gguf
from .gguf import read_gguf_adapter
from .mlx import is_mlx, read_mlx
from .parameters import AdapterParameters, adapter_path, read_onnx_adapter
from .peft import read_config, read_peft


def read_adapter(source: str | Path) -> AdapterParameters:
    """Read an adapter from a folder of PEFT or mlx-lm, an `.onnx_adapter` file or a GGUF file.

    Raises:
        ModelFolderError, InputError: the adapter is missing, damaged, or of an unsupported kind.
    """
    path = adapter_path(source)
    if is_gguf(path):
        return read_gguf_adapter(path)
    if not path.is_dir():
        return read_onnx_adapter(path)
    config = read_config(path)
    return read_mlx(path, config) if is_mlx(config) else read_peft(path)
