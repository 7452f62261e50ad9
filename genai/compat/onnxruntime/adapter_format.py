"""AdapterFormat and LoraAdapter: onnxruntime's classes for adapter files (`.onnx_adapter`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...lora.onnx_adapter import AdapterFile, read_adapter_file, write_adapter_file
from .values import OrtValue


class AdapterFormat:
    """The contents of an adapter file, as in onnxruntime."""

    _file: AdapterFile

    def __init__(self, adapter: AdapterFormat | None = None) -> None:
        self._file = AdapterFile() if adapter is None else replace(adapter._file, arrays=dict(adapter.arrays))

    @staticmethod
    def read_adapter(file_path: str | os.PathLike[str]) -> AdapterFormat:
        """Read a file.

        Raises:
            InputError: the file does not exist, is damaged, or is not an adapter.
        """
        return _holding(read_adapter_file(Path(file_path)))

    def export_adapter(self, file_path: str | os.PathLike[str]) -> None:
        """Write a file. Raises InputError if the file cannot be written."""
        write_adapter_file(Path(file_path), self._file)

    def get_format_version(self) -> int:
        """Return the version of the file format: 1."""
        return self._file.format_version

    def set_adapter_version(self, adapter_version: int) -> None:
        """Set a version number of the caller's choice, in the range of int32."""
        self._file.adapter_version = _int32("adapter_version", adapter_version)

    def get_adapter_version(self) -> int:
        """Return the number from `set_adapter_version`; 0 if it was not set."""
        return self._file.adapter_version

    def set_model_version(self, model_version: int) -> None:
        """Set a version number of the caller's choice, in the range of int32."""
        self._file.model_version = _int32("model_version", model_version)

    def get_model_version(self) -> int:
        """Return the number from `set_model_version`; 0 if it was not set."""
        return self._file.model_version

    def set_parameters(self, params: Mapping[str, OrtValue]) -> None:
        """Set the named tensors."""
        self._file.arrays = {name: value.numpy() for name, value in params.items()}

    def get_parameters(self) -> dict[str, OrtValue]:
        """Return the named tensors."""
        return {name: OrtValue(array) for name, array in self._file.arrays.items()}

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The named tensors as arrays."""
        return self._file.arrays

    @staticmethod
    def of(arrays: Mapping[str, NDArray[Any]], adapter_version: int = 1, model_version: int = 1) -> AdapterFormat:
        """Create the contents for `export_adapter` from arrays."""
        return _holding(AdapterFile(dict(arrays), adapter_version, model_version))


def _holding(file: AdapterFile) -> AdapterFormat:
    made = AdapterFormat()
    made._file = file
    return made


class LoraAdapter:
    """An adapter: values for inputs of a model. Pass it to `RunOptions.add_active_adapter`, as in onnxruntime."""

    def __init__(self) -> None:
        self.arrays: Mapping[str, NDArray[Any]] | None = None

    def Load(self, file_path: str | os.PathLike[str]) -> None:
        """Read an adapter file. Raises InputError if the file does not exist, is damaged, or is not an adapter."""
        self.arrays = read_adapter_file(Path(file_path)).arrays


def _int32(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
        raise InputError(
            f"{name} = {value!r}", "a 32-bit signed integer is expected", "pass an integer in the range of int32"
        )
    return int(value)
