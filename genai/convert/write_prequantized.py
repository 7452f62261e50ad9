"""Write weights that are already quantised, with unchanged values, for an operator that supports their format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError, QuantizedWeight, WeightFormat
from genai.quant.block_types import BlockType, dequantize, type_of, weight_of
from genai.quant.methods.rtn import quantize_blocks

from ..lora.names import REORDERED
from ..onnx.node import MS
from ..ops.weight_nodes import embedding_node, linear_node
from .graph_writer import UINT8, Dims, Export, WrittenWeight, hidden_dims
from .options import Precision
from .projection import Projection
from .weights import not_finite

Matrices = Iterable[tuple[str, NDArray[Any]]]


def as_stored(export: Export, projection: Projection, precision: Precision) -> Precision:
    """Replace "kept" with "blocks" for quantised matrices and with the float type for others; keep other precisions."""
    if precision != "kept":
        return precision
    kinds = export.weights.kinds(f"{prefix}.weight" for prefix in projection.weights)
    if len(kinds) == 1 and next(iter(kinds)).names:
        return "blocks"
    return "fp16" if kinds == {np.dtype(np.float16)} else "fp32"


def alike(export: Export, names: Iterable[str], precision: Precision) -> bool:
    """Return True if matrices can be written as one matrix: if "kept", they must share a type and a column order."""
    if precision != "kept":
        return True
    weights = [f"{name}.weight" for name in names]
    return len(export.weights.kinds(weights)) == len({_order_bytes(export, name) for name in weights}) == 1


def _order_bytes(export: Export, weight: str) -> bytes:
    order = export.weights.order(weight)
    return b"" if order is None else order.tobytes()


def write_prequantized_linear(
    export: Export, projection: Projection, root: str, dims: Dims, output: str | None = None
) -> str:
    """Write a matmul by quantised blocks, and return the name of its result."""
    kept, path = _write_matrix(export, projection), projection.path
    root = _in_order(export, root, export.weights.order(f"{projection.weights[0]}.weight"), projection.columns, dims)
    name = f"{path}/MatMul_Q{kept.product.attributes.get('bits', 4)}"
    attributes: dict[str, Any] = dict(kept.product.attributes)
    return export.graph.node(
        kept.product.op_type, kept.product.inputs(root, kept.names), name, dims,
        output=output or f"{path}/MatMul/output_0", domain=kept.product.domain, **attributes,
    )  # fmt: skip


def write_prequantized_embedding(export: Export, projection: Projection, ids: str, path: str) -> str:
    """Write a look-up of rows in a matrix of quantised blocks. A matmul that uses the matrix reads the same arrays."""
    graph, kept = export.graph, _write_matrix(export, projection, is_table=True)
    names, lookup = dict(kept.names), kept.lookup
    if lookup.domain == MS:  # GatherBlockQuantized expects the codes as rows
        shape = [projection.outputs, projection.columns * lookup.attributes["bits"] // 8]
        inputs = [names["codes"], graph.int64(shape)]
        names["codes"] = graph.node("Reshape", inputs, f"{path}/Reshape", shape, element=UINT8)
    attributes: dict[str, Any] = dict(lookup.attributes)
    dims = hidden_dims(projection.columns)
    rows = graph.node(
        lookup.op_type, lookup.inputs(ids, names), f"{path}/{lookup.op_type}", dims, domain=lookup.domain, **attributes
    )
    order = export.weights.order(f"{projection.weights[0]}.weight")
    return _in_order(export, rows, None if order is None else np.argsort(order), projection.columns, dims)


def _in_order(export: Export, value: str, order: NDArray[np.int64] | None, columns: int, like: Dims) -> str:
    """Permute a value's columns into the order of a matrix's columns. Matmuls with the same order share the result."""
    if order is None:
        return value
    key = value, order.tobytes()
    if key not in export.reordered:
        name = f"{value}{REORDERED}{len(export.reordered)}"
        indices = export.graph.array(f"{name}/indices", order.astype(np.int64))
        dims = hidden_dims(columns, sequence=like[1])
        export.reordered[key] = export.graph.node("Gather", [value, indices], name, dims, axis=2)
    return export.reordered[key]


def _write_matrix(export: Export, projection: Projection, *, is_table: bool = False) -> WrittenWeight:
    name = projection.weight_name
    if name not in export.prequantized:
        parts = [
            export.weights.stored(f"{prefix}.weight", (rows, projection.columns))
            for prefix, rows in zip(projection.weights, projection.rows, strict=True)
        ]
        blocks = np.concatenate(parts) if parts[1:] else parts[0]
        weight = _weight(f"{projection.weights[0]}.weight", blocks)
        product = linear_node(weight, accuracy_level=export.options.accuracy_level)
        kind = type_of(blocks)
        assert kind is not None
        export.weights.note_prequantized(kind.name, product.readers, len(parts))
        lookup = embedding_node(weight)
        if is_table and product.arrays.keys() != lookup.arrays.keys():  # both must read the same arrays
            product, lookup = (spell(weight, own=True) for spell in (linear_node, embedding_node))
        names = {part: export.graph.array(f"{name}_{part}", array) for part, array in product.arrays.items()}
        nothing = np.empty(0, np.uint8)
        product, lookup = (replace(one, arrays=dict.fromkeys(one.arrays, nothing)) for one in (product, lookup))
        export.prequantized[name] = WrittenWeight(product, lookup, names)
    return export.prequantized[name]


def _weight(name: str, blocks: NDArray[Any]) -> QuantizedWeight:
    try:
        return weight_of(blocks)
    except QuantizationError as error:
        raise not_finite(name) from error


_QMOE_READERS = "this package, onnxruntime"


def common_format(export: Export, names: Iterable[str]) -> WeightFormat | None:
    """Return the format shared by all of a layer's experts if QMoE supports it (integers, scales, zero points)."""
    names = list(names)
    first, *others = export.weights.kinds(names)
    kind = type_of(np.empty(0, first))
    if others or kind is None or not kind.is_uniform or any(export.weights.order(name) is not None for name in names):
        return None
    export.weights.note_prequantized(kind.name, _QMOE_READERS, len(names))
    return kind.format


def in_own_order(export: Export, name: str, shape: tuple[int, int]) -> NDArray[Any]:
    """Return a matrix as stored. All experts read the same input, so a matrix with permuted columns becomes floats."""
    is_ordered = export.weights.order(name) is None
    return export.weights.stored(name, shape) if is_ordered else export.weights.tensor(name, shape)


def expert_blocks(matrices: Matrices) -> QuantizedWeight:
    """Return one expert's matrices as one matrix, with their rows interleaved."""
    named = dict(matrices)
    parts = list(named.values())
    return _weight(next(iter(named)), np.stack(parts, axis=1).reshape(-1, parts[0].shape[1]) if parts[1:] else parts[0])


# Experts in formats that QMoE does not support are converted to integers of this width.
_BITS, _MIDDLE = 8, 128


def expert_block(kinds: Iterable[np.dtype[Any]]) -> int:
    """Return the block size for experts of these types that are converted to 8-bit integers."""
    types = [type_of(np.empty(0, kind)) for kind in kinds]
    return min(
        (kind.format.block_size for kind in types if kind is not None and 0 < kind.format.block_size <= 32), default=32
    )


def expert_integers(
    export: Export, matrices: Matrices, block_size: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Yield each expert's matrix as 8-bit integers and scales.

    Values that are integers times a block scale are represented exactly. Other values are quantised, and the error is
    added to `export.weights.rounded`.
    """
    for name, matrix in matrices:
        kind = type_of(matrix)
        found = None if kind is None else _whole_numbers(_weight(name, matrix), kind, block_size)
        if found is not None and kind is not None:
            export.weights.note_prequantized(f"{kind.name}, as {_BITS}-bit integers", _QMOE_READERS, 1)
            yield found
            continue
        values = matrix.astype(np.float32) if kind is None else dequantize(matrix)
        try:
            made = quantize_blocks(values, bits=_BITS, block_size=block_size)
        except QuantizationError as error:
            raise not_finite(name) from error
        integers = made.codes
        error_ = (integers.astype(np.float32) - _MIDDLE) * np.repeat(made.scales, block_size, 1)[
            :, : made.columns
        ] - values
        export.weights.note_rounded(kind.name if kind else "floats", float(np.sum(error_**2)), float(np.sum(values**2)))
        yield integers, made.scales


def _whole_numbers(
    weight: QuantizedWeight, kind: BlockType, block_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]] | None:
    """Return the same values as integers around 0 and one scale per block; None if this form cannot represent them."""
    unit = next((unit for unit in (1.0, 0.5, 0.25, 0.125) if not np.any(weight.grid / unit % 1)), None)
    points = _points(weight)
    if points is None or unit is None or np.abs(weight.grid).max() / unit > _MIDDLE:
        return None
    grid = (weight.grid / np.float32(unit)).astype(np.int16) + _MIDDLE
    if grid.max() - points.min() >= 1 << _BITS or grid.min() < points.max():
        return None
    scales = (
        weight.scales
        if weight.multipliers is None
        else np.repeat(weight.scales, weight.multipliers.shape[1] // weight.scales.shape[1], 1)
        * weight.multipliers.astype(np.float32)
    )
    width = weight.format.padded(weight.columns) // scales.shape[1]
    if width % block_size:
        return None
    integers = grid[weight.codes] - np.repeat(points, weight.columns // points.shape[1], 1)
    return integers.astype(np.uint8), np.repeat(scales * np.float32(unit), width // block_size, 1)


def _points(weight: QuantizedWeight) -> NDArray[np.int16] | None:
    """Return the zero point of each block's integers; None if an offset is not an integer multiple of its scale."""
    if weight.offsets is None:
        return np.zeros((weight.rows, 1), np.int16)
    is_point = weight.offset_scales is not None and np.array_equal(weight.scales, weight.offset_scales)
    return weight.offsets.astype(np.int16) if is_point and weight.multipliers is None else None
