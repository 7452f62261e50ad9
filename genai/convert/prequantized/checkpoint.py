"""A checkpoint folder with quantised weights: the matrices, by their names in float checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.block_types import type_of

from ...errors import InputError
from ..checkpoint import CONFIG, Checkpoint, read_json
from ..hf_config import HFConfig
from .formats import KEYS, OLD_FILES, StoredQuantisation, quantisation_of
from .matrices import FLOAT32, LazyMatrix


def read_quantisation(folder: Path) -> StoredQuantisation | None:
    """Return the quantisation of a folder's weights according to its JSON files. Raises as `quantisation_of` does."""
    old = {name: read_json(folder, name) for name in OLD_FILES if (folder / name).is_file()}
    return quantisation_of(read_json(folder, CONFIG), old)


def without_quantisation(config: HFConfig) -> HFConfig:
    """Return the values in config.json, except those about quantisation."""
    return config.with_values({key: value for key, value in config.values.items() if key not in KEYS})


class QuantisedCheckpoint(Checkpoint):
    """Tensors by their names in float checkpoints; quantised matrices are arrays of blocks, or float32.

    Raises:
        ModelFolderError, InputError, ConfigError: as Checkpoint does, or settings and tensors contradict each other.
        UnsupportedModelError: the format is not supported.
    """

    def __init__(self, folder: str | Path, quantisation: StoredQuantisation) -> None:
        super().__init__(folder)
        self.quantisation, self.precision = quantisation, quantisation.precision
        self.config = without_quantisation(self.config)
        plain = {name: super(QuantisedCheckpoint, self).__getitem__(name) for name in self._file_of}
        self._matrices: dict[str, LazyMatrix] = {}
        self._last: tuple[str, NDArray[Any]] = "", np.empty(0)
        for name, matrix in quantisation.format.read(plain, quantisation.settings):
            if name in self._matrices or (name in plain and name not in matrix.parts):
                raise InputError(
                    f"{name} is stored twice", "each matrix must be stored only once", "download the checkpoint again"
                )
            self._matrices[name] = matrix
        if not self._matrices:
            raise InputError(
                f"{self.folder}: quantization_config sets {quantisation.method}, but no tensor has this format",
                "no tensor has a name that this format uses",
                "if the weights are floats, remove quantization_config from config.json",
            )
        parts = {part for matrix in self._matrices.values() for part in matrix.parts}
        self._plain = [name for name in plain if name not in parts]
        self.remarks += self._remarks()

    def _remarks(self) -> list[str]:
        """Return remarks about the matrices that cannot keep their format."""
        title = self.quantisation.format.title
        lost = Counter(matrix.why for matrix in self._matrices.values() if matrix.why)
        count = len(self._matrices)
        return [
            f"{number} of {count} {title} matrices are converted to floats, then to the requested precision: no block "
            f"format supports {why}"
            for why, number in lost.items()
        ]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._matrices:
            return super().__getitem__(name)
        if self._last[0] != name:  # the experts of a layer and the parts of fused projections share one tensor
            self._last = "", np.empty(0)
            self._last = name, self._matrices[name].read()
        return self._last[1]

    def __contains__(self, name: object) -> bool:
        return name in self._matrices or name in self._plain

    def __iter__(self) -> Iterator[str]:
        yield from self._matrices
        yield from self._plain

    def __len__(self) -> int:
        return len(self._matrices) + len(self._plain)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._matrices[name].shape if name in self._matrices else super().shape(name)

    def kind(self, name: str) -> np.dtype[Any]:
        return self._matrices[name].dtype if name in self._matrices else super().kind(name)

    def nbytes(self, name: str) -> int:
        matrix = self._matrices.get(name)
        if matrix is None:
            return super().nbytes(name)
        if matrix.dtype == FLOAT32:
            return math.prod(matrix.shape) * 4
        return _block_bytes(matrix.dtype, math.prod(matrix.shape[:-1]), matrix.shape[-1])

    def order(self, name: str) -> NDArray[np.int64] | None:
        return self._matrices[name].order if name in self._matrices else None


def _block_bytes(dtype: np.dtype[Any], rows: int, columns: int) -> int:
    kind = type_of(np.empty(0, dtype))
    assert kind is not None
    return rows * (columns // kind.columns) * kind.nbytes
