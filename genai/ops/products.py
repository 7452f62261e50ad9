"""Products of block-quantised and dense matrices with rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.checks import FormatError
from genai.kernels.cpu.arrays.functions import BlockLinear
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.ir import BlockWeight, Branch, DenseWeight, Product
from genai.kernels.weight_layout import BlockMatrix, check_block_format

from ..lowering.rows import Kind, NotFlattenable, RowDim
from ..lowering.rules import (
    Made,
    NodeRows,
    NodeTypes,
    Packed,
    RowSpec,
    States,
    record_rule,
    row_rule,
    shape_rule,
    stored_weights,
)
from ..onnx.node import MS, OURS
from ..onnx.own_functions import QUANTIZED_PRODUCT
from ..onnx.types import TensorType, Type
from .registry import Kernel, KernelError, NodeSpec, register

# Of com.microsoft: a product with a constant matrix of 2, 4 or 8-bit integers in blocks.
BLOCK_PRODUCT = "MatMulNBits"
_BITS = (2, 4, 8)
PRODUCTS = ("MatMul", "Gemm", BLOCK_PRODUCT, QUANTIZED_PRODUCT, "MatMulBnb4")
# How weights with one scale per column are cut into blocks, and how many rows are repacked at once.
_WHOLE_COLUMN_BLOCK, _REPACK_ROWS = 64, 1024
# Products that `accuracy` speaks of: see NodeSpec.exact.
ROUNDING_PRODUCTS = (BLOCK_PRODUCT, "QMoE", "DequantizedMatMul", QUANTIZED_PRODUCT, "MatMulBnb4")


def packed_blocks(
    spec: NodeSpec, data: int, scales: int, points: int, *, n: int, k: int, bits: int, block: int
) -> BlockMatrix:
    """The weight in packed form, shared by every node that reads the same bytes in the same shape."""
    check_bits(bits)
    zero_points = spec.constant(points) if spec.has(points) else None
    return spec.pack(
        (data, scales, points),
        f"block_matrix[{n},{k}]:{bits}:{block}",
        lambda: pack_matrix(
            spec.constant(data), spec.constant(scales), zero_points, n=n, k=k, bits=bits, block_size=block,
            threads=spec.options.get("threads"),
            arena=spec.options.get("arena"),
        ),
    )  # fmt: skip


@register(BLOCK_PRODUCT, domain=MS)
def matmul_nbits(spec: NodeSpec) -> Kernel:
    """x @ W^T + bias + addend. Input 6, ours, is an addend per token: the place of a low-rank adapter's output."""
    attributes = spec.attributes
    if spec.has(4):
        raise KernelError("a block-quantised product with g_idx (reordered groups) is not supported")
    if int(attributes.get("weight_prepacked", 0)):
        raise KernelError("a block-quantised product with weights prepacked for another runtime is not supported")
    n, k = int(attributes["N"]), int(attributes["K"])
    matrix = packed_blocks(
        spec, 1, 2, 3, n=n, k=k, bits=int(attributes.get("bits", 4)), block=int(attributes["block_size"])
    )
    bias = np.ascontiguousarray(spec.constant(5), np.float32) if spec.has(5) else None
    return of_blocks(spec, matrix, bias, addend=6 if spec.has(6) else 0)


def of_blocks(spec: NodeSpec, matrix: BlockMatrix, bias: Any = None, addend: int = 0) -> Kernel:
    """input 0 @ matrix^T + bias + input `addend` (0 = none), in the type of input 0."""
    product = BlockLinear(matrix, bias, exact=spec.exact, threads=spec.options.get("threads"))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        rows = np.ascontiguousarray(x, np.float32).reshape(-1, matrix.columns)
        more = np.ascontiguousarray(inputs[addend], np.float32).reshape(-1, matrix.rows) if addend else None
        return (product(rows, addend=more).reshape(*x.shape[:-1], matrix.rows).astype(x.dtype, copy=False),)

    return kernel


@register("DequantizedMatMul", domain=OURS)
def dequantized_matmul(spec: NodeSpec) -> Kernel:
    """x @ DequantizeLinear(w): inputs x, bytes of w, scale, zero point; accuracy unset.

    Attributes: bits, signed; transposed (w is [N, K] instead of [K, N]); block_size of the scales along K, 0 if a
    scale is for a whole column, or for all of w.
    """
    matrix: BlockMatrix = spec.pack(
        (1, 2, 3), f"dequantized:{sorted(spec.attributes.items())}", lambda: _repacked(spec)
    )
    return of_blocks(spec, matrix)


def _repacked(spec: NodeSpec) -> BlockMatrix:
    """Columns of w become rows, and signed integers move up, as a block-quantised product wants them."""
    bits, block = int(spec.attributes["bits"]), int(spec.attributes["block_size"]) or _WHOLE_COLUMN_BLOCK
    transposed, offset = bool(spec.attributes["transposed"]), (1 << (bits - 1)) * int(spec.attributes["signed"])
    data = spec.constant(1)
    k, n = (data.shape[1] * 8 // bits, data.shape[0]) if transposed else (data.shape[0], data.shape[1] * 8 // bits)
    blocks = -(-k // block)
    packed = np.empty((n, blocks * block * bits // 8), np.uint8)
    for first in range(0, n, _REPACK_ROWS):
        part = slice(first, min(first + _REPACK_ROWS, n))
        rows = _integers(data[part] if transposed else data[:, first * bits // 8 : -(-part.stop * bits // 8)], bits)
        wide = np.zeros((part.stop - first, blocks * block), np.uint8)
        wide[:, :k] = (rows if transposed else rows.T) + np.uint8(offset)
        packed[part] = wide if bits == 8 else (wide[:, 0::2] & 15) | (wide[:, 1::2] << np.uint8(4))

    def per_block(values: Any) -> Any:
        values = np.asarray(values, np.float32)
        values = values if values.ndim < 2 or transposed else values.T
        return np.ascontiguousarray(np.broadcast_to(values.reshape(-1, 1) if values.ndim < 2 else values, (n, blocks)))

    points = per_block(spec.constant(3)) if spec.has(3) else np.zeros((n, blocks), np.float32)
    return pack_matrix(
        packed, per_block(spec.constant(2)), points + np.float32(offset), n=n, k=k, bits=bits, block_size=block
    )


def _integers(data: Any, bits: int) -> Any:
    """Rows of bytes as rows of integers; 4-bit ones lie two to a byte, the low nibble first."""
    if bits == 8:
        return data
    return np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)


@shape_rule(BLOCK_PRODUCT)
def matmul_nbits_types(types: NodeTypes) -> list[Type | None]:
    """[..., K] times packed [N, K]: [..., N]."""
    source = types.source
    shape = None if not source.shape else (*source.shape[:-1], types.attribute("N", 0))
    return [TensorType(source.dtype, shape)]


@shape_rule("Linear", "DenseAttention", domain=OURS)
def product_types(types: NodeTypes) -> list[Type | None]:
    """[..., K] times [K, N]: [..., N]. Attention: queries [B, H, T, size] and values [B, H, S, N]: [B, H, T, N]."""
    source, last = types.tensor(0), types.tensor(2 if types.node.op_type == "DenseAttention" else 1)
    if source is None or last is None or not source.shape or not last.shape:
        return []
    return [TensorType(source.dtype, (*source.shape[:-1], last.shape[-1]))]


@row_rule("MatMul")
def matmul_rows(at: NodeRows) -> States:
    x, weight = at.states
    if x is None or weight is None or x.kind is not Kind.ROWS or weight.kind is not Kind.UNIFORM:
        raise NotFlattenable("a product whose right side is not constant mixes tokens")
    if weight.rank != 2:
        raise NotFlattenable("a product with a stacked constant is not known here")
    at.keep_off(x, -1, "the contraction")
    return [x.resized(x.rank - 1, weight.known_shape[1])]


@row_rule("Gemm")
def gemm_rows(at: NodeRows) -> States:
    state = at.rows
    if at.states[0] is not state or at.node.attribute("transA", 0) or state.axis != 0:
        raise NotFlattenable("the tokens must be the rows of the left matrix")
    weight = at.states[1]
    assert weight is not None
    return [state.resized(1, weight.known_shape[0 if at.node.attribute("transB", 0) else 1])]


@row_rule(BLOCK_PRODUCT, domain=MS)
def matmul_nbits_rows(at: NodeRows) -> States:
    state = at.rows
    at.keep_off(state, -1, "the contraction")
    return [state.resized(state.rank - 1, RowDim(int(at.node.attribute("N", 0))))]


def check_bits(bits: int) -> None:
    """Raises FormatError for what onnxruntime's blocks do not have."""
    if bits not in _BITS:
        raise FormatError(f"bits is {bits}, expected 2, 4 or 8")


def check_stored(weight: BlockWeight, data: NDArray[Any], scales: NDArray[Any], row_scales: int = 0) -> None:
    """The stored arrays have the size and form that a weight says; `row_scales`: of a row, 0 = one per block.

    Raises:
        FormatError: they have not.
    """
    check_bits(weight.bits)
    check_block_format(weight.bits, weight.block_size)
    rows, blocks = max(weight.experts, 1) * weight.rows, -(-weight.columns // weight.block_size)
    whole = rows * blocks * weight.block_size * weight.bits // 8
    short = rows * -(-weight.columns * weight.bits // 8) if weight.experts else whole
    for name, array, sizes in (("weight", data, (whole, short)), ("scales", scales, (rows * (row_scales or blocks),))):
        if array.size not in sizes:
            raise FormatError(f"{name} has {array.size} entries in shape {list(array.shape)}, expected {sizes[0]}")


@record_rule(BLOCK_PRODUCT, domain=MS)
def matmul_nbits_record(spec: RowSpec) -> Made | None:
    """x @ W^T + bias + addend (input 6, ours: the place of a low-rank adapter's output)."""
    x, attributes = spec.rows(0), spec.attributes
    n, k, bits = int(attributes["N"]), int(attributes["K"]), int(attributes.get("bits", 4))
    if x is None or x.width != k or spec.has(4) or int(attributes.get("weight_prepacked", 0)):
        return None
    if spec.has(6) and spec.rows(6) != x.with_width(n):
        return None
    data, scales, points = (spec.constant_name(index) for index in (1, 2, 3))
    weight = BlockWeight(data, scales, points, n, k, bits, int(attributes["block_size"]))
    check_stored(weight, spec.constant(1), spec.constant(2))
    branch = Branch(weight, spec.constant_name(5), spec.inputs[6] if spec.has(6) else "")
    out = spec.outputs[0]
    return Made([Product(spec.inputs[0], branch, out, spec.exact, op_type=spec.op_type)], {out: x.with_width(n)})


@record_rule("MatMul")
def matmul_record(spec: RowSpec) -> Made | None:
    """Rows times a constant matrix [K, N] of float32, float16 or bfloat16."""
    x, weight = spec.rows(0), spec.constants[1]
    if x is None or weight is None or weight.ndim != 2 or weight.shape[0] != x.width or x.last != x.width:
        return None
    if weight.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    k, n = weight.shape
    branch, out = Branch(DenseWeight(spec.inputs[1], n, k)), spec.outputs[0]
    return Made([Product(spec.inputs[0], branch, out, True, op_type=spec.op_type)], {out: x.with_width(n)})


stored_weights(BLOCK_PRODUCT, {1: Packed("bits", scales=2, points=3, sizes=("N", "K"))})
