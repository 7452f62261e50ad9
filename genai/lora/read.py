"""A reader for adapters in all supported formats."""

from __future__ import annotations

from pathlib import Path

from ..weight_files.gguf import is_gguf
from .gguf import read_gguf_adapter
from .parameters import AdapterParameters, adapter_path, read_onnx_adapter
from .peft import read_peft


def read_adapter(source: str | Path) -> AdapterParameters:
    """Read an adapter from a PEFT folder, an `.onnx_adapter` file or a GGUF file.

    Raises:
        ModelFolderError, InputError: the adapter is missing, damaged, or of an unsupported kind.
    """
    path = adapter_path(source)
    if is_gguf(path):
        return read_gguf_adapter(path)
    return read_peft(path) if path.is_dir() else read_onnx_adapter(path)
