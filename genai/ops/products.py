"""Matmuls with block-quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.block_weights import BlockLinear
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.weight_layout import BlockMatrix

from ..onnx.node import MS
from ..onnx.types import TensorType, Type
from .registry import Kernel, KernelError, NodeSpec, register
from .shape_rules import NodeTypes, shape_rule
from .weights import BLOCK_PRODUCT, check_bits


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


@shape_rule(BLOCK_PRODUCT)
def matmul_nbits_types(types: NodeTypes) -> list[Type | None]:
    """[..., K] times packed [N, K] is [..., N]."""
    source = types.source
    shape = None if not source.shape else (*source.shape[:-1], types.attribute("N", 0))
    return [TensorType(source.dtype, shape)]
