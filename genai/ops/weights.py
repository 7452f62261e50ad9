"""The stored weights of nodes: their inputs are checked, and described as the weights of ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.checks import FormatError
from genai.kernels.ir import BlockWeight
from genai.kernels.weight_layout import check_block_format
from genai.kernels.weights import BLOCKS, ROW, QuantizedWeight, WeightFormat, uniform_format
from genai.quant.formats import GRIDS

from ..onnx.own_functions import QUANTIZED_PRODUCT
from .registry import KernelError, NodeSpec

BNB4_PRODUCT = "MatMulBnb4"
# The inputs that contain the parts of a weight, in order, for products and for look-ups.
PRODUCT_INPUTS, LOOKUP_INPUTS = (1, 2, 3, 4, 5, 6), (0, 2, 3, 4, 5, 6)
BIAS, ADDEND = 7, 8
_BNB4_GRIDS = ("fp4", "nf4")
# The com.microsoft operator for a product with a constant matrix of 2-, 4- or 8-bit integers in blocks.
BLOCK_PRODUCT = "MatMulNBits"
_BITS = (2, 4, 8)
PRODUCTS = ("MatMul", "Gemm", BLOCK_PRODUCT, QUANTIZED_PRODUCT, "MatMulBnb4")
# Products that the option `accuracy` applies to: see NodeSpec.exact.
ROUNDING_PRODUCTS = (BLOCK_PRODUCT, "QMoE", QUANTIZED_PRODUCT, "MatMulBnb4")


def check_bits(bits: int) -> None:
    """Raise FormatError for bit widths that onnxruntime's blocks do not support."""
    if bits not in _BITS:
        raise FormatError(f"bits is {bits}, but it must be 2, 4 or 8")


def uniform_weight(
    names: Sequence[str], rows: int, columns: int, bits: int, block_size: int, experts: int = 0, *,
    interleaved: bool = False,
) -> BlockWeight:  # fmt: skip
    """Return a weight of onnxruntime's operators, given the names of codes, scales and zero points ("" = none).

    Raises:
        FormatError: no kernel supports the bits or the block size.
    """
    check_bits(bits)
    check_block_format(bits, block_size)
    data, scales, points = names
    format = uniform_format(bits, block_size, zero_points=bool(points))
    return BlockWeight(data, scales, points, rows, columns, format, experts, interleaved)


def check_stored(weight: BlockWeight, data: NDArray[Any], scales: NDArray[Any], row_scales: int = 0) -> None:
    """Check that stored arrays have the size and shape that a weight requires.

    Args:
        row_scales: number of scales per row; 0 = one per block.

    Raises:
        FormatError: an array has another size.
    """
    rows, blocks = max(weight.experts, 1) * weight.rows, -(-weight.columns // weight.block_size)
    whole = rows * blocks * weight.block_size * weight.bits // 8
    short = rows * -(-weight.columns * weight.bits // 8) if weight.experts else whole
    for name, array, sizes in (("weight", data, (whole, short)), ("scales", scales, (rows * (row_scales or blocks),))):
        if array.size not in sizes:
            raise FormatError(
                f"{name} has {array.size} entries in shape {list(array.shape)}, but it must have {sizes[0]} entries"
            )


def own_weight(spec: NodeSpec, indices: Sequence[int]) -> BlockWeight:
    """Return the weight of a genai operator, from the arrays at the inputs `indices`.

    Raises:
        KernelError: an attribute contradicts the arrays' shapes.
    """
    attributes = spec.attributes
    rows, columns, bits = (int(attributes[name]) for name in ("N", "K", "bits"))
    block_size = int(attributes["block_size"])
    codes, _, scales, multipliers, _, offsets = (spec.constant(index) for index in indices)
    if codes.ndim != 2 or scales.ndim != 2 or min(rows, columns, block_size) < 1 or not scales.shape[1]:
        raise KernelError(
            f"{spec.op_type}: the codes have shape {list(codes.shape)} and the scales have shape "
            f"{list(scales.shape)}, N is {rows}, K is {columns} and block_size is {block_size}, but codes and "
            "scales must be matrices, and all sizes must be at least 1"
        )
    width, groups = codes.shape[1] * 8 // max(bits, 1), scales.shape[1]
    if block_size not in BLOCKS and block_size == width:
        block_size = ROW
    whole_blocks = -(-columns // block_size) * block_size if block_size else width
    group_size = ROW if groups == 1 and width == whole_blocks and block_size != width else width // groups
    if block_size == ROW:
        group_size = ROW
    has_multipliers, has_offsets = not _stands_in(multipliers, 1), not _stands_in(offsets, 0)
    multiplier_bits = int(attributes["multiplier_bits"]) if has_multipliers else 0
    zero = int(attributes["multiplier_zero"])
    format = WeightFormat(
        bits, block_size, group_size, multiplier_bits, has_multipliers and zero != 0,
        int(attributes["offset_bits"]) if has_offsets else 0,
    )  # fmt: skip
    if zero != format.multiplier_zero:
        raise KernelError(f"{spec.op_type}: multiplier_zero is {zero}, but it must be {format.multiplier_zero} or 0")
    data, grid, scale, multiplier, offset_scale, offset = (spec.constant_name(index) for index in indices)
    weight = BlockWeight(
        data, scale, offset if has_offsets else "", rows, columns, format, grid=grid,
        multipliers=multiplier if has_multipliers else "", offset_scales=offset_scale if has_offsets else "",
    )  # fmt: skip
    weight_arrays(spec, weight)
    return weight


def _stands_in(array: Any, number: int) -> bool:
    """Return True if an array is the single number that replaces absent multipliers or offsets."""
    return bool(array.shape == (1, 1) and array[0, 0] == number)


def weight_arrays(spec: NodeSpec, weight: BlockWeight) -> QuantizedWeight:
    """Return the weight's arrays, after checking them."""
    return weight.load(lambda name: spec.constant(spec.inputs.index(name)))


def bnb4_weight(spec: NodeSpec) -> BlockWeight | None:
    """Return the weight of a MatMulBnb4: codes [N, K], the first of a pair in the high bits, one scale per block.

    The blocks divide the flattened matrix, so a block can extend over the end of a row. Such a block is split into
    smaller blocks that end with the rows. If they would be too small for the kernels, the result is None.

    Raises:
        KernelError: no kernel supports its form.
    """
    rows, columns, block_size = _bnb4_sizes(spec)
    inside = math.gcd(columns, block_size)
    if inside not in BLOCKS:
        return None
    data, scales = spec.constant_name(1), spec.constant_name(2)
    format, values = WeightFormat(4, inside, inside), tuple(_bnb4_grid(spec).tolist())
    weight = BlockWeight(data, scales, "", rows, columns, format, values=values, flat_block=block_size)
    weight_arrays(spec, weight)
    return weight


def dense_bnb4(spec: NodeSpec) -> NDArray[np.float32]:
    """Return the weight of a MatMulBnb4 as float32 [N, K], for any K.

    Raises:
        KernelError: an array has the wrong type or size, or no kernel supports its form.
    """
    rows, columns, block_size = _bnb4_sizes(spec)
    data, scales = spec.constant(1), spec.constant(2)
    count = rows * columns
    sizes = -(-count // 2), -(-count // block_size)
    if data.dtype != np.uint8 or scales.dtype.kind != "f" or (data.size, scales.size) != sizes:
        raise KernelError(
            f"{BNB4_PRODUCT}: the codes are {data.dtype}{list(data.shape)} and the scales are {scales.dtype}"
            f"{list(scales.shape)}, but {sizes[0]} bytes and {sizes[1]} scales are expected"
        )
    codes = np.stack([data.reshape(-1) >> 4, data.reshape(-1) & 15], axis=1).reshape(-1)[:count]
    values = _bnb4_grid(spec)[codes]
    values *= np.repeat(scales.reshape(-1).astype(np.float32), block_size)[:count]
    return values.reshape(rows, columns)


def _bnb4_sizes(spec: NodeSpec) -> tuple[int, int, int]:
    """Return N, K and the block size of a MatMulBnb4, after checking its attributes."""
    attributes = spec.attributes
    rows, columns, block_size = (int(attributes[name]) for name in ("N", "K", "block_size"))
    kind = int(attributes["quant_type"])
    if kind not in range(len(_BNB4_GRIDS)) or not int(attributes.get("transB", 1)):
        raise KernelError(
            f"{BNB4_PRODUCT}: quant_type {kind}, or a matrix that is not transposed (transB=0), is not supported"
        )
    if min(rows, columns) < 1 or block_size not in BLOCKS:
        raise KernelError(
            f"{BNB4_PRODUCT}: N is {rows}, K is {columns} and block_size is {block_size}, but N and K must be at least "
            f"1, and block_size must be one of {', '.join(map(str, BLOCKS))}"
        )
    return rows, columns, block_size


def _bnb4_grid(spec: NodeSpec) -> NDArray[np.float32]:
    return GRIDS[_BNB4_GRIDS[int(spec.attributes["quant_type"])]]
