"""Nodes for quantised weights: each weight is written with the operator that most runtimes support.

Blocks of 2, 4 and 8 bits use onnxruntime's own operators, and NF4 and FP4 in whole blocks use its MatMulBnb4. All other
formats use an operator of the genai domain. Models with such operators contain functions that define them
(`onnx.own_functions`). Runtimes that expand functions can run these models; they dequantise the weights at load time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import BLOCKS, QuantizedWeight, pack_bits, uniform_grid
from genai.quant.formats import GRIDS

from ..common.renamed import renamed_names
from ..onnx.node import MS, OURS
from ..onnx.own_functions import QUANTIZED_LOOKUP, QUANTIZED_PRODUCT
from .weights import BLOCK_PRODUCT, BNB4_PRODUCT

_BLOCK_BITS = (2, 4, 8)
# The bit widths that onnxruntime's GatherBlockQuantized supports.
_TABLE_BITS = (4, 8)
_STAND_IN_BITS = 8

__getattr__ = renamed_names(
    __name__, spell_product="linear_node", spell_lookup="embedding_node", WeightSpelling="WeightNode"
)


@dataclass(frozen=True)
class WeightNode:
    """A node that multiplies with a weight, or looks up its rows.

    Attributes:
        arrays: constants by name, in the order of the inputs; the computed input, x or ids, is at index `computed`.
        readers: the runtimes that support the node.
    """

    domain: str
    op_type: str
    attributes: Mapping[str, int]
    arrays: Mapping[str, NDArray[Any]]
    computed: int
    readers: str = field(default="this package; other runtimes use its function, with weights in float32")

    def inputs(self, computed: str, names: Mapping[str, str]) -> list[str]:
        """Return the node's inputs, given the names of the computed value and of the constants."""
        found = [names[name] for name in self.arrays]
        return [*found[: self.computed], computed, *found[self.computed :]]


def linear_node(weight: QuantizedWeight, *, accuracy_level: int = 4, own: bool = False) -> WeightNode:
    """Return a node that computes x @ W^T.

    Args:
        accuracy_level: 4 = activations may be quantised to 8 bits, 0 or 1 = they remain float32.
        own: True to use the genai operator even if onnxruntime has one.
    """
    format = weight.format
    level = {"accuracy_level": accuracy_level} if accuracy_level else {}
    sizes = {"N": weight.rows, "K": weight.columns}
    if not own and is_uniform(weight, _BLOCK_BITS):
        attributes = {**sizes, "bits": format.bits, "block_size": format.block_size, **level}
        return WeightNode(MS, BLOCK_PRODUCT, attributes, uniform_arrays(weight), 0, "this package, onnxruntime")
    kind = None if own else _bnb4_kind(weight)
    if kind is not None:
        swapped = weight.data >> np.uint8(4) | weight.data << np.uint8(4)
        arrays = {"codes": swapped.reshape(-1), "scales": weight.scales.reshape(-1)}
        attributes = {**sizes, "block_size": format.block_size, "quant_type": kind}
        return WeightNode(MS, BNB4_PRODUCT, attributes, arrays, 0, "this package, onnxruntime")
    return WeightNode(OURS, QUANTIZED_PRODUCT, {**_own_attributes(weight), **level}, _own_arrays(weight), 0)


def embedding_node(weight: QuantizedWeight, *, own: bool = False, cut: bool = False) -> WeightNode:
    """Return a node that looks up rows of W by ids.

    Args:
        own: True to use the genai operator even if onnxruntime has one.
        cut: True if the caller removes the padding columns that round W up to whole blocks.
    """
    format = weight.format
    if not own and is_uniform(weight, _TABLE_BITS) and (cut or not weight.columns % format.block_size):
        attributes = {"bits": format.bits, "block_size": format.block_size, "gather_axis": 0, "quantize_axis": 1}
        arrays = uniform_arrays(weight)
        arrays["codes"] = weight.data
        return WeightNode(MS, "GatherBlockQuantized", attributes, arrays, 1, "this package, onnxruntime")
    return WeightNode(OURS, QUANTIZED_LOOKUP, _own_attributes(weight), _own_arrays(weight), 1)


def is_uniform(weight: QuantizedWeight, bits: tuple[int, ...]) -> bool:
    """Return True if onnxruntime supports the blocks: integers with one scale per block, and optional zero points."""
    format = weight.format
    if format.bits not in bits or format.block_size not in BLOCKS or format.multiplier_bits:
        return False
    if format.group_size != format.block_size or format.offset_bits not in (0, format.bits):
        return False
    if format.offset_bits and not np.array_equal(weight.scales, weight.offset_scales):  # type: ignore[arg-type]
        return False
    return bool(np.array_equal(weight.grid, uniform_grid(format.bits, centred=not format.offset_bits)))


def uniform_arrays(weight: QuantizedWeight) -> dict[str, NDArray[Any]]:
    """Return MatMulNBits' arrays: codes [N, blocks, bytes], scales [N, blocks], and zero points if present.

    The zero points of a row are packed, uint8 [N, ceil(blocks * bits / 8)].
    """
    blocks = weight.scales.shape[1]
    arrays: dict[str, NDArray[Any]] = {"codes": weight.data.reshape(weight.rows, blocks, -1), "scales": weight.scales}
    if weight.offsets is not None:
        arrays["zero_points"] = pack_bits(weight.offsets, weight.format.bits)
    return arrays


def _bnb4_kind(weight: QuantizedWeight) -> int | None:
    """Return MatMulBnb4's quant_type for the weight, or None if it does not support the weight."""
    format = weight.format
    plain = (
        format.bits == 4
        and not (format.multiplier_bits or format.offset_bits)
        and format.group_size == format.block_size
    )
    if not plain or format.block_size not in BLOCKS or weight.columns % format.block_size:
        return None
    kinds = [kind for kind, name in enumerate(("fp4", "nf4")) if np.array_equal(weight.grid, GRIDS[name])]
    return kinds[0] if kinds else None


def _own_attributes(weight: QuantizedWeight) -> dict[str, int]:
    format = weight.format
    return {
        "N": weight.rows,
        "K": weight.columns,
        "bits": format.bits,
        "block_size": format.block_size or format.padded(weight.columns),
        "multiplier_bits": format.multiplier_bits or _STAND_IN_BITS,
        "multiplier_zero": format.multiplier_zero,
        "offset_bits": format.offset_bits or _STAND_IN_BITS,
    }


def _own_arrays(weight: QuantizedWeight) -> dict[str, NDArray[Any]]:
    format = weight.format
    narrow = np.float16 if weight.half_scales else np.float32
    arrays: dict[str, NDArray[Any]] = {
        "codes": weight.data,
        "grid": weight.grid,
        "scales": weight.scales.astype(narrow),
        "multipliers": np.ones((1, 1), np.uint8),
        "offset_scales": np.zeros((1, 1), narrow),
        "offsets": np.zeros((1, 1), np.uint8),
    }
    if weight.multipliers is not None:
        stored = (weight.multipliers + np.int16(format.multiplier_zero)).astype(np.uint8)
        arrays["multipliers"] = pack_bits(stored, format.multiplier_bits)
    if weight.offset_scales is not None and weight.offsets is not None:
        same = weight.offset_scales is weight.scales
        arrays["offset_scales"] = arrays["scales"] if same else weight.offset_scales.astype(narrow)
        arrays["offsets"] = pack_bits(weight.offsets, format.offset_bits)
    return arrays
