"""Matmuls and look-ups with quantised weights of any format: operators of the genai domain, and MatMulBnb4.

The inputs of the genai operators are x (or codes and ids), then codes, grid, scales, multipliers, offset scales and
offsets, as in `kernels.weights`; `onnx.own_functions` defines the operators in terms of standard operators. A single
number replaces absent multipliers (1) and offsets (0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.formats import pack_weight
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.ir import BlockWeight
from genai.kernels.weight_layout import BlockMatrix

from ..onnx.node import MS, OURS
from ..onnx.own_functions import QUANTIZED_LOOKUP, QUANTIZED_PRODUCT
from ..onnx.types import DataType, TensorType, Type
from .matmul import product
from .products import of_blocks
from .registry import Kernel, NodeSpec, operator, register
from .shape_rules import NodeTypes, shape_rule
from .weights import (
    ADDEND,
    BIAS,
    BNB4_PRODUCT,
    LOOKUP_INPUTS,
    PRODUCT_INPUTS,
    bnb4_weight,
    dense_bnb4,
    own_weight,
    weight_arrays,
)


def _matrix(spec: NodeSpec, weight: BlockWeight, indices: Sequence[int]) -> BlockMatrix:
    """Return the packed weight, shared by all nodes that read the same arrays."""
    return spec.pack(
        tuple(indices),
        f"quantized[{weight.rows},{weight.columns}]:{weight.format}:{weight.flat_block}:{weight.values}",
        lambda: pack_weight(
            weight_arrays(spec, weight), threads=spec.options.get("threads"), arena=spec.options.get("arena")
        ),
    )  # fmt: skip


@register(QUANTIZED_PRODUCT, domain=OURS)
def quantized_matmul(spec: NodeSpec) -> Kernel:
    """x @ W^T + bias + addend."""
    matrix = _matrix(spec, own_weight(spec, PRODUCT_INPUTS), PRODUCT_INPUTS)
    bias = np.ascontiguousarray(spec.constant(BIAS), np.float32) if spec.has(BIAS) else None
    return of_blocks(spec, matrix, bias, addend=ADDEND if spec.has(ADDEND) else 0)


@register(BNB4_PRODUCT, domain=MS)
def matmul_bnb4(spec: NodeSpec) -> Kernel:
    """x @ W^T. A matrix whose blocks cannot be split at the ends of its rows is multiplied as float32."""
    weight, threads = bnb4_weight(spec), spec.options.get("threads")
    if weight is not None:
        return of_blocks(spec, _matrix(spec, weight, (1, 2)))
    dense = spec.pack((1, 2), f"dense:{sorted(spec.attributes.items())}", lambda: dense_bnb4(spec))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (product(inputs[0], dense.T, threads),)

    return kernel


def _table(spec: NodeSpec) -> BlockMatrix:
    return _matrix(spec, own_weight(spec, LOOKUP_INPUTS), LOOKUP_INPUTS)


@operator(QUANTIZED_LOOKUP, domain=OURS, table=_table)
def quantized_gather(codes: Any, ids: Any, *, table: BlockMatrix, threads: Threads | None) -> Any:
    """Gather and dequantise rows of a table. Negative ids count from the end. Raises IndexError if out of range."""
    flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
    rows = block_rows(np.where(flat < 0, flat + table.rows, flat), table, threads=threads)
    return rows.reshape(*ids.shape, table.columns)


@shape_rule(QUANTIZED_PRODUCT, domain=OURS)
@shape_rule(BNB4_PRODUCT)
def product_types(types: NodeTypes) -> list[Type | None]:
    """[..., K] times a weight [N, K] is [..., N]."""
    source = types.source
    shape = None if not source.shape else (*source.shape[:-1], types.attribute("N", 0))
    return [TensorType(source.dtype, shape)]


@shape_rule(QUANTIZED_LOOKUP, domain=OURS)
def lookup_types(types: NodeTypes) -> list[Type | None]:
    """float32 [*ids, K]."""
    ids = types.shape(1)
    return [TensorType(DataType.FLOAT, None if ids is None else (*ids, types.attribute("K", 0)))]
