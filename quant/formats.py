"""Quantised weights of every form, as arrays: what they are made of, what they mean, how many bits they take.

`QuantizedWeight` holds any of them; see `kernels.weight_formats` for the one formula. The families:

- uniform: `uniform_format(bits, block_size)`, with `uniform_grid`; symmetric, or with zero points.
- two levels: `Q2_K` to `Q6_K` (and `IQ4_XS`): groups of 256 columns with floats, blocks of 16 or 32 with integers.
- a grid of its own: `IQ4_NL`, `MXFP4`, NF4 and the like (`GRIDS`), or `row_scaled_format(bits, block_size)`: one float
  per row, 8 bits per block, and any grid of 2 to 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import ROW as ROW, WeightArrays, WeightFormat, pack_bits, unpack_bits

from .blocks import QuantizationError
from .threads import worker_count

# Numbers that are packed at once.
_CHUNK_FLOATS = 1 << 16
# What llama.cpp's k-quants are (ggml-common.h): codes, and per block multipliers and minima.
Q2_K = WeightFormat(2, 16, 256, multiplier_bits=4, offset_bits=4)
Q3_K = WeightFormat(3, 16, 256, multiplier_bits=6, signed=True)
Q4_K = WeightFormat(4, 32, 256, multiplier_bits=6, offset_bits=6)
Q5_K = WeightFormat(5, 32, 256, multiplier_bits=6, offset_bits=6)
Q6_K = WeightFormat(6, 16, 256, multiplier_bits=8, signed=True)
IQ4_XS = WeightFormat(4, 32, 256, multiplier_bits=6, signed=True)
IQ4_NL = WeightFormat(4, 32, 32)
MXFP4 = WeightFormat(4, 32, 32)

# ik_llama.cpp's for 3 and 2 bits (iqk_quantize.cpp, iq3nl_values and iq2nl_values).
_IQ3 = (-63, -40, -23, -10, 1, 13, 28, 47)
_IQ2 = (-31, -13, 1, 17)
_NF4 = (  # Dettmers et al. 2023, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' 4-bit floats, as its decoder has them: a sign, and eighths of the powers of two.
_FP4_HALF = (0.0, 5.208333333e-03, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_MXFP4_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1: OCP Microscaling Formats 1.0
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml-common.h, kvalues_iq4nl

GRIDS: dict[str, NDArray[np.float32]] = {
    "nf4": np.array(_NF4, np.float32),
    "fp4": np.array([*_FP4_HALF, *(-value for value in _FP4_HALF)], np.float32),
    "mxfp4": np.array([*_MXFP4_HALF, *(-value for value in _MXFP4_HALF)], np.float32),
    "iq4": np.array(_IQ4, np.float32),
    "iq3": np.array(_IQ3, np.float32),
    "iq2": np.array(_IQ2, np.float32),
}


def uniform_format(bits: int, block_size: int, *, zero_points: bool = False) -> WeightFormat:
    """One level: a scale per block (ROW: per row), and with `zero_points` an integer of as many bits as a code has."""
    return WeightFormat(bits, block_size, block_size, offset_bits=bits if zero_points else 0)


def row_scaled_format(bits: int, block_size: int, multiplier_bits: int = 8) -> WeightFormat:
    """One float per row, and a signed integer per block of 16 or 32 (more are as good)."""
    return WeightFormat(bits, block_size, ROW, multiplier_bits=multiplier_bits, signed=True)


def uniform_grid(bits: int, *, centred: bool = True) -> NDArray[np.float32]:
    """The integers of so many bits, float32 [2 ** bits]: around zero as symmetric formats have them, or from 0 on."""
    return np.arange(1 << bits, dtype=np.float32) - np.float32((1 << (bits - 1)) * centred)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [n, k] of quantised numbers.

    Attributes:
        format: how many bits what has, and what shares it.
        n, k: rows (outputs), columns (inputs).
        data: uint8 [n, padded k * bits / 8], rows of bits; see `codes`. What fills a row up is never read.
        grid: float32 [2 ** bits], what a code stands for.
        scales: float32 [n, groups].
        multipliers: int16 [n, blocks], or None.
        offset_scales: float32 [n, groups], or None. For zero points these are the scales.
        offsets: uint8 [n, blocks], or None.

    Raises:
        QuantizationError: an array has another type or shape, or numbers that its bits cannot hold.
    """

    format: WeightFormat
    n: int
    k: int
    data: NDArray[np.uint8]
    grid: NDArray[np.float32]
    scales: NDArray[np.float32]
    multipliers: NDArray[np.int16] | None = None
    offset_scales: NDArray[np.float32] | None = None
    offsets: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        form, k = self.format, self.k
        if self.n < 1 or k < 1:
            raise QuantizationError(f"a weight of {self.n} x {k} numbers, expected at least one row and one column")
        groups, blocks = (self.n, form.groups(k)), (self.n, form.blocks(k))
        _check("data", self.data, (self.n, form.padded(k) * form.bits // 8), "B")
        _check("grid", self.grid, (1 << form.bits,), "f")
        _check("scales", self.scales, groups, "f")
        for name, wanted, shape, kind in (
            ("multipliers", form.multiplier_bits, blocks, "h"),
            ("offset_scales", form.offset_bits, groups, "f"),
            ("offsets", form.offset_bits, blocks, "B"),
        ):
            array = getattr(self, name)
            if (array is None) == bool(wanted):
                raise QuantizationError(f"{name} is {'absent' if wanted else 'given'}, which {form} does not expect")
            if array is not None:
                _check(name, array, shape, kind)
        if self.multipliers is not None:
            low = -form.multiplier_zero
            _check_range("multipliers", self.multipliers, low, low + (1 << form.multiplier_bits) - 1)
        if self.offsets is not None:
            _check_range("offsets", self.offsets, 0, (1 << form.offset_bits) - 1)

    @classmethod
    def of_codes(
        cls, form: WeightFormat, codes: NDArray[Any], grid: NDArray[np.float32], scales: NDArray[np.float32],
        multipliers: NDArray[np.int16] | None = None, offset_scales: NDArray[np.float32] | None = None,
        offsets: NDArray[np.uint8] | None = None,
    ) -> QuantizedWeight:  # fmt: skip
        """From codes [n, k], integers below 2 ** bits; what fills rows up becomes 0."""
        if codes.ndim != 2 or 0 in codes.shape or codes.dtype.kind not in "iu":
            raise QuantizationError(f"codes are {codes.dtype} {list(codes.shape)}, expected integers [n, k]")
        _check_range("codes", codes, 0, (1 << form.bits) - 1)
        n, k = codes.shape
        data = np.empty((n, form.padded(k) * form.bits // 8), np.uint8)

        def pack(rows: slice) -> None:
            padded = codes[rows]
            if form.padded(k) > k:
                padded = np.zeros((len(padded), form.padded(k)), np.uint8)
                padded[:, :k] = codes[rows]
            data[rows] = pack_bits(padded, form.bits)

        _by_rows(pack, n, k)
        return cls(form, n, k, data, grid, scales, multipliers, offset_scales, offsets)

    @property
    def arrays(self) -> WeightArrays:
        """What kernels lay out."""
        parts = (self.data, self.grid, self.scales, self.multipliers, self.offset_scales, self.offsets)
        return WeightArrays(self.format, self.n, self.k, *parts)

    @property
    def codes(self) -> NDArray[np.uint8]:
        """uint8 [n, k]."""
        return unpack_bits(self.data, self.format.bits, self.k)

    def rows(self, rows: slice) -> NDArray[np.float32]:
        """Some rows of the weights as float32 [rows, k]."""
        return self.arrays.dequantized(rows=rows)

    def dequantise(self) -> NDArray[np.float32]:
        """The weights as float32 [n, k]."""
        arrays, values = self.arrays, np.empty((self.n, self.k), np.float32)

        def fill(rows: slice) -> None:
            values[rows] = arrays.dequantized(rows=rows)

        _by_rows(fill, self.n, self.k)
        return values

    @property
    def half_scales(self) -> bool:
        """Whether float16 holds all scales exactly, so that they take 16 bits where they are stored."""
        return all(_fits_half(array) for array in (self.scales, self.offset_scales) if array is not None)

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes as it is stored, scales and what fills rows up included."""
        floats = 1 if self.offset_scales is None or self.offset_scales is self.scales else 2
        scale_bits = 16 if self.half_scales else 32
        return self.format.bits_per_weight(self.k, scale_bits, floats_per_group=floats)


def _by_rows(work: Callable[[slice], None], rows: int, columns: int) -> None:
    """work(rows) of all rows, in pieces that a core's cache holds."""
    step = max(1, _CHUNK_FLOATS // columns)
    with ThreadPoolExecutor(worker_count()) as pool:
        for _ in pool.map(work, [slice(first, min(first + step, rows)) for first in range(0, rows, step)]):
            pass


def _fits_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _check(name: str, array: NDArray[Any], shape: tuple[int, ...], kind: str) -> None:
    if array.shape != shape or array.dtype.char != kind:
        raise QuantizationError(f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(kind)} {list(shape)}")


def _check_range(name: str, array: NDArray[Any], low: int, high: int) -> None:
    if array.size and (array.min() < low or array.max() > high):
        raise QuantizationError(f"{name} lie in [{array.min()}, {array.max()}], expected [{low}, {high}]")
