"""Linear layers: MatMul on float32 weights, or MatMulNBits on block-quantised ones, and an optional bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.blocks import QuantizationError, QuantizedBlocks, num_blocks
from genai.quant.rtn import quantize_blocks

from .export import Export, hidden_dims
from .graph_writer import CONTRIB, FLOAT
from .options import BITS, ExportOptions, Precision
from .weights import narrowed, not_finite, transposed_chunks


@dataclass(frozen=True)
class Projection:
    """Matrices that are applied together, one below the other, and what they are called in the graph.

    Attributes:
        path: of the layer in the graph, such as "/model/layers.0/attn/qkv_proj".
        weights: Hugging Face names of the matrices, without ".weight".
        rows: outputs of each. columns: inputs, the same for all.
        biases: Hugging Face names of the biases, without ".bias"; None means those of the matrices.
    """

    path: str
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    biases: tuple[str, ...] | None = None

    @property
    def outputs(self) -> int:
        return sum(self.rows)

    @property
    def weight_name(self) -> str:
        """Name of the initialiser, before the suffixes of quantised ones."""
        return self.path[1:].replace("/", ".") + ".MatMul.weight"


def write_linear(
    export: Export,
    projection: Projection,
    root: str,
    *,
    precision: Precision,
    bias: bool = False,
    output: str | None = None,
    sequence: int | str = "sequence_length",
) -> str:
    """Apply a projection to `root`; returns the name of the result."""
    graph, name = export.graph, f"{projection.path}/MatMul"
    dims = hidden_dims(projection.outputs, sequence=sequence)
    inputs = [root, *write_matrix(export, projection, precision)]
    if precision not in BITS:
        result = graph.node("MatMul", inputs, name, dims, output=None if bias else output)
    else:
        result = graph.node(
            "MatMulNBits",
            inputs,
            f"{name}_Q{BITS[precision]}",
            dims,
            output=f"{name}/output_0" if bias or output is None else output,
            domain=CONTRIB,
            **_attributes(projection, precision, export.options),
        )
    if not bias:
        return result
    inputs = [result, _write_bias(export, projection)]
    return graph.node("Add", inputs, f"{projection.path}/Add", dims, output=output)


def write_matrix(export: Export, projection: Projection, precision: Precision) -> list[str]:
    """Write a projection's weights unless they are there; returns the names of the matrix, its scales, zero points."""
    if precision not in BITS:
        return [_write_floats(export, projection, precision)]
    return write_blocks(export, projection, projection.weight_name, precision)


def _write_floats(export: Export, projection: Projection, precision: Precision) -> str:
    dims = (projection.columns, projection.outputs)

    def chunks() -> Iterator[NDArray[np.float32]]:
        yield from transposed_chunks(dict(_matrices(export, projection)))

    return write_float_tensor(export, projection.weight_name, dims, chunks(), precision)


def write_float_tensor(
    export: Export, name: str, dims: tuple[int, ...], chunks: Iterator[NDArray[np.float32]], precision: Precision
) -> str:
    """Write a matrix as float32, or as float16 that a Cast widens, unless it is there; returns the wide one's name."""
    graph, wide = export.graph, f"{name}/float32"
    if precision != "fp16":
        return name if graph.has_initializer(name) else graph.initializer(name, dims, np.float32, chunks)
    if not graph.has_initializer(name):
        graph.initializer(name, dims, np.float16, (narrowed(name, chunk) for chunk in chunks))
        graph.node("Cast", [name], f"{name}/Cast", list(dims), output=wide, to=FLOAT)
    return wide


def write_blocks(export: Export, projection: Projection, name: str, precision: Precision) -> list[str]:
    """As write_matrix, for a quantised precision and with a name of its own."""
    graph, options, bits = export.graph, export.options, BITS[precision]
    suffixes = [f"_Q{bits}", "_scales"] + ([] if options.symmetric else ["_zero_points"])
    names = [name + suffix for suffix in suffixes]
    if graph.has_initializer(names[0]):
        return names
    blocks = num_blocks(projection.columns, options.block_size)
    scales: list[NDArray[np.float32]] = []
    points: list[NDArray[np.uint8]] = []

    def packed_rows() -> Iterator[NDArray[np.uint8]]:
        for name, matrix in _matrices(export, projection):
            quantized = quantized_matrix(name, matrix, bits, options)
            scales.append(quantized.scales)
            if quantized.zero_points is not None:
                points.append(quantized.zero_points)
            yield quantized.data

    dims = (projection.outputs, blocks, options.block_size * bits // 8)
    graph.initializer(names[0], dims, np.uint8, packed_rows())
    graph.array(names[1], np.concatenate(scales))
    if points:
        graph.array(names[2], np.concatenate(points))
    return names


def quantized_matrix(name: str, matrix: NDArray[Any], bits: int, options: ExportOptions) -> QuantizedBlocks:
    """Quantise one matrix [rows, columns] as the options say."""
    try:
        return quantize_blocks(
            matrix,
            bits=bits,
            block_size=options.block_size,
            symmetric=options.symmetric,
            half_scales=options.half_scales,
        )
    except QuantizationError as error:
        raise not_finite(name) from error


def _matrices(export: Export, projection: Projection) -> Iterator[tuple[str, NDArray[Any]]]:
    for prefix, rows in zip(projection.weights, projection.rows, strict=True):
        name = f"{prefix}.weight"
        yield name, export.weights.tensor(name, (rows, projection.columns))


def _write_bias(export: Export, projection: Projection) -> str:
    parts = zip(projection.biases or projection.weights, projection.rows, strict=True)
    bias = np.concatenate([export.weights.vector(f"{prefix}.bias", rows) for prefix, rows in parts])
    return export.graph.array(projection.path[1:].replace("/", ".") + ".Add.bias", bias)


def _attributes(projection: Projection, precision: Precision, options: ExportOptions) -> dict[str, Any]:
    attributes = {
        "K": projection.columns,
        "N": projection.outputs,
        "bits": BITS[precision],
        "block_size": options.block_size,
    }
    # 0 is the operator's default and is left out.
    return attributes | ({"accuracy_level": options.accuracy_level} if options.accuracy_level else {})
