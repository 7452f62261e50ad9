"""Matmuls with decode numerics against float64, for every kind of weight. Results do not depend on other rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.jit.isa import IsaError, choose
from genai.kernels.cpu.linear.calls import Affine
from genai.kernels.cpu.linear.decode import SCRATCH_BYTES, tile_memory
from genai.kernels.cpu.linear.dense import pack_dense
from genai.kernels.cpu.linear.dot import dot_for
from genai.kernels.cpu.linear.micro_kernels import IntegerBlocks
from genai.kernels.cpu.program.calls import Rows
from genai.kernels.weight_layout import BlockMatrix, layout_with
from tests.instructions import other_instructions

Multiply = Callable[..., np.ndarray]
ROWS = 15  # 8 + 4 + 2 + 1: every shape of the kernel
# Variants of the cases that every run has.
DRAWN = (pytest.mark.slow, pytest.mark.drawn(8))


def dequantized(matrix: BlockMatrix) -> np.ndarray:
    """The matrix as floats."""
    return block_rows(np.arange(matrix.rows), matrix)


def rounded(x: np.ndarray, block_size: int) -> np.ndarray:
    """The values of x as 8-bit activations, in float64: the definition, without the kernel's optimisations."""
    result = np.zeros(x.shape)
    for first in range(0, x.shape[1], block_size):
        block = x[:, first : first + block_size]
        largest = np.abs(block).max(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            inverse = np.where(largest > 1e-30, np.float32(127) / largest, np.float64(127) / largest)
            scale = (largest / np.float32(127)).astype(np.float64)
            integers = np.where(largest > 0, np.rint(block * inverse), 0)
        result[:, first : first + block_size] = integers * scale
    return result


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("bits", [4, 8, 3, *(pytest.param(bits, marks=DRAWN) for bits in (2, 5, 6))])
@pytest.mark.parametrize("block_size", [32, pytest.param(16, marks=DRAWN), 128])
@pytest.mark.parametrize("zero_points", ["none", "packed", pytest.param("fractions", marks=DRAWN)])
@pytest.mark.parametrize("scale_type", [np.float16, pytest.param(np.float32, marks=DRAWN)])
@pytest.mark.parametrize("quantized", [True, False], ids=["int8", "fp32"])
def test_against_float64(
    block_matrix: Callable[..., BlockMatrix], multiply: Multiply, normal: Callable[..., np.ndarray],
    bits: int, block_size: int, zero_points: str, scale_type: Any, quantized: bool,
) -> None:  # fmt: skip
    k = 3 * block_size - 5
    matrix = block_matrix(70, k, bits, block_size, zero_points, scale_type)
    x = normal(ROWS, k)
    out = multiply(x, matrix, quantized=quantized)
    seen = rounded(x, block_size) if quantized else x.astype(np.float64)
    close(out, seen @ dequantized(matrix).astype(np.float64).T)
    alone = np.concatenate([multiply(row[None], matrix, quantized=quantized) for row in x])
    np.testing.assert_array_equal(out, alone)


@pytest.mark.parametrize(
    "columns, bits, block_size, zero_points, scale_type",
    [
        (2048, 4, 32, "none", np.float16),
        (65, 4, 32, "none", np.float16),  # fewer records than are processed at once
        (300, 4, 64, "packed", np.float32),
        (500, 8, 32, "none", np.float16),
        pytest.param(300, 4, 32, "fractions", np.float16, marks=DRAWN),
        pytest.param(1000, 4, 96, "none", np.float16, marks=DRAWN),
        pytest.param(700, 4, 256, "none", np.float16, marks=DRAWN),
        pytest.param(900, 8, 256, "none", np.float16, marks=DRAWN),
        pytest.param(900, 8, 256, "packed", np.float16, marks=DRAWN),
        pytest.param(500, 8, 128, "packed", np.float16, marks=DRAWN),
    ],
)
def test_any_number_of_rows(
    block_matrix: Callable[..., BlockMatrix], multiply: Multiply, normal: Callable[..., np.ndarray], columns: int,
    bits: int, block_size: int, zero_points: str, scale_type: Any,
) -> None:  # fmt: skip
    """Each of 1 to 40 rows, difficult ones included, has the same bits as alone."""
    matrix = block_matrix(150, columns, bits, block_size, zero_points, scale_type)
    x, bias, addend = normal(40, columns), normal(150), normal(40, 150)
    x[:, ::31] *= 40
    x[2], x[3], x[4] = 0, 1e-42, x[4] * np.float32(1e30)
    x[5] *= np.float32(2.0**-120)
    x[6] = np.where(x[6] > 0, np.float32(127), np.float32(-127))
    x[17, 5], x[33, 7] = np.nan, np.inf
    alone = np.concatenate(
        [multiply(x[m : m + 1], matrix, quantized=True, bias=bias, addend=Rows.of(addend[m:])) for m in range(40)]
    )
    with np.errstate(all="ignore"):
        exact = rounded(x[:16], block_size) @ dequantized(matrix).astype(np.float64).T + bias + addend[:16]
    for row in range(16):
        close(alone[row], exact[row], 1e-5)
    for rows in range(2, 41):
        out = multiply(x[:rows], matrix, quantized=True, bias=bias, addend=Rows.of(addend))
        np.testing.assert_array_equal(out.view(np.uint32), alone[:rows].view(np.uint32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dense(multiply: Multiply, normal: Callable[..., np.ndarray], dtype: Any) -> None:
    rows = 27  # with up to this many rows, every shape of the kernel is used, alone and after another
    matrix, bias, addend = pack_dense(weight := normal(33, 70).astype(dtype)), normal(70), normal(rows, 70)
    x = normal(rows, 33)
    out = multiply(x, matrix, quantized=False, bias=bias, addend=Rows.of(addend))
    close(out, x.astype(np.float64) @ weight.astype(np.float64) + bias + addend)
    x[5, 3], x[9], x[20, 30] = np.inf, 1e-42, np.nan
    alone = np.concatenate([multiply(row[None], matrix, quantized=False, bias=bias) for row in x])
    for count in range(2, rows + 1):
        together = multiply(x[:count], matrix, quantized=False, bias=bias)
        np.testing.assert_array_equal(together.view(np.uint32), alone[:count].view(np.uint32))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 11])
def test_gate(multiply: Multiply, normal: Callable[..., np.ndarray], activation: str, rows: int) -> None:
    gate, up, x = normal(40, 100), normal(40, 100), normal(rows, 40)
    bias, up_bias = normal(100), normal(100)
    out = multiply(
        x, pack_dense(gate), quantized=False, bias=bias, gate=activation, gated=Affine(pack_dense(up), up_bias)
    )
    g = x.astype(np.float64) @ gate + bias
    inner = g if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    close(out, g / (1 + np.exp(-inner)) * (x.astype(np.float64) @ up + up_bias))


def test_gate_of_blocks(
    block_matrix: Callable[..., BlockMatrix], multiply: Multiply, normal: Callable[..., np.ndarray]
) -> None:
    gate, up, x = block_matrix(300, 64), block_matrix(300, 64), normal(21, 64)
    out = multiply(x, gate, quantized=True, gate="silu", gated=Affine(up))
    for row, values in enumerate(x):
        alone = multiply(values[None], gate, quantized=True, gate="silu", gated=Affine(up))
        np.testing.assert_array_equal(out[row : row + 1], alone)
    g, u = (rounded(x, 32) @ dequantized(m).astype(np.float64).T for m in (gate, up))
    close(out, g / (1 + np.exp(-g)) * u)


@pytest.mark.parametrize("dense", [False, True])
def test_gate_with_addends(
    block_matrix: Callable[..., BlockMatrix], multiply: Multiply, normal: Callable[..., np.ndarray], dense: bool
) -> None:
    """Each branch adds its own rows before the activation. They may be strided, and one may be the result itself."""
    if dense:
        weights = [normal(64, 70), normal(64, 70)]
        gate, up = (pack_dense(weight) for weight in weights)
    else:
        gate, up = block_matrix(70, 64), block_matrix(70, 64)
        weights = [dequantized(matrix).T for matrix in (gate, up)]
    x, bias, addend, up_addend = normal(21, 64), normal(70), normal(21, 70) * 3, normal(21, 90) * 3
    seen = x.astype(np.float64) if dense else rounded(x, 32)
    g, u = seen @ weights[0].astype(np.float64) + bias, seen @ weights[1].astype(np.float64)
    options: dict[str, Any] = {"quantized": not dense, "bias": bias, "gate": "silu"}
    apart = Rows.of(up_addend).columns(9, 70)
    for own, others in ((Rows.of(addend), apart), (Rows.of(addend), None), (None, apart)):
        out = multiply(x, gate, addend=own, gated=Affine(up, addend=others), **options)
        inner, outer = g + addend * (own is not None), u + up_addend[:, 9:79] * (others is not None)
        close(out, inner / (1 + np.exp(-inner)) * outer)


def test_rounding_of_hard_rows(block_matrix: Callable[..., BlockMatrix], multiply: Multiply) -> None:
    """Outliers, zeros, denormals, ties and huge numbers round as the definition says."""
    matrix = block_matrix(16, 64)
    x = np.zeros((6, 64), np.float32)
    x[0, ::7] = [1e30, -1, 3, 127, -127, 63.5, 1e-30, 2, 5, 9]
    x[1] = np.linspace(-127, 127, 64)
    x[2] = 1e-42
    x[3, 5] = -3e36
    x[4] = np.resize([0.5, -0.5, 1.5, 127], 64)
    out, expected = (
        multiply(x, matrix, quantized=True),
        rounded(x, 32) @ dequantized(matrix).astype(np.float64).T,
    )
    for row in range(len(x)):  # denormal numbers have a few digits only
        close(out[row], expected[row], 0.05 if row == 2 else 1e-5)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_infinities_and_nans_reach_their_row(
    block_matrix: Callable[..., BlockMatrix], multiply: Multiply, normal: Callable[..., np.ndarray], value: float,
    quantized: bool,
) -> None:  # fmt: skip
    matrix, x = block_matrix(40, 96), normal(9, 96)
    clean = multiply(x, matrix, quantized=quantized)
    x[4, 50] = value
    out = multiply(x, matrix, quantized=quantized)
    assert not np.isfinite(out[4]).any()
    np.testing.assert_array_equal(np.delete(out, 4, axis=0), np.delete(clean, 4, axis=0))


def test_refusals(
    block_matrix: Callable[..., BlockMatrix], multiply: Multiply, normal: Callable[..., np.ndarray]
) -> None:
    matrix, other = block_matrix(16, 64), block_matrix(16, 128)
    with pytest.raises(ValueError, match="a gate and a second matrix"):
        multiply(normal(1, 64), matrix, quantized=True, gate="silu")
    with pytest.raises(ValueError, match="the two matrices differ"):
        multiply(normal(1, 64), matrix, quantized=True, gate="silu", gated=Affine(other))
    for wrong, message in (
        (Affine(matrix, normal(3)), r"bias is \[3\], expected \[16\]"),
        (Affine(matrix, addend=Rows.of(normal(1, 4))), "addend has 4 columns, but the matrix has 16 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            multiply(normal(1, 64), matrix, quantized=True, bias=wrong.bias, addend=wrong.addend)
        with pytest.raises(ValueError, match=message):
            multiply(normal(1, 64), matrix, quantized=True, gate="silu", gated=wrong)


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    """Run this file again with the kernels of another instruction set (if the machine has it)."""
    with_instructions(name, __file__)


def test_choice_of_instructions() -> None:
    assert choose({}, ("vnni", "avx2", "portable")) == "vnni"
    assert choose({"GENAI_CPU_ISA": "portable"}, ("vnni", "avx2", "portable")) == "portable"
    with pytest.raises(IsaError, match="the processor does not support this instruction set"):
        choose({"GENAI_CPU_ISA": "amx"}, ("avx2", "portable"))
    with pytest.raises(IsaError, match="the instruction set is unknown"):
        choose({"GENAI_CPU_ISA": "avx9"}, ("avx2", "portable"))


def test_instructions_that_the_machine_lacks_are_not_the_models_fault() -> None:
    environment = {**os.environ, "GENAI_CPU_ISA": "avx9"}
    command = [sys.executable, "-m", "genai", "generate", "--raw", "-p", "hi", "-n", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 2
    why = "GENAI_CPU_ISA is 'avx9': the instruction set is unknown"
    assert run.stderr.startswith(
        f"error: GENAI_CPU_ISA cannot be applied\n  why: {why}; the usable instruction sets are"
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_what_tiles_are_stored_in_begins_on_a_line(bits: int, block_size: int) -> None:
    """On any machine: stores of whole lines fault at other addresses."""
    layout = layout_with(bits, block_size, "half", False, whole_points=True)
    kind = IntegerBlocks(layout, "amx", dot_for("amx", layout.byte_bits))
    for records in (1, 3, 64):
        tiles, scratch = tile_memory(kind, records)
        assert tiles.scratch % 64 == tiles.transposed_bytes % 64 == 0 and scratch >= SCRATCH_BYTES
