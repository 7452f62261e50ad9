"""Fill the data file of a model folder with random numbers: `python -m tools.random_data FOLDER [--shape SHAPE]`.

A model's speed does not depend on its weights. Therefore, to measure speed on another machine, you need to copy only
the graph, a few hundred kilobytes. On that machine, this tool writes a data file of the required size in seconds. With
--shape, the tool builds the folder first. The matrices are then built with identical rows, because drawing and
quantising billions of numbers would take minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from genai.convert import DecoderSpec
from genai.convert.folder import write_model_folder
from genai.convert.options import ExportOptions
from genai.convert.tensors import Shape, tensor_shapes

from .peers.shapes import SHAPES
from .random_weights import random_tensor

_TYPES = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
}
# The count of numbers that are drawn once and repeated, more than a cache holds. Drawing billions would take minutes.
_DRAWN = 1 << 24


def fill(folder: Path, seed: int = 0) -> int:
    """Write the data files that FOLDER/model.onnx refers to; return their total size in bytes.

    Byte tensors get random bytes. Scales are chosen so that matrix products keep the magnitude of their inputs. Other
    matrices are normally distributed, and the elements of vectors are close to 1.

    Raises:
        ValueError: a tensor has a type that this function does not support.
    """
    rng, total = np.random.default_rng(seed), 0
    drawn = rng.integers(0, 256, _DRAWN, np.uint8)
    numbers = rng.standard_normal(_DRAWN, np.float32)
    for tensor, file, offset in _external(folder):
        if tensor.data_type not in _TYPES:
            raise ValueError(f"{tensor.name}: {onnx.TensorProto.DataType.Name(tensor.data_type)} is not supported")
        with file.open("r+b" if file.exists() else "w+b") as data:
            data.seek(offset)
            for part in _parts(tensor, drawn, numbers):
                data.write(part.data)
                total += part.nbytes
    return total


def _external(folder: Path) -> Iterator[tuple[onnx.TensorProto, Path, int]]:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            yield tensor, folder / entries["location"], int(entries.get("offset", 0))


def _parts(tensor: onnx.TensorProto, drawn: NDArray[np.uint8], numbers: NDArray[np.float32]) -> Iterator[NDArray[Any]]:
    dtype, left = _TYPES[tensor.data_type], int(np.prod(tensor.dims))
    if dtype == np.uint8:
        source = drawn
    elif tensor.name.endswith("scales"):
        scales = np.abs(numbers) * np.float32(0.002) + np.float32(0.002)
        source = scales.astype(np.float16).astype(dtype)  # float16 values, as our builder writes, in any storage type
    elif len(tensor.dims) > 1:
        source = (numbers * np.float32(tensor.dims[-1] ** -0.5)).astype(dtype)
    else:
        source = (1 + numbers * np.float32(0.1)).astype(dtype)
    while left:
        part = source[: min(left, len(source))]
        left -= len(part)
        yield part


class EvenWeights(Mapping[str, NDArray[np.float32]]):
    """Weights by Hugging Face name; all rows of a matrix are the same random numbers."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes: Mapping[str, Shape] = tensor_shapes(spec)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        shape = self._shapes[name]
        return np.broadcast_to(random_tensor(name, (*[1] * (len(shape) - 1), shape[-1]), 0), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def make(folder: Path, shape: str) -> Path:
    """Build a model folder of a real model's shape, INT4 in blocks of 32, and fill its data file."""
    spec = SHAPES[shape].spec
    write_model_folder(folder, spec, ExportOptions(), EvenWeights(spec))
    fill(folder)
    return folder


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, help="build the folder first, which must not exist")
    asked = parser.parse_args()
    if asked.shape:
        make(asked.folder, asked.shape)
    else:
        print(f"{fill(asked.folder) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
