"""Matmuls and look-ups of weights of every format against float64. Results do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.checks import FormatError
from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.calls import Affine
from genai.kernels.cpu.linear.formats import grid_of, pack_weight
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.weight_layout import BlockMatrix
from genai.kernels.weights import ROW, QuantizedWeight, WeightFormat, uniform_format, uniform_grid
from genai.quant import formats
from genai.quant.formats import GRIDS, row_scaled_format
from tests.instructions import other_instructions
from tests.nearest import round_to_nearest

Multiply = Callable[..., np.ndarray]
DRAWN = (pytest.mark.slow, pytest.mark.drawn(8))
TWO_BITS = np.array([-31, -13, 1, 17], np.float32)
THREE_BITS = np.array([-63, -40, -23, -10, 1, 13, 28, 47], np.float32)

# Name -> format, grid (None = integers): first those of every run, then those that are drawn.
CORE: dict[str, tuple[WeightFormat, Any]] = {
    "2 by 32": (uniform_format(2, 32), None),
    "3 by 64": (uniform_format(3, 64), None),
    "5 by 16": (uniform_format(5, 16), None),
    "6 by row": (uniform_format(6, ROW), None),
    "3 by 32 with zero points": (uniform_format(3, 32, zero_points=True), None),
    "Q2_K": (formats.Q2_K, None),
    "Q3_K": (formats.Q3_K, None),
    "Q4_K": (formats.Q4_K, None),
    "IQ4_XS": (formats.IQ4_XS, GRIDS["iq4"]),
    "MXFP4": (formats.MXFP4, GRIDS["mxfp4"]),
    "NF4": (uniform_format(4, 64), GRIDS["nf4"]),
    "4 bits by rows": (row_scaled_format(4, 32), GRIDS["iq4"]),
    "2 bits by rows": (row_scaled_format(2, 16, 4), TWO_BITS),
}
OTHERS: dict[str, tuple[WeightFormat, Any]] = {
    **{
        f"uniform {bits} by {size or 'row'}{' with zero points' * points}": (
            uniform_format(bits, size, zero_points=points), None
        )
        for bits in (2, 3, 4, 5, 6, 8) for size in (16, 32, 128, 256, ROW) for points in (False, True)
    },
    "Q5_K": (formats.Q5_K, None),
    "Q6_K": (formats.Q6_K, None),
    "IQ4_NL": (formats.IQ4_NL, GRIDS["iq4"]),
    "FP4": (uniform_format(4, 128), GRIDS["fp4"]),
    "3 bits by rows": (row_scaled_format(3, 32), THREE_BITS),
    "offsets of rows": (WeightFormat(4, 32, ROW, 8, False, 8), None),
    "a row of one block": (WeightFormat(3, ROW, ROW, 8, True), THREE_BITS),
    "groups of 64": (WeightFormat(2, 16, 64, 6, True), TWO_BITS),
}  # fmt: skip
FORMS = {**CORE, **OTHERS}
NAMES = [*CORE, *(pytest.param(name, marks=DRAWN) for name in OTHERS)]


def made(name: str, normal: Callable[..., np.ndarray], n: int, k: int) -> QuantizedWeight:
    """Ordinary rows, one of zeros, one of one sign, one with outliers; MXFP4 has powers of two."""
    form, grid = FORMS[name]
    weight = normal(n, k)
    weight[3], weight[4] = 0, np.abs(weight[4])
    weight[5, ::50] *= 40
    found = round_to_nearest(weight, form, grid)
    if name == "MXFP4":
        scales = np.exp2(np.round(np.log2(np.maximum(np.abs(found.scales), 2.0**-20)))).astype(np.float32)
        found = QuantizedWeight.from_codes(form, found.codes, found.grid, scales)
    return found


def as_bytes(weight: QuantizedWeight) -> np.ndarray:
    """The weights in matmuls with quantised activations: values of a grid are whole numbers of its unit."""
    grid = grid_of(weight.grid)
    if grid.zero is not None:
        return weight.dequantize().astype(np.float64)
    steps = np.rint(grid.values[: len(weight.grid)])
    assert np.abs(steps * grid.unit - weight.grid).max() <= np.abs(weight.grid).max() / 128
    whole = (steps.astype(np.float64) * grid.unit).astype(np.float32)
    return QuantizedWeight(
        weight.format, weight.rows, weight.columns, weight.data, whole, weight.scales, weight.multipliers
    ).dequantize().astype(np.float64)  # fmt: skip


def rounded(x: np.ndarray, block_size: int) -> np.ndarray:
    """The values of x as 8-bit activations, in float64."""
    result = np.zeros(x.shape)
    for first in range(0, x.shape[1], block_size):
        block = x[:, first : first + block_size]
        largest = np.abs(block).max(axis=1, keepdims=True)
        scale = (largest / np.float32(127)).astype(np.float64)
        result[:, first : first + block_size] = np.rint(block * (np.float32(127) / largest)) * scale
    return result


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 2e-6) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n, k", [(70, 500), (16, 1)])
def test_tables_hold_what_was_packed(name: str, n: int, k: int, normal: Callable[..., np.ndarray]) -> None:
    weight = made(name, normal, n, k)
    found, expected = block_rows(np.arange(n), pack_weight(weight)), weight.dequantize()
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_products_against_float64(name: str, normal: Callable[..., np.ndarray], multiply: Multiply) -> None:
    """Each of any number of rows has the same bits as alone, with a bias and rows of addends."""
    weight = made(name, normal, 70, 700)
    matrix, x = pack_weight(weight), normal(23, 700)
    x[:, ::31] *= 20
    bias = normal(70)
    for quantized in (True, False):
        seen = rounded(x, matrix.layout.block_size) if quantized else x.astype(np.float64)
        values = as_bytes(weight) if quantized else weight.dequantize().astype(np.float64)
        out = multiply(x, matrix, quantized=quantized, bias=bias)
        close(out, seen @ values.T + bias)
        for first, rows in ((0, 1), (1, 2), (3, 3), (6, 5), (11, 8)):
            some = multiply(x[first : first + rows], matrix, quantized=quantized, bias=bias)
            np.testing.assert_array_equal(some.view(np.uint32), out[first : first + rows].view(np.uint32))


@pytest.mark.parametrize("name", ["3 by 64", "Q4_K", "4 bits by rows"])
def test_gates(name: str, normal: Callable[..., np.ndarray], multiply: Multiply) -> None:
    """Each of the two matrices has its own grid and row scales."""
    gate, up = made(name, normal, 40, 512), made(name, normal, 40, 512)
    if gate.format.group_size == ROW:
        changed = (np.float32(-1) * up.grid)[::-1].copy()
        up = QuantizedWeight(up.format, 40, 512, up.data, changed, up.scales, up.multipliers)
    x = normal(11, 512)
    matrices = pack_weight(gate), pack_weight(up)
    out = multiply(x, matrices[0], quantized=True, gate="silu", gated=Affine(matrices[1]))
    seen = rounded(x, matrices[0].layout.block_size)
    g, u = (seen @ weight.dequantize().astype(np.float64).T for weight in (gate, up))
    close(out, g / (1 + np.exp(-g)) * u, 1e-5)


def test_bytes_that_a_weight_takes(normal: Callable[..., np.ndarray]) -> None:
    """Packed weights are at most 6 % larger than stored ones, with multipliers of fewer bits counted as bytes."""
    for name in CORE:
        weight = made(name, normal, 64, 2048)
        packed: BlockMatrix = pack_weight(weight)
        stored = weight.bits_per_weight
        if weight.format.multiplier_bits and not weight.format.offset_bits:
            bits = 8 - weight.format.multiplier_bits
            stored += bits * weight.format.blocks(2048) / 2048
        assert 8 * packed.nbytes <= 1.06 * stored * 64 * 2048, name


def test_scales_are_powers_of_two_where_all_are(normal: Callable[..., np.ndarray]) -> None:
    matrix = pack_weight(made("MXFP4", normal, 16, 64))
    assert matrix.layout.factors == "exponent"
    small = made("MXFP4", normal, 16, 64)
    scales = np.full_like(small.scales, 2.0**-127)
    tiny = QuantizedWeight.from_codes(small.format, small.codes, small.grid, scales)
    np.testing.assert_allclose(block_rows(np.arange(16), pack_weight(tiny)), tiny.dequantize(), atol=2.0**-149)


def test_threads_pack_the_same(normal: Callable[..., np.ndarray], threads: Threads) -> None:
    weight = made("5 by 16", normal, 700, 96)
    np.testing.assert_array_equal(pack_weight(weight).data, pack_weight(weight, threads=threads).data)


@pytest.mark.parametrize(
    ("form", "grid", "message"),
    [
        (WeightFormat(4, 32, 256, 6, False, 6), GRIDS["iq4"], "kernels support offsets only with uniform grids"),
        (uniform_format(6, 32), np.arange(64, dtype=np.float32) ** 2, "at most 16"),
        (
            WeightFormat(4, 32, 256, 6, True),
            uniform_grid(4, centred=False),
            "a grid that starts at 0, but matmuls need",
        ),
        (
            WeightFormat(4, 32, ROW, 6, True),
            uniform_grid(4, centred=False),
            "a grid that starts at 0, but matmuls need",
        ),
        (WeightFormat(4, 32, 256, 6, False, 6), uniform_grid(4), "matmuls need offsets and a grid that starts at 0"),
    ],
)
def test_refused(form: WeightFormat, grid: Any, message: str, normal: Callable[..., np.ndarray]) -> None:
    weight = round_to_nearest(normal(16, 256), form, None if form.offset_bits else grid)
    with pytest.raises(FormatError, match=message):
        pack_weight(replace(weight, grid=grid))


def test_offsets_without_a_scale_are_refused(normal: Callable[..., np.ndarray]) -> None:
    weight = round_to_nearest(normal(16, 64), uniform_format(4, 32, zero_points=True))
    scales = weight.scales.copy()
    scales[7, 1] = 0
    codes = weight.codes
    bad = QuantizedWeight.from_codes(
        weight.format, codes, weight.grid, scales, None, np.ones_like(scales), np.maximum(weight.offsets, 1)
    )
    with pytest.raises(FormatError, match="row 7, block 1 has a scale of 0 and an offset"):
        pack_weight(bad)


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    """Run this file again with the kernels of another instruction set (if the machine has it)."""
    with_instructions(name, __file__)
