"""Matmuls with block-quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.functions import BlockLinear
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.weight_layout import BlockMatrix

from ..onnx.node import MS, OURS
from ..onnx.types import TensorType, Type
from .registry import Kernel, KernelError, NodeSpec, register
from .shape_rules import NodeTypes, shape_rule
from .weights import BLOCK_PRODUCT, check_bits

# The block size for weights with one scale per column, and the number of rows repacked in each step.
_WHOLE_COLUMN_BLOCK, _REPACK_ROWS = 64, 1024


def packed_blocks(
    spec: NodeSpec, data: int, scales: int, points: int, *, n: int, k: int, bits: int, block: int
) -> BlockMatrix:
    """Return the packed weight, shared by all nodes that read the same bytes in the same shape."""
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
    """x @ W^T + bias + addend. Input 6, an extension, is an addend per token: the output of a LoRA adapter."""
    attributes = spec.attributes
    if spec.has(4):
        raise KernelError("block-quantised matmuls with g_idx (reordered groups) are not supported")
    if int(attributes.get("weight_prepacked", 0)):
        raise KernelError(
            "block-quantised matmuls with weights that are prepacked for another runtime are not supported"
        )
    n, k = int(attributes["N"]), int(attributes["K"])
    matrix = packed_blocks(
        spec, 1, 2, 3, n=n, k=k, bits=int(attributes.get("bits", 4)), block=int(attributes["block_size"])
    )
    bias = np.ascontiguousarray(spec.constant(5), np.float32) if spec.has(5) else None
    return of_blocks(spec, matrix, bias, addend=6 if spec.has(6) else 0)


def of_blocks(spec: NodeSpec, matrix: BlockMatrix, bias: Any = None, addend: int = 0) -> Kernel:
    """Return a kernel for input 0 @ matrix^T + bias + input `addend` (0 = none), in the type of input 0."""
    product = BlockLinear(matrix, bias, exact=spec.exact, threads=spec.options.get("threads"))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        rows = np.ascontiguousarray(x, np.float32).reshape(-1, matrix.columns)
        more = np.ascontiguousarray(inputs[addend], np.float32).reshape(-1, matrix.rows) if addend else None
        return (product(rows, addend=more).reshape(*x.shape[:-1], matrix.rows).astype(x.dtype, copy=False),)

    return kernel


@register("DequantizedMatMul", domain=OURS)
def dequantized_matmul(spec: NodeSpec) -> Kernel:
    """x @ DequantizeLinear(w): inputs x, bytes of w, scale, zero point. The operator has no accuracy_level.

    Attributes: bits; signed; transposed (w is [N, K] instead of [K, N]); block_size of the scales along K, or 0 if a
    scale applies to a whole column or to all of w.
    """
    matrix: BlockMatrix = spec.pack(
        (1, 2, 3), f"dequantized:{sorted(spec.attributes.items())}", lambda: _repacked(spec)
    )
    return of_blocks(spec, matrix)


def _repacked(spec: NodeSpec) -> BlockMatrix:
    """Repack w for a block-quantised matmul: columns become rows, and signed integers are shifted to unsigned."""
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
    """Unpack rows of bytes to rows of integers; a byte holds one 8-bit or two 4-bit integers, low nibble first."""
    if bits == 8:
        return data
    return np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)


@shape_rule(BLOCK_PRODUCT)
def matmul_nbits_types(types: NodeTypes) -> list[Type | None]:
    """[..., K] times packed [N, K] is [..., N]."""
    source = types.source
    shape = None if not source.shape else (*source.shape[:-1], types.attribute("N", 0))
    return [TensorType(source.dtype, shape)]


@shape_rule("Linear", "DenseAttention", domain=OURS)
def product_types(types: NodeTypes) -> list[Type | None]:
    """Matmul: [..., K] times [K, N] is [..., N]. Attention: [B, H, T, size], values [B, H, S, N]: [B, H, T, N]."""
    source, last = types.tensor(0), types.tensor(2 if types.node.op_type == "DenseAttention" else 1)
    if source is None or last is None or not source.shape or not last.shape:
        return []
    return [TensorType(source.dtype, (*source.shape[:-1], last.shape[-1]))]
