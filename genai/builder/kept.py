"""Weights that are quantised already, written as they are: the same numbers, in the operator that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.blocks import QuantizationError, quantize_blocks
from genai.quant.formats import QuantizedWeight
from genai.quant.ggml import GgmlType, dequantise, type_of, weight_of

from ..graph.node import MS
from ..ops.weight_spelling import WeightSpelling, spell_lookup, spell_product
from .graph_writer import UINT8, Dims, Export, hidden_dims
from .options import Precision
from .weights import not_finite

if TYPE_CHECKING:
    from .layers import Projection

Matrices = Iterable[tuple[str, NDArray[Any]]]


def as_stored(export: Export, projection: Projection, precision: Precision) -> Precision:
    """What "kept" means for matrices: "blocks" that are quantised, or floats; any other precision stays."""
    if precision != "kept":
        return precision
    kinds = export.weights.kinds(f"{prefix}.weight" for prefix in projection.weights)
    if len(kinds) == 1 and next(iter(kinds)).names:
        return "blocks"
    return "fp16" if kinds == {np.dtype(np.float16)} else "fp32"


def alike(export: Export, names: Iterable[str], precision: Precision) -> bool:
    """Whether matrices can be written as one: those that are kept must be of one type."""
    return precision != "kept" or len(export.weights.kinds(f"{name}.weight" for name in names)) == 1


@dataclass(frozen=True)
class KeptMatrix:
    """A matrix that is in the graph: how its uses are spelled, without the arrays, and the names of these."""

    product: WeightSpelling
    lookup: WeightSpelling
    names: dict[str, str]


def write_kept_product(export: Export, projection: Projection, root: str, dims: Dims, output: str | None = None) -> str:
    """Multiply with a projection of blocks; returns the name of the result."""
    kept, path = _write_matrix(export, projection), projection.path
    name = f"{path}/MatMul_Q{kept.product.attributes['bits']}"
    attributes: dict[str, Any] = dict(kept.product.attributes)
    return export.graph.node(
        kept.product.op_type, kept.product.inputs(root, kept.names), name, dims,
        output=output or f"{path}/MatMul/output_0", domain=kept.product.domain, **attributes,
    )  # fmt: skip


def write_kept_lookup(export: Export, projection: Projection, ids: str, path: str) -> str:
    """Rows of a matrix of blocks by ids; where a product has the same matrix, both read the same arrays."""
    graph, kept = export.graph, _write_matrix(export, projection)
    names, lookup = dict(kept.names), kept.lookup
    if lookup.domain == MS:  # it wants its codes as rows
        shape = [projection.outputs, projection.columns * lookup.attributes["bits"] // 8]
        inputs = [names["codes"], graph.int64(shape)]
        names["codes"] = graph.node("Reshape", inputs, f"{path}/Reshape", shape, element=UINT8)
    attributes: dict[str, Any] = dict(lookup.attributes)
    return graph.node(
        lookup.op_type, lookup.inputs(ids, names), f"{path}/{lookup.op_type}", hidden_dims(projection.columns),
        domain=lookup.domain, **attributes,
    )  # fmt: skip


def _write_matrix(export: Export, projection: Projection) -> KeptMatrix:
    name = projection.weight_name
    if name not in export.kept:
        parts = [
            export.weights.stored(f"{prefix}.weight", (rows, projection.columns))
            for prefix, rows in zip(projection.weights, projection.rows, strict=True)
        ]
        weight = _weight(f"{projection.weights[0]}.weight", np.concatenate(parts) if parts[1:] else parts[0])
        product = spell_product(weight, accuracy_level=export.options.accuracy_level)
        lookup = spell_lookup(weight)
        names = {part: export.graph.array(f"{name}_{part}", array) for part, array in product.arrays.items()}
        nothing = np.empty(0, np.uint8)
        product, lookup = (replace(one, arrays=dict.fromkeys(one.arrays, nothing)) for one in (product, lookup))
        export.kept[name] = KeptMatrix(product, lookup, names)
    return export.kept[name]


def _weight(name: str, blocks: NDArray[Any]) -> QuantizedWeight:
    try:
        return weight_of(blocks)
    except QuantizationError as error:
        raise not_finite(name) from error


# The integers that a mixture of experts is stored in.
_BITS, _MIDDLE = 8, 128


def expert_block(kinds: Iterable[np.dtype[Any]]) -> int:
    """Columns that share a scale where experts of these types become integers of 8 bits."""
    types = [type_of(np.empty(0, kind)) for kind in kinds]
    return min(
        (kind.form.block_size for kind in types if kind is not None and 0 < kind.form.block_size <= 32), default=32
    )


def expert_integers(
    export: Export, matrices: Matrices, block_size: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Each expert's matrix as integers of 8 bits and scales: exact where its values are integers of blocks.

    What is not exact is rounded, and how far it is off is noted in `export.weights.rounded`.
    """
    for name, matrix in matrices:
        kind = type_of(matrix)
        found = None if kind is None else _whole_numbers(_weight(name, matrix), kind, block_size)
        if found is not None:
            yield found
            continue
        values = matrix.astype(np.float32) if kind is None else dequantise(matrix)
        try:
            made = quantize_blocks(values, bits=_BITS, block_size=block_size)
        except QuantizationError as error:
            raise not_finite(name) from error
        integers = made.data.reshape(made.n, -1)[:, : made.k]
        error_ = (integers.astype(np.float32) - _MIDDLE) * np.repeat(made.scales, block_size, 1)[:, : made.k] - values
        export.weights.note_rounded(kind.name if kind else "floats", float(np.sum(error_**2)), float(np.sum(values**2)))
        yield integers, made.scales


def _whole_numbers(
    weight: QuantizedWeight, kind: GgmlType, block_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]] | None:
    """The same values as whole numbers around 0 times a scale per block; None where they are no such numbers."""
    unit = next((unit for unit in (1.0, 0.5, 0.25, 0.125) if not np.any(weight.grid / unit % 1)), None)
    if weight.offsets is not None or unit is None or np.abs(weight.grid).max() / unit > _MIDDLE:
        return None
    grid = (weight.grid / np.float32(unit)).astype(np.int16) + _MIDDLE
    if grid.max() >= 1 << _BITS:
        return None
    scales = (
        weight.scales
        if weight.multipliers is None
        else np.repeat(weight.scales, weight.multipliers.shape[1] // weight.scales.shape[1], 1)
        * weight.multipliers.astype(np.float32)
    )
    width = weight.format.padded(weight.k) // scales.shape[1]
    if width % block_size:
        return None
    return grid.astype(np.uint8)[weight.codes], np.repeat(scales * np.float32(unit), width // block_size, 1)
