"""Adapter files (`.onnx_adapter`) by onnxruntime's classes; `genai.weight_files.onnx_adapter` reads and writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...weight_files.onnx_adapter import FORMAT_VERSION, OnnxAdapter, read_onnx_adapter, write_onnx_adapter
from .values import OrtValue


class AdapterFormat:
    """The contents of an adapter file; as in onnxruntime."""

    def __init__(self, adapter: AdapterFormat | None = None) -> None:
        self._contents: OnnxAdapter = OnnxAdapter({}) if adapter is None else adapter._contents

    @staticmethod
    def read_adapter(file_path: str | os.PathLike[str]) -> AdapterFormat:
        """Read a file.

        Raises:
            InputError: there is no such file, or it is damaged or no adapter.
        """
        found = AdapterFormat()
        found._contents = read_onnx_adapter(file_path)
        return found

    def export_adapter(self, file_path: str | os.PathLike[str]) -> None:
        """Write a file. Raises InputError: the system refuses it."""
        write_onnx_adapter(self._contents, file_path)

    def get_format_version(self) -> int:
        """The version of the file's form: 1."""
        return FORMAT_VERSION

    def set_adapter_version(self, adapter_version: int) -> None:
        """A number of the caller's, in the range of int32."""
        self._contents = replace(self._contents, adapter_version=_int32("adapter_version", adapter_version))

    def get_adapter_version(self) -> int:
        """What `set_adapter_version` set; 0 if nothing did."""
        return self._contents.adapter_version

    def set_model_version(self, model_version: int) -> None:
        """A number of the caller's, in the range of int32."""
        self._contents = replace(self._contents, model_version=_int32("model_version", model_version))

    def get_model_version(self) -> int:
        """What `set_model_version` set; 0 if nothing did."""
        return self._contents.model_version

    def set_parameters(self, params: Mapping[str, OrtValue]) -> None:
        """Set the named tensors."""
        self._contents = replace(self._contents, arrays={name: value.numpy() for name, value in params.items()})

    def get_parameters(self) -> dict[str, OrtValue]:
        """The named tensors."""
        return {name: OrtValue(array) for name, array in self._contents.arrays.items()}

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The named tensors as arrays."""
        return self._contents.arrays

    @staticmethod
    def of(arrays: Mapping[str, NDArray[Any]], adapter_version: int = 1, model_version: int = 1) -> AdapterFormat:
        """What `export_adapter` is to write, from arrays."""
        made = AdapterFormat()
        made._contents = OnnxAdapter(dict(arrays), adapter_version, model_version)
        return made


class LoraAdapter:
    """Values for inputs of a model, for `RunOptions.add_active_adapter`; as in onnxruntime."""

    def __init__(self) -> None:
        self.arrays: Mapping[str, NDArray[Any]] | None = None

    def Load(self, file_path: str | os.PathLike[str]) -> None:
        """Read an adapter file. Raises InputError: there is no such file, or it is damaged or no adapter."""
        self.arrays = read_onnx_adapter(file_path).arrays


def _int32(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
        raise InputError(f"{name} = {value!r}", "a whole number that fits 32 bits is expected", "pass one")
    return int(value)
