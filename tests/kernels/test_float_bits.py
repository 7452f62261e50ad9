"""Floats of 16 and 8 bits: what their bits mean, and how numbers are rounded to them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from genai.kernels.float_bits import read_floats, stored_floats


def meaning(code: int) -> float:
    """A number of E4M3, by its definition."""
    sign, exponent, digits = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * (digits / 8 * 2.0**-6 if exponent == 0 else (1 + digits / 8) * 2.0 ** (exponent - 7))


def test_every_code_of_float8() -> None:
    codes = np.arange(256, dtype=np.uint8)
    numbers = read_floats(codes, "float8")
    assert numbers.dtype == np.float32
    np.testing.assert_array_equal(numbers, [meaning(code) for code in range(256)])
    again = stored_floats(numbers, "float8")
    assert np.array_equal(again, codes)  # NaN keeps its sign, 0 too


def test_float8_takes_the_nearest_number_and_of_two_the_even_one() -> None:
    """Between neighbours, in their middle, and a little beside it."""
    positive = np.array([meaning(code) for code in range(127)])
    for code, (low, high) in enumerate(pairwise(positive)):
        middle, step = (low + high) / 2, (high - low) / 64
        given = np.array([low + step, middle - step, middle, middle + step, high - step])
        wanted = np.array([code, code, code + code % 2, code + 1, code + 1])
        for dtype in (np.float32, np.float64):
            assert np.array_equal(stored_floats(given.astype(dtype), "float8"), wanted)
            assert np.array_equal(stored_floats(-given.astype(dtype), "float8"), wanted | 128)


def test_float8_has_no_infinity() -> None:
    given = np.array([448, 449, 464, 480, 1e30, np.inf, -464, -np.inf, np.nan])
    numbers = read_floats(stored_floats(given, "float8"), "float8")
    np.testing.assert_array_equal(numbers, [448] * 6 + [-448] * 2 + [np.nan])


def test_bfloat16_is_half_of_a_float32() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32)
    bits[:5000] = bits[:5000] & 0xFFFF0000 | 0x8000  # in the middle between two
    given = bits.view(np.float32)
    finite = np.isfinite(given)
    with np.errstate(invalid="ignore"):  # some are NaN
        found = stored_floats(given, "bfloat16")
    wanted = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(found[finite], wanted[finite])
    numbers = read_floats(found, "bfloat16")
    assert np.array_equal(np.isnan(numbers), np.isnan(given))
    assert np.array_equal(stored_floats(np.float32([np.inf, -np.inf]), "bfloat16"), [0x7F80, 0xFF80])


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_numpys_own_types_are_as_they_are(kind: str) -> None:
    given = np.array([1.0, 1 / 3, 65504.0])
    stored = stored_floats(given, kind)
    assert stored.dtype == kind and read_floats(stored, kind) is stored
