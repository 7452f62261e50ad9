"""Weight formats: their meaning, their bits, rounding to each, and invalid arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from genai.kernels.weights import (
    CODE_BITS,
    ROW,
    QuantizationError,
    QuantizedWeight,
    WeightFormat,
    pack_bits,
    uniform_format,
    uniform_grid,
    unpack_bits,
)
from genai.quant import formats
from genai.quant.formats import GRIDS, row_scaled_format
from tests.nearest import round_to_nearest

Form = tuple[WeightFormat, Any]
FORMS: dict[str, Form] = {
    f"uniform {bits} by {size or 'row'}{' with zero points' * points}": (
        uniform_format(bits, size, zero_points=points),
        None,
    )
    for bits in CODE_BITS
    for size in (16, 32, 256, ROW)
    for points in (False, True)
} | {
    "Q2_K": (formats.Q2_K, None),
    "Q3_K": (formats.Q3_K, None),
    "Q4_K": (formats.Q4_K, None),
    "Q5_K": (formats.Q5_K, None),
    "Q6_K": (formats.Q6_K, None),
    "IQ4_XS": (formats.IQ4_XS, GRIDS["iq4"]),
    "IQ4_NL": (formats.IQ4_NL, GRIDS["iq4"]),
    "MXFP4": (formats.MXFP4, GRIDS["mxfp4"]),
    "NF4": (uniform_format(4, 64), GRIDS["nf4"]),
    "FP4": (uniform_format(4, 64), GRIDS["fp4"]),
    "4 bits by row": (row_scaled_format(4, 32), GRIDS["iq4"]),
    "3 bits by row": (row_scaled_format(3, 32), np.array([-63, -40, -23, -10, 1, 13, 28, 47], np.float32)),
    "2 bits by row": (row_scaled_format(2, 32, 4), np.array([-31, -13, 1, 17], np.float32)),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def meaning(weight: QuantizedWeight, row: int, column: int) -> float:
    """Compute one value of a weight in float64, directly from its bits."""
    form = weight.format
    places = range(column * form.bits, (column + 1) * form.bits)
    code = sum((int(weight.data[row, at // 8]) >> (at % 8) & 1) << number for number, at in enumerate(places))
    block, group = (column // size if size else 0 for size in (form.block_size, form.group_size))
    multiplier = 1 if weight.multipliers is None else int(weight.multipliers[row, block])
    value = float(weight.scales[row, group]) * multiplier * float(weight.grid[code])
    if weight.offsets is None or weight.offset_scales is None:
        return value
    return value - float(weight.offset_scales[row, group]) * int(weight.offsets[row, block])


@pytest.mark.parametrize("name", FORMS)
def test_values_are_what_the_formula_says(name: str, rng: np.random.Generator) -> None:
    form, grid = FORMS[name]
    k = 300
    codes = rng.integers(0, 1 << form.bits, (3, k))
    groups, blocks = (3, form.groups(k)), (3, form.blocks(k))
    low = -form.multiplier_zero
    weight = QuantizedWeight.from_codes(
        form, codes, rng.standard_normal(1 << form.bits, np.float32) if grid is None else grid,
        rng.standard_normal(groups, np.float32),
        rng.integers(low, low + (1 << form.multiplier_bits), blocks).astype(np.int16) if form.multiplier_bits else None,
        rng.standard_normal(groups, np.float32) if form.offset_bits else None,
        rng.integers(0, 1 << form.offset_bits, blocks).astype(np.uint8) if form.offset_bits else None,
    )  # fmt: skip
    np.testing.assert_array_equal(weight.codes, codes)
    found = weight.dequantize()
    expected = np.array([[meaning(weight, row, column) for column in range(k)] for row in range(3)])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", FORMS)
def test_rounding_takes_the_nearest_value_there_is(name: str, rng: np.random.Generator) -> None:
    """With the chosen scales, no other code of any weight is nearer; zeros stay nearly zero."""
    form, grid = FORMS[name]
    weight = rng.standard_normal((5, 333)).astype(np.float32)
    weight[1] = np.abs(weight[1])
    weight[2, :300] = 0
    found = round_to_nearest(weight, form, grid)
    error = np.abs(found.dequantize() - weight)
    for code in range(1 << form.bits):
        same = pack_bits(np.full((5, form.padded(333)), code), form.bits)
        other = replace(found, data=same)
        assert np.all(error <= np.abs(other.dequantize() - weight) + 1e-6)
    limit = {2: 0.6, 3: 0.3, 4: 0.16, 5: 0.08, 6: 0.04, 8: 0.01}[form.bits] * (1.3 if form.block_size == ROW else 1)
    assert np.sqrt(np.mean(error[3:] ** 2)) < limit
    assert np.abs(found.dequantize()[2, :256]).max() < 1e-6


@pytest.mark.parametrize(
    ("name", "bits"),
    [("Q2_K", 2.625), ("Q3_K", 3.4375), ("Q4_K", 4.5), ("Q5_K", 5.5), ("Q6_K", 6.5625), ("IQ4_XS", 4.25),
     ("IQ4_NL", 4.5), ("4 bits by row", 4.25 + 32 / 2048), ("uniform 3 by 32", 3.5),
     ("uniform 3 by 32 with zero points", 3.5 + 3 / 32), ("uniform 2 by row", 2 + 32 / 2048)],
)  # fmt: skip
def test_bits_per_weight(name: str, bits: float, rng: np.random.Generator) -> None:
    """Equal to llama.cpp's, for the formats that it has."""
    form, grid = FORMS[name]
    found = round_to_nearest(rng.standard_normal((4, 2048), np.float32) * 100, form, grid)
    assert found.bits_per_weight == pytest.approx(bits)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("count", [1, 7, 16, 33])
def test_rows_of_bits(bits: int, count: int, rng: np.random.Generator) -> None:
    numbers = rng.integers(0, 1 << bits, (3, count)).astype(np.uint8)
    packed = pack_bits(numbers, bits)
    assert packed.shape == (3, -(-count * bits // 8))
    np.testing.assert_array_equal(unpack_bits(packed, bits, count), numbers)
    whole = sum(int(number) << (bits * place) for place, number in enumerate(numbers[1].tolist()))
    assert int.from_bytes(packed[1].tobytes(), "little") == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 32, 32), "bits is 7, expected one of 2, 3, 4, 5, 6, 8"),
        ((4, 40, 40), "block_size is 40"),
        ((4, 32, 32, 9), "multiplier_bits is 9"),
        ((4, 32, 32, 8, True, 1), "offset_bits is 1"),
        ((4, 32, 48, 8), "group_size is 48, expected a multiple of block_size 32"),
        ((4, 32, 256), "blocks of 32 in groups of 256 need multipliers"),
    ],
)
def test_forms_that_there_are_not(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        WeightFormat(*arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((2, 9), np.uint8)}, r"data is uint8 \[2, 9\]"),
        ({"scales": np.zeros((2, 8), np.float32)}, r"scales is float32 \[2, 8\], expected float32 \[2, 1\]"),
        ({"grid": np.zeros(4, np.float32)}, r"grid is float32 \[4\], expected float32 \[16\]"),
        ({"multipliers": None}, "multipliers is absent"),
        ({"multipliers": np.full((2, 8), 64, np.int16)}, r"multipliers range from 64 to 64, expected 0 to 63"),
        ({"offsets": np.full((2, 8), 64, np.uint8)}, r"offsets range from 64 to 64, expected 0 to 63"),
        ({"offset_scales": None}, "offset_scales is absent"),
        ({"rows": 0}, "0 x 250"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    good = round_to_nearest(np.ones((2, 250), np.float32), formats.Q4_K)
    with pytest.raises(QuantizationError, match=message):
        replace(good, **change)


def test_what_one_form_has_another_has_not() -> None:
    good = round_to_nearest(np.ones((2, 250), np.float32), uniform_format(4, 32))
    with pytest.raises(QuantizationError, match="offsets is given"):
        replace(good, offsets=np.zeros((2, 8), np.uint8))
    with pytest.raises(QuantizationError, match=r"codes range from 16 to 16"):
        QuantizedWeight.from_codes(good.format, np.full((2, 250), 16), good.grid, good.scales)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rounding_refuses_numbers_that_are_not_finite(value: float) -> None:
    weight = np.ones((300, 1024), np.float32)
    weight[257, 40] = value
    with pytest.raises(QuantizationError, match="row 257, block 1"):
        round_to_nearest(weight, formats.Q4_K)


@pytest.mark.parametrize(
    ("weight", "grid", "message"),
    [
        (np.ones(32), None, r"shape \[32\]"),
        (np.ones((0, 32)), None, r"shape \[0, 32\]"),
        (np.ones((1, 32)), np.zeros(16), "not all zero"),
        (np.ones((1, 32)), np.ones(15), r"grid is \[15\]"),
        (np.ones((1, 32)), "offsets", "grid begins at -8"),
    ],
)
def test_rounding_refuses(weight: NDArray[Any], grid: Any, message: str) -> None:
    points = isinstance(grid, str)
    with pytest.raises(QuantizationError, match=message):
        round_to_nearest(weight, uniform_format(4, 32, zero_points=points), uniform_grid(4) if points else grid)


def test_rows_do_not_depend_on_their_neighbours(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((300, 1024), np.float32)
    whole, alone = round_to_nearest(weight, formats.Q3_K), round_to_nearest(weight[123:124], formats.Q3_K)
    np.testing.assert_array_equal(whole.data[123], alone.data[0])


def test_uniform_grids() -> None:
    np.testing.assert_array_equal(uniform_grid(3), np.arange(-4, 4))
    np.testing.assert_array_equal(uniform_grid(2, centred=False), np.arange(4))
