"""Matmuls with prefill numerics in bfloat16 tiles: against float64. Results do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.kernels import ir
from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.jit.isa import isa
from genai.kernels.cpu.linear.activations import input_bytes, input_call, inputs_at
from genai.kernels.cpu.linear.bfloat_tiles import (
    FloatWeights,
    HalfWeights,
    row_tiles_call,
    row_tiles_in,
    row_tiles_size,
    weights_of,
)
from genai.kernels.cpu.linear.calls import Affine, decode_call, has_prefill, prefill_call
from genai.kernels.cpu.linear.dense import pack_dense
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.cpu.linear.sums import SumOfProducts
from genai.kernels.cpu.program.calls import Rows, program_of
from genai.kernels.cpu.program.lower import lower
from genai.kernels.cpu.program.packed_weights import PackedWeights
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.cpu.program.value_memory import Lowering
from genai.kernels.weight_layout import BlockMatrix
from genai.kernels.weights import uniform_format

pytestmark = pytest.mark.skipif(isa() != "amx", reason="this machine has no tiles, or is asked not to use them")

Multiply = Callable[..., np.ndarray]
# Rounding both operands to bfloat16's eight bits: two independent errors of 2 ** -9 at most.
ROUNDING = 4e-3
# Variants of the cases that every run has.
DRAWN = (pytest.mark.slow, pytest.mark.drawn(4))

# Numbers of threads that must agree, and nanoseconds of work that they share.
THREADS, SHARED = (1, 2, 3), 1e6


def dequantized(matrix: BlockMatrix) -> np.ndarray:
    """The matrix as floats."""
    return block_rows(np.arange(matrix.rows), matrix)


def step(x: np.ndarray, branch: Affine, decode: int, threads: Threads, options: dict[str, Any]) -> np.ndarray:
    """The first `decode` rows with decode numerics, the others with prefill numerics, in one run."""
    matrix: Any = branch.matrix
    out = np.full((len(x), matrix.rows + 3), np.nan, np.float32)
    rows, results = Rows.of(np.ascontiguousarray(x, np.float32)), Rows.of(out).columns(0, matrix.rows)
    size = row_tiles_size(matrix.padded_columns, len(x))
    memory = np.full(size + 64, 0x7F, np.uint8)  # numbers that no kernel may use
    tiles = row_tiles_in(memory[-memory.ctypes.data % 64 :][:size], matrix.padded_columns)
    phases = [[row_tiles_call(rows, tiles)], [prefill_call(tiles, branch, results, **options)]]
    if decode:
        memory = np.zeros(input_bytes(matrix, len(x), exact=False), np.uint8)
        quantized = inputs_at(memory.ctypes.data, matrix, StepField.DECODE_ROWS, memory, exact=False)
        phases[1].append(input_call(rows, quantized))
        phases.append([decode_call(quantized, branch, results, **options)])
    context = ContextTable()
    for field, count in (
        (StepField.TOKENS, len(x)),
        (StepField.DECODE_ROWS, decode),
        (StepField.PREFILL_ROWS, len(x) - decode),
    ):
        context.count(field, count)
    threads.run(program_of(phases), context, nanoseconds=SHARED)
    assert np.isnan(out[:, matrix.rows :]).all()  # nothing is written beside the results
    return out[:, : matrix.rows]


@pytest.fixture
def prefill() -> Multiply:
    """prefill(x, matrix, decode=0, bias=..., addend=..., **options of prefill_call): the same to the bit by THREADS."""

    def run(
        x: np.ndarray, matrix: BlockMatrix, decode: int = 0, bias: Any = None, addend: Any = None, **options: Any
    ) -> np.ndarray:
        branch = Affine(matrix, bias, addend)
        first, *others = (step(x, branch, decode, Threads(count), options) for count in THREADS)
        for other in others:
            np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))
        return first

    return run


def bfloats(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as float64."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def tile_values(matrix: BlockMatrix) -> np.ndarray:
    """The weights as tiles hold them: rounded to eight bits, ties to even, or away from zero in float16 lanes."""
    exact = dequantized(matrix)
    if isinstance(weights_of(matrix), FloatWeights):
        return bfloats(exact)
    mantissa, exponent = np.frexp(exact.astype(np.float64))
    return np.ldexp(np.sign(mantissa) * np.floor(np.abs(mantissa) * 256 + 0.5), exponent - 8)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("rows, columns", [(1, 1), (33, 64), (70, 901), (96, 2048), (20, 2100), (40, 8200)])
def test_against_float64(
    block_matrix: Callable[..., BlockMatrix],
    prefill: Multiply,
    normal: Callable[..., np.ndarray],
    rows: int,
    columns: int,
) -> None:
    matrix = block_matrix(rows, columns)
    assert isinstance(weights_of(matrix), HalfWeights)
    x = normal(300, columns)
    x[:, ::41] *= 30
    whole = prefill(x, matrix)
    assert error(whole, bfloats(x) @ tile_values(matrix).T) < 1e-6
    assert error(whole, x.astype(np.float64) @ dequantized(matrix).astype(np.float64).T) < ROUNDING
    for count in (1, 16, 17, 32, 33, 64, 65, 96, 128, 129):  # every number of tiles, alone or with other rows
        np.testing.assert_array_equal(prefill(x[-count:], matrix), whole[-count:])


@pytest.mark.parametrize(
    "bits, block_size, zero_points, scale_type, kind",
    [
        (4, 64, "none", np.float16, HalfWeights),
        (4, 128, "packed", np.float16, HalfWeights),
        (8, 32, "none", np.float16, HalfWeights),
        (4, 32, "fractions", np.float32, FloatWeights),
        pytest.param(4, 256, "none", np.float16, HalfWeights, marks=DRAWN),
        pytest.param(8, 128, "packed", np.float16, HalfWeights, marks=DRAWN),
        pytest.param(8, 32, "fractions", np.float16, FloatWeights, marks=DRAWN),
        pytest.param(8, 64, "none", np.float32, FloatWeights, marks=DRAWN),
        pytest.param(4, 128, "none", np.float32, FloatWeights, marks=DRAWN),
    ],
)
def test_every_kind_of_weight(
    stored: Callable[..., dict[str, Any]], prefill: Multiply, normal: Callable[..., np.ndarray], bits: int,
    block_size: int, zero_points: str, scale_type: Any, kind: type,
) -> None:  # fmt: skip
    columns = 5 * block_size + 7
    arguments = stored(50, columns, bits, block_size, zero_points, scale_type)
    arguments["scales"] = (arguments["scales"] / 8).astype(scale_type)
    matrix, x = pack_matrix(**arguments), normal(100, columns)
    assert isinstance(weights_of(matrix), kind)
    assert error(prefill(x, matrix), bfloats(x) @ tile_values(matrix).T) < 1e-6
    np.testing.assert_array_equal(prefill(x[:40], matrix), prefill(x, matrix)[:40])


@pytest.mark.parametrize("rows, columns", [(1, 64), (40, 192), (96, 2048), pytest.param(65, 8256, marks=DRAWN)])
def test_dense_weights(prefill: Multiply, normal: Callable[..., np.ndarray], rows: int, columns: int) -> None:
    weight, x = normal(rows, columns).astype(ml_dtypes.bfloat16), normal(130, columns)
    matrix = pack_dense(weight, transposed=True)
    assert has_prefill(matrix)
    assert error(prefill(x, matrix), bfloats(x) @ weight.astype(np.float64).T) < 1e-6
    np.testing.assert_array_equal(prefill(x[:40], matrix), prefill(x, matrix)[:40])


def test_dense_weights_that_fill_no_tiles(normal: Callable[..., np.ndarray]) -> None:
    assert not has_prefill(pack_dense(normal(32, 80).astype(ml_dtypes.bfloat16), transposed=True))
    assert not has_prefill(pack_dense(normal(32, 64), transposed=True))


@pytest.mark.parametrize("tokens, widths", [(1, (3, 5)), (100, (50, 70)), (64, (64, 64)), (300, (257, 512))])
def test_sums_of_products(normal: Callable[..., np.ndarray], tokens: int, widths: tuple[int, int]) -> None:
    sums, expected = SumOfProducts(widths, Threads(2)), np.zeros(widths)
    for _ in range(3):
        a, b = normal(tokens, widths[0]), normal(tokens, widths[1])
        sums.add(a, b)
        expected += bfloats(a).T @ bfloats(b)
    assert error(sums.mean(1), expected) < 1e-6


@pytest.mark.parametrize("width", [5, 1000, 1024, 2100])
def test_sums_of_products_of_one_array(normal: Callable[..., np.ndarray], width: int) -> None:
    sums, a = SumOfProducts((width, width), Threads(2), same=True), normal(70, width)
    sums.add(a, a)
    sums.add(-a, -a)
    assert error(sums.mean(140), bfloats(a).T @ bfloats(a) / 70) < 1e-6


@pytest.mark.parametrize("factor", [2.0**-24, 2.0**-20, 1.0, 63.0, 64.0, 65000.0])
def test_ranges_of_scales(
    stored: Callable[..., dict[str, Any]], prefill: Multiply, normal: Callable[..., np.ndarray], factor: float
) -> None:
    arguments = stored(32, 64)
    arguments["scales"] = np.full((32, 2), factor, np.float16)
    arguments["scales"][::3] = -arguments["scales"][::3]
    arguments["scales"][5] = 0
    matrix, x = pack_matrix(**arguments), normal(33, 64)
    assert isinstance(weights_of(matrix), HalfWeights) == (2.0**-21 <= factor < 64)
    assert error(prefill(x, matrix), bfloats(x) @ tile_values(matrix).T) < 1e-6


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_scales_that_are_no_numbers(
    stored: Callable[..., dict[str, Any]], prefill: Multiply, normal: Callable[..., np.ndarray], value: float
) -> None:
    arguments = stored(32, 64)
    arguments["scales"][7, 1] = value
    out = prefill(normal(20, 64), pack_matrix(**arguments))
    assert not np.isfinite(out[:, 7]).any()
    assert np.isfinite(np.delete(out, 7, axis=1)).all()


def test_decode_and_prefill_together(
    block_matrix: Callable[..., BlockMatrix], prefill: Multiply, normal: Callable[..., np.ndarray]
) -> None:
    matrix, x = block_matrix(70, 200), normal(90, 200)
    bias, addend = normal(70), normal(90, 70)
    whole = prefill(x, matrix)
    for decode in (1, 17, 90):
        out = prefill(x, matrix, decode, bias=bias, addend=Rows.of(addend))
        np.testing.assert_array_equal(out[decode:], (whole + bias + addend)[decode:])
        np.testing.assert_array_equal(
            out[:decode], prefill(x[:decode], matrix, decode, bias=bias, addend=Rows.of(addend))
        )
        exact = x.astype(np.float64) @ dequantized(matrix).astype(np.float64).T + bias + addend
        assert error(out[:decode], exact[:decode]) < 0.02  # activations of 8 bits


@pytest.mark.parametrize("activation", ["silu", pytest.param("gelu_tanh", marks=pytest.mark.slow)])
def test_gate(
    block_matrix: Callable[..., BlockMatrix], prefill: Multiply, normal: Callable[..., np.ndarray], activation: str
) -> None:
    gate, up, x = block_matrix(50, 300), block_matrix(50, 300), normal(70, 300) / 8
    bias, up_bias = normal(50), normal(50)
    out = prefill(x, gate, 3, bias=bias, gate=activation, gated=Affine(up, up_bias))
    g = bfloats(x) @ tile_values(gate).T + bias
    inner = g if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    expected = g / (1 + np.exp(-inner)) * (bfloats(x) @ tile_values(up).T + up_bias)
    assert error(out[3:], expected[3:]) < 1e-6
    assert error(out[:3], expected[:3]) < 0.05


def test_gate_with_addends(
    block_matrix: Callable[..., BlockMatrix], prefill: Multiply, normal: Callable[..., np.ndarray]
) -> None:
    """Each branch adds its own rows before the activation. They may be strided."""
    gate, up, x = block_matrix(50, 300), block_matrix(50, 300), normal(70, 300) / 8
    bias, addend, up_addend = normal(50), normal(70, 50) * 9, normal(70, 60) * 9
    g, u = bfloats(x) @ tile_values(gate).T + bias, bfloats(x) @ tile_values(up).T
    apart = Rows.of(up_addend).columns(7, 50)
    for own, others in ((Rows.of(addend), apart), (Rows.of(addend), None), (None, apart)):
        out = prefill(x, gate, 3, bias=bias, addend=own, gate="silu", gated=Affine(up, addend=others))
        inner, outer = g + addend * (own is not None), u + up_addend[:, 7:57] * (others is not None)
        expected = inner / (1 + np.exp(-inner)) * outer
        assert error(out[3:], expected[3:]) < 1e-6
        assert error(out[:3], expected[:3]) < 0.05


def test_hard_rows(
    block_matrix: Callable[..., BlockMatrix], prefill: Multiply, normal: Callable[..., np.ndarray]
) -> None:
    """Zeros, denormals, huge numbers and outliers: every row has its own scale, whatever its neighbours are."""
    matrix, x = block_matrix(40, 96), normal(40, 96)
    clean = prefill(x, matrix)
    hard = x.copy()
    hard[1] = 0
    hard[2] = 1e-42
    hard[3] *= np.float32(1e30)
    hard[4, 7] = 3e36
    hard[5] *= np.float32(2.0**-100)
    hard[6] = np.float32(3e38)
    for row, value in ((7, np.inf), (8, -np.inf), (9, np.nan)):
        hard[row, 50] = value
    out = prefill(hard, matrix)
    weights = tile_values(matrix)
    assert not out[1].any()
    for row in (3, 4, 5):
        assert error(out[row], bfloats(hard[row]) @ weights.T) < 1e-6
    expected = hard[2].astype(np.float64) @ weights.T
    assert np.abs(out[2] - expected).max() <= 2.0**-8 * np.abs(expected).max()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.isinf(out[6]), np.isinf((bfloats(hard[6]) @ weights.T).astype(np.float32)))
    assert np.isnan(out[7:10]).all()
    np.testing.assert_array_equal(np.delete(out, range(1, 10), axis=0), np.delete(clean, range(1, 10), axis=0))


def test_refusals(block_matrix: Callable[..., BlockMatrix], normal: Callable[..., np.ndarray]) -> None:
    matrix, narrow, sixteen = block_matrix(32, 128), block_matrix(32, 64), block_matrix(32, 128, block_size=16)
    tiles = row_tiles_in(np.zeros(row_tiles_size(128, 32), np.uint8), 128)
    out = Rows.of(normal(4, 32))
    assert has_prefill(matrix) and not has_prefill(sixteen)
    with pytest.raises(ValueError, match="row tiles have 128 columns"):
        prefill_call(tiles, Affine(narrow), out)
    with pytest.raises(ValueError, match="this machine has no tile kernel"):
        prefill_call(tiles, Affine(sixteen), out)
    for wrong in (Affine(matrix, normal(3)), Affine(matrix, addend=Rows.of(normal(4, 3)))):
        with pytest.raises(ValueError, match=r"bias is|addend has 3 columns"):
            prefill_call(tiles, wrong, out)
        with pytest.raises(ValueError, match=r"bias is|addend has 3 columns"):
            prefill_call(tiles, Affine(matrix), out, gate="silu", gated=wrong)
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 200\]"):
        row_tiles_call(Rows.of(normal(4, 200)), tiles)


class Constants(dict[str, np.ndarray]):
    """Arrays by name. Packed weights are cached per object, whatever its arrays."""

    __hash__ = object.__hash__

    def array(self, name: str) -> np.ndarray:
        return self[name]

    def packed(self, weight: ir.Weight) -> None:
        """Arrays may be read again."""


def test_products_of_a_program(
    stored: Callable[..., dict[str, Any]], prefill: Multiply, normal: Callable[..., np.ndarray]
) -> None:
    """Matmuls of one value share its tiles. Decode and prefill rows are multiplied with separate numerics."""
    constants, weights, widths, x = Constants(), PackedWeights(Threads(1)), {"x": 64, "a": 40, "b": 70}, normal(50, 64)
    types = {name: ir.RowsType((1, -1, width), width) for name, width in widths.items()}
    lowering = Lowering({StepField.TOKENS: 64, StepField.LOGITS_ROWS: 4}, types, constants, weights)
    lowering.expect(["x", "x", "a", "b"])
    lowering.make("x")
    matrices = {}
    for name in "ab":
        arrays = stored(widths[name], 64)
        constants[name], constants[f"{name} scales"] = arrays["weight"], arrays["scales"]
        weight = ir.BlockWeight(name, f"{name} scales", "", widths[name], 64, uniform_format(4, 32))
        matrices[name] = weights.matrix(weight, constants)
        record = ir.Linear("x", ir.Projection(weight), name, exact=False)
        lower(record, lowering)
        lowering.done(record.inputs, record.outputs)
    program = lowering.finish()
    assert [call.op.name for call in program.calls].count("fill_row_tiles") == 1
    for decode in (0, 3, 50):
        context = ContextTable()
        for field, count in (
            (StepField.TOKENS, 50),
            (StepField.DECODE_ROWS, decode),
            (StepField.PREFILL_ROWS, 50 - decode),
        ):
            context.count(field, count)
        view(lowering.buffers["x"], 50)[:] = x
        Threads(2).run(program, context, nanoseconds=SHARED)
        for name, matrix in matrices.items():
            np.testing.assert_array_equal(view(lowering.buffers[name], 50), prefill(x, matrix, decode))


def view(rows: Rows, count: int) -> np.ndarray:
    """The first rows as an array."""
    memory = rows.held[: count * rows.stride].view(np.float32)
    return memory.reshape(count, -1)[:, : rows.width]
