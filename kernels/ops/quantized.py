"""Block-quantised products and look-ups of com.microsoft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..block_matrix import BlockMatrix
from ..registry import Kernel, KernelError, NodeSpec, register

MS, OURS = "com.microsoft", "genai"
# How weights with one scale per column are cut into blocks, and how many rows are repacked at once.
_WHOLE_COLUMN_BLOCK = 64
_REPACK_ROWS = 1024
# MatMulNBits accuracy levels: 0 unset, 1 fp32, 2 fp16, 3 bf16, 4 int8 activations. Levels 2 and 3 allow less than
# fp32, so fp32 serves them; unset means int8, as the architecture page says and onnxruntime's builder writes (4).
_FP32_LEVELS = (1, 2, 3)


def _packed(
    spec: NodeSpec, data: int, scales: int, points: int, *, n: int, k: int, bits: int, block: int
) -> BlockMatrix:
    """The weight in packed form, shared by every node that reads the same bytes in the same shape."""
    from ..cpu.products.packing import pack_matrix

    zero_points = spec.constant(points) if spec.has(points) else None
    return spec.pack(
        (data, scales, points),
        f"block_matrix[{n},{k}]:{bits}:{block}",
        lambda: pack_matrix(
            spec.constant(data), spec.constant(scales), zero_points, n=n, k=k, bits=bits, block_size=block,
            walkers=spec.options.get("walkers"),
            arena=spec.options.get("arena"),
        ),
    )  # fmt: skip


@register("MatMulNBits", domain=MS)
def matmul_nbits(spec: NodeSpec) -> Kernel:
    """x @ W^T + bias + addend. Input 6, ours, is an addend per token: the place of a low-rank adapter's output."""
    from ..cpu.matmul import matmul_nbits as product

    attributes = spec.attributes
    if spec.has(4):
        raise KernelError("MatMulNBits with g_idx (reordered groups) is not supported")
    if int(attributes.get("weight_prepacked", 0)):
        raise KernelError("MatMulNBits with weights prepacked for another runtime is not supported")
    n, k = int(attributes["N"]), int(attributes["K"])
    matrix = _packed(spec, 1, 2, 3, n=n, k=k, bits=int(attributes.get("bits", 4)), block=int(attributes["block_size"]))
    exact = spec.options.get("accuracy") == "fp32" or int(attributes.get("accuracy_level", 0)) in _FP32_LEVELS
    activations: Literal["fp32", "int8"] = "fp32" if exact else "int8"
    bias = np.ascontiguousarray(spec.constant(5), np.float32) if spec.has(5) else None
    has_addend = spec.has(6)
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        rows = np.ascontiguousarray(x, np.float32).reshape(-1, k)
        addend = inputs[6].reshape(-1, n) if has_addend else None
        out = product(rows, matrix, bias=bias, addend=addend, activations=activations, team=team)
        return (out.reshape(*x.shape[:-1], n),)

    return kernel


@register("DequantizedMatMul", domain=OURS)
def dequantized_matmul(spec: NodeSpec) -> Kernel:
    """x @ DequantizeLinear(w): inputs x, bytes of w, scale, zero point; as MatMulNBits with its accuracy unset.

    Attributes: bits, signed; transposed (w is [N, K] instead of [K, N]); block_size of the scales along K, 0 if a
    scale is for a whole column, or for all of w.
    """
    from ..cpu.matmul import matmul_nbits as product

    matrix: BlockMatrix = spec.pack(
        (1, 2, 3), f"dequantized:{sorted(spec.attributes.items())}", lambda: _repacked(spec)
    )
    activations: Literal["fp32", "int8"] = "fp32" if spec.options.get("accuracy") == "fp32" else "int8"
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        rows = np.ascontiguousarray(x, np.float32).reshape(-1, matrix.columns)
        out = product(rows, matrix, activations=activations, team=team)
        return (out.reshape(*x.shape[:-1], matrix.rows),)

    return kernel


def _repacked(spec: NodeSpec) -> BlockMatrix:
    """Columns of w become rows, and signed integers move up, as MatMulNBits wants them."""
    from ..cpu.products.packing import pack_matrix

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


@register("GatherBlockQuantized", domain=MS)
def gather_block_quantized(spec: NodeSpec) -> Kernel:
    """Rows of a block-quantised table, dequantised; ids out of range give zeros, as the contract says."""
    from ..cpu.embedding import block_rows

    data = spec.constant(0)
    matrix = _table(spec, data)
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        ids = inputs[1]
        flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
        valid = (flat >= 0) & (flat < matrix.rows)
        rows = block_rows(np.where(valid, flat, 0), matrix, team=team)
        rows[~valid] = 0
        return (rows.reshape(*ids.shape, matrix.columns),)

    return kernel


def _table(spec: NodeSpec, data: Any) -> BlockMatrix:
    attributes = spec.attributes
    gather_axis, quantize_axis = int(attributes.get("gather_axis", 0)), int(attributes.get("quantize_axis", 1))
    if data.ndim != 2 or gather_axis % 2 != 0 or quantize_axis % 2 != 1:
        raise KernelError(
            "GatherBlockQuantized: only a table [rows, columns] gathered by rows and quantised along columns"
        )
    block = int(attributes.get("block_size", 128))
    if data.dtype == np.uint8:
        bits = int(attributes.get("bits", 4))
        return _packed(spec, 0, 2, 3, n=data.shape[0], k=data.shape[1] * 8 // bits, bits=bits, block=block)
    if data.dtype.name not in ("int4", "uint4"):
        raise KernelError(f"GatherBlockQuantized over {data.dtype}: only uint8, int4 and uint4 are supported")
    return spec.pack((0, 2, 3), f"nibbles{list(data.shape)}:{block}", lambda: _pack_nibbles(spec, data, block))


def _pack_nibbles(spec: NodeSpec, data: Any, block: int) -> BlockMatrix:
    """int4 and uint4 tables; both have zero point 0 unless they bring their own. Signed values move up by 8."""
    from ..cpu.products.packing import pack_matrix

    rows, columns = data.shape
    offset = 8 if data.dtype.name == "int4" else 0
    padded = np.full((rows, -(-columns // block) * block), offset, np.uint8)
    padded[:, :columns] = (data.astype(np.int8) + offset).astype(np.uint8)
    scales = spec.constant(2)
    points = spec.constant(3).astype(np.float32) if spec.has(3) else np.zeros(scales.shape, np.float32)
    return pack_matrix(
        padded[:, 0::2] | padded[:, 1::2] << 4, scales, points + offset, n=rows, k=columns, bits=4, block_size=block
    )
