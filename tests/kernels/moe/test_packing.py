"""Weights of experts: each expert is packed like a single matrix, at a constant stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.common.host_memory import Arena
from genai.kernels.checks import FormatError
from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.dense import pack_dense
from genai.kernels.cpu.moe.products import pack_dense_experts, pack_experts
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.weights import dequantize_weight
from genai.kernels.weight_layout import BlockMatrix


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("points", ["none", "packed", "fractions"])
def test_blocks(layer: Callable[..., Any], gated: bool, bits: int, points: str) -> None:
    stored = layer(3, 70, 96, bits=bits, points=points)
    packed = pack_experts(**stored.constants, gated=gated, threads=Threads(2), arena=Arena())
    parts = 2 if gated else 1
    assert (packed.experts, packed.rows, packed.columns, len(packed.parts)) == (3, 70 // parts, 96, parts)
    assert packed.nbytes == 3 * packed.expert_bytes
    layout = packed.parts[0].layout
    for expert in range(3):
        for part in range(parts):
            matrix = BlockMatrix(70 // parts, 96, layout, packed.data[expert, part])
            np.testing.assert_allclose(
                block_rows(np.arange(matrix.rows), matrix), stored.values[expert, part::parts], rtol=1e-6, atol=1e-7
            )
    np.testing.assert_array_equal(packed.parts[-1].data, packed.data[0, -1])


def test_one_layout_for_all(layer: Callable[..., Any]) -> None:
    """If one expert has zero points, or scales that need float32, the records of all experts have them."""
    stored = layer(3, 32, 64, scale_type=np.float32)
    constants = stored.constants
    constants["scales"][:] = 0.5
    assert not pack_experts(**constants).parts[0].layout.wide
    constants["scales"][1, 3, 0] = 1e-9
    constants["zero_points"] = np.full((3, 32, 1), 0x88, np.uint8)
    packed = pack_experts(**constants)
    assert (packed.parts[0].layout.wide, packed.parts[0].layout.zero_points) == (True, False)
    constants["zero_points"][2, 5, 0] = 0x87
    packed = pack_experts(**constants)
    assert packed.parts[0].layout.zero_points
    for expert in range(3):
        points = constants["zero_points"][expert]
        expected = dequantize_weight(
            constants["weight"][expert], constants["scales"][expert], points, n=32, k=64, bits=4, block_size=32
        )
        matrix = BlockMatrix(32, 64, packed.parts[0].layout, packed.data[expert, 0])
        np.testing.assert_allclose(block_rows(np.arange(matrix.rows), matrix), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_dense(normal: Callable[..., np.ndarray], dtype: Any, gated: bool) -> None:
    weight = normal(3, 70, 33).astype(dtype)
    packed = pack_dense_experts(weight, gated=gated, arena=Arena())
    parts = 2 if gated else 1
    for expert in range(3):
        for part in range(parts):
            alone = pack_dense(np.ascontiguousarray(weight[expert, part::parts]), transposed=True)
            np.testing.assert_array_equal(packed.data[expert, part], alone.data)
    assert (packed.rows, packed.columns) == (70 // parts, 33)


def test_refusals(layer: Callable[..., Any]) -> None:
    constants = layer(3, 33, 64).constants
    with pytest.raises(FormatError, match=r"with rows \(an even number\)"):
        pack_experts(**constants, gated=True)
    with pytest.raises(FormatError, match=r"scales is \[2, 33, 2\], expected \[3 experts"):
        pack_experts(**{**constants, "scales": constants["scales"][:2]})
    with pytest.raises(FormatError, match="bits is 7"):
        pack_experts(**{**constants, "bits": 7})
    with pytest.raises(FormatError, match="weight has"):
        pack_experts(**{**constants, "columns": 96})
    with pytest.raises(FormatError, match="expected \\[experts, rows, columns\\]"):
        pack_dense_experts(np.zeros((3, 4), np.float32))
    with pytest.raises(FormatError, match="weight is int8"):
        pack_dense_experts(np.zeros((3, 4, 4), np.int8))
