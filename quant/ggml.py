"""Conversion of llama.cpp's quantised blocks (ggml-common.h, MIT) to quantised weights, with every number exact.

Every type is an instance of the formula in `kernels.weights`, so nothing is rounded: codes select values of a grid,
blocks have integers, and groups have floats. Types that select whole vectors from a table (IQ1, IQ2, IQ3) need more
bits here, because each number of a vector gets a separate code. See `quant.block_types` for arrays of such blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import WeightFormat, uniform_format, uniform_grid

from . import formats
from .block_types import BlockType, Bytes, Decoder, Floats, Numbers, register
from .formats import GRIDS
from .ggml_grids import level_table

# The number of columns in a super-block.
_SUPER = 256


@dataclass(frozen=True)
class GgmlType(BlockType):
    """A block type of llama.cpp; `number` identifies the type in GGUF files."""

    number: int


def _floats(blocks: Bytes, first: int, count: int = 1) -> Floats:
    """Return the float16 numbers at a byte offset in each block, as float32."""
    cut = np.ascontiguousarray(blocks[..., first : first + 2 * count])
    return cut.view(np.float16).astype(np.float32)


def _words(blocks: Bytes, first: int, last: int, kind: str) -> NDArray[Any]:
    """Return a range of bytes of each block, as unsigned integers."""
    return np.ascontiguousarray(blocks[..., first:last]).view(kind)


def _flat(array: NDArray[Any], blocks: Bytes) -> NDArray[Any]:
    return array.reshape(*blocks.shape[:-1], -1)


def _runs(low: Bytes, bits: int, run: int) -> Bytes:
    """Unpack runs of bytes: the lowest `bits` hold the first numbers, the next bits the next numbers, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    cut = low.reshape(*low.shape[:-1], -1, 1, run)
    return _flat(cut >> shifts & np.uint8((1 << bits) - 1), low)


def _each(packed: NDArray[Any], shifts: range, mask: int) -> NDArray[Any]:
    """Extract several numbers from each integer [..., count], side by side: [..., count * len(shifts)]."""
    steps = np.array(shifts, packed.dtype)
    numbers: NDArray[Any] = packed[..., None] >> steps & packed.dtype.type(mask)
    return numbers.reshape(*packed.shape[:-1], -1)


def _single_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _plain(first: int, high: int | None, *, least: bool = False) -> Decoder:
    """Decode Q4_0 to Q5_1: nibbles starting at byte `first`, fifth bits at `high`, a scale, and possibly a minimum."""

    def read(blocks: Bytes) -> Numbers:
        codes = _runs(blocks[..., first:], 4, 16)
        if high is not None:
            codes |= _single_bits(blocks[..., high : high + 4]) << np.uint8(4)
        if not least:
            return codes, _floats(blocks, 0)
        ones = np.ones((*blocks.shape[:-1], 1), np.uint8)
        return codes, _floats(blocks, 0), ones, -_floats(blocks, 2), ones

    return read


def _q8_0(blocks: Bytes) -> Numbers:
    return blocks[..., 2:] ^ np.uint8(128), _floats(blocks, 0)


def _q2_k(blocks: Bytes) -> Numbers:
    scales = blocks[..., :16]
    return (
        _runs(blocks[..., 16:80], 2, 32),
        _floats(blocks, 80),
        scales & 15,
        _floats(blocks, 82),
        scales >> np.uint8(4),
    )


def _q3_k(blocks: Bytes) -> Numbers:
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> np.uint8(4)], -1)
    upper = packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    multipliers = (low | _flat(upper, blocks) << np.uint8(4)).astype(np.int16) - 32
    codes = _runs(blocks[..., 32:96], 2, 32) | _runs(blocks[..., :32], 1, 32) << np.uint8(2)
    return codes, _floats(blocks, 108), multipliers


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack twelve bytes: eight scales and eight minima of 6 bits."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], -1)
    return scales, np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], -1)


def _q45_k(high: int | None, low: int) -> Decoder:
    def read(blocks: Bytes) -> Numbers:
        scales, minima = _six_bits(blocks[..., 4:16])
        codes = _runs(blocks[..., low:], 4, 32)
        if high is not None:
            codes |= _runs(blocks[..., high : high + 32], 1, 32) << np.uint8(4)
        return codes, _floats(blocks, 0), scales, _floats(blocks, 2), minima

    return read


def _q6_k(blocks: Bytes) -> Numbers:
    codes = _runs(blocks[..., :128], 4, 64) | _runs(blocks[..., 128:192], 2, 32) << np.uint8(4)
    return codes, _floats(blocks, 208), _words(blocks, 192, 208, "i1")


def _iq4_nl(blocks: Bytes) -> Numbers:
    return _runs(blocks[..., 2:], 4, 16), _floats(blocks, 0)


def _iq4_xs(blocks: Bytes) -> Numbers:
    high = _each(_words(blocks, 2, 4, "<u2"), range(0, 16, 2), 3).astype(np.uint8)
    multipliers = (_each(blocks[..., 4:8], range(0, 8, 4), 15) | high << np.uint8(4)).astype(np.int16) - 32
    return _runs(blocks[..., 8:], 4, 16), _floats(blocks, 0), multipliers


def _mxfp4(blocks: Bytes) -> Numbers:
    with np.errstate(over="ignore"):  # the exponent 255 represents NaN
        scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 127).astype(np.float32)
    return _runs(blocks[..., 1:], 4, 16), scales


def _nvfp4(blocks: Bytes) -> Numbers:
    """Decode NVFP4. Scales are unsigned floats with 4 exponent bits and 3 mantissa bits; 127 represents 0."""
    packed = blocks[..., :4]
    exponent, mantissa = (packed >> 3 & 15).astype(np.int32), (packed & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    scales = np.where(exponent == 0, mantissa / 512, normal) * (packed != 127)
    return _runs(blocks[..., 4:], 4, 8), scales.astype(np.float32)


def _tq1_0(blocks: Bytes) -> Numbers:
    """Decode TQ1_0: five ternary digits per byte, stored as a fraction of 256."""

    def digits(first: int, last: int, run: int, count: int) -> Bytes:
        cut = blocks[..., first:last].reshape(*blocks.shape[:-1], -1, 1, run)
        powers = np.array([3**digit for digit in range(count)], np.uint8)[:, None]
        return _flat(((cut * powers).astype(np.uint16) * 3 >> 8).astype(np.uint8), blocks)

    codes = np.concatenate([digits(0, 32, 32, 5), digits(32, 48, 16, 5), digits(48, 52, 4, 4)], -1)
    return codes, _floats(blocks, 52)


def _tq2_0(blocks: Bytes) -> Numbers:
    return _runs(blocks[..., :64], 2, 32), _floats(blocks, 64)


def _eight_signs(seven: NDArray[Any]) -> Bytes:
    """Expand the signs of eight numbers, [..., count] to [..., count, 8]: seven bits, and a bit of even parity."""
    single = _single_bits(seven.astype(np.uint8)[..., None])
    single[..., 7] = single[..., :7].sum(-1) & 1
    return single


def _signed(table: str, index: NDArray[Any], signs: Bytes, blocks: Bytes) -> Bytes:
    """Return the codes of vectors from a table: each is the level of a number, with the sign in the next higher bit."""
    levels, shift = level_table(table)[index], np.uint8(3 if table.startswith("IQ3") else 2)
    codes: Bytes = _flat(levels, blocks) | _flat(signs, blocks) << shift
    return codes


def _odd(scales: NDArray[Any]) -> NDArray[np.uint8]:
    """Return 2 s + 1, because a block's multiplier is s + 1/2."""
    return (2 * scales + 1).astype(np.uint8)


def _iq2_xxs(blocks: Bytes) -> Numbers:
    words = _words(blocks, 2, 66, "<u4").reshape(*blocks.shape[:-1], 8, 2)
    index, packed = np.ascontiguousarray(words[..., 0]).view(np.uint8), words[..., 1]
    signs = _eight_signs(_each(packed, range(0, 28, 7), 127))
    return _signed("IQ2_XXS", index, signs, blocks), _floats(blocks, 0), _odd(packed >> 28)


def _iq2_xs(blocks: Bytes) -> Numbers:
    packed = _words(blocks, 2, 66, "<u2")
    codes = _signed("IQ2_XS", packed & 511, _eight_signs(packed >> 9), blocks)
    return codes, _floats(blocks, 0), _odd(_each(blocks[..., 66:], range(0, 8, 4), 15))


def _iq2_s(blocks: Bytes) -> Numbers:
    high = _each(blocks[..., 66:74], range(0, 8, 2), 3).astype(np.uint16)
    codes = _signed("IQ2_S", blocks[..., 2:34] | high << 8, _single_bits(blocks[..., 34:66]), blocks)
    return codes, _floats(blocks, 0), _odd(_each(blocks[..., 74:], range(0, 8, 4), 15))


def _iq3_xxs(blocks: Bytes) -> Numbers:
    packed = _words(blocks, 66, 98, "<u4")
    signs = _eight_signs(_each(packed, range(0, 28, 7), 127))
    return _signed("IQ3_XXS", blocks[..., 2:66], signs, blocks), _floats(blocks, 0), _odd(packed >> 28)


def _iq3_s(blocks: Bytes) -> Numbers:
    high = _each(blocks[..., 66:74], range(8), 1).astype(np.uint16)
    codes = _signed("IQ3_S", blocks[..., 2:66] | high << 8, _single_bits(blocks[..., 74:106]), blocks)
    return codes, _floats(blocks, 0), _odd(_each(blocks[..., 106:], range(0, 8, 4), 15))


def _iq1_s(blocks: Bytes) -> Numbers:
    """Decode IQ1_S: -1, 0 or 1, plus or minus an eighth, with the same sign for all numbers of a block."""
    packed = _words(blocks, 34, 50, "<u2")
    high = _each(packed, range(0, 12, 3), 7)
    codes = level_table("IQ1_S")[blocks[..., 2:34] | high << 8].reshape(*blocks.shape[:-1], 8, 32)
    codes = codes | (packed >> 15).astype(np.uint8)[..., None] << np.uint8(2)
    return _flat(codes, blocks), _floats(blocks, 0), _odd(packed >> 12 & 7)


def _iq1_m(blocks: Bytes) -> Numbers:
    """Decode IQ1_M: like IQ1_S, but with one sign per eight numbers and the scale's bits spread over four words."""
    words, packed = _words(blocks, 48, 56, "<u2"), _each(blocks[..., 32:48], range(0, 8, 4), 15)
    shifted = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    scales = np.bitwise_or.reduce(shifted, -1, keepdims=True).astype(np.uint16).view(np.float16).astype(np.float32)
    codes = level_table("IQ1_S")[blocks[..., :32] | (packed & 7).astype(np.uint16) << 8]
    codes = codes | (packed >> 3)[..., None] << np.uint8(2)
    return _flat(codes, blocks), scales, _odd(_each(words, range(0, 12, 3), 7))


def _grid(*values: float, divisor: float = 1.0) -> Floats:
    return np.array(values, np.float32) / np.float32(divisor)


def _both(*values: float, divisor: float) -> Floats:
    """Return the levels and their negatives."""
    return _grid(*values, *(-value for value in values), divisor=divisor)


_LEVELS_2 = _both(8, 25, 43, 0, divisor=8)
_LEVELS_1 = _grid(-7, 1, 9, 0, -9, -1, 7, 0, divisor=8)
_TERNARY = _grid(-1, 0, 1, 2)
# One level with a minimum: the minimum of each block is a separate float, so a group is a single block.
_LEAST_4, _LEAST_5 = (WeightFormat(bits, 32, 32, multiplier_bits=2, offset_bits=2) for bits in (4, 5))


def _vectors(bits: int, block: int, multiplier_bits: int) -> WeightFormat:
    return WeightFormat(bits, block, _SUPER, multiplier_bits=multiplier_bits)


_TYPES = (
    GgmlType("Q4_0", 32, 18, uniform_format(4, 32), uniform_grid(4), _plain(2, None), 2),
    GgmlType("Q4_1", 32, 20, _LEAST_4, uniform_grid(4, centred=False), _plain(4, None, least=True), 3),
    GgmlType("Q5_0", 32, 22, uniform_format(5, 32), uniform_grid(5), _plain(6, 2), 6),
    GgmlType("Q5_1", 32, 24, _LEAST_5, uniform_grid(5, centred=False), _plain(8, 4, least=True), 7),
    GgmlType("Q8_0", 32, 34, uniform_format(8, 32), uniform_grid(8), _q8_0, 8),
    GgmlType("Q2_K", _SUPER, 84, formats.Q2_K, uniform_grid(2, centred=False), _q2_k, 10),
    GgmlType("Q3_K", _SUPER, 110, formats.Q3_K, uniform_grid(3), _q3_k, 11),
    GgmlType("Q4_K", _SUPER, 144, formats.Q4_K, uniform_grid(4, centred=False), _q45_k(None, 16), 12),
    GgmlType("Q5_K", _SUPER, 176, formats.Q5_K, uniform_grid(5, centred=False), _q45_k(16, 48), 13),
    GgmlType("Q6_K", _SUPER, 210, formats.Q6_K, uniform_grid(6), _q6_k, 14),
    GgmlType("IQ2_XXS", _SUPER, 66, _vectors(3, 32, 5), _LEVELS_2, _iq2_xxs, 16),
    GgmlType("IQ2_XS", _SUPER, 74, _vectors(3, 16, 5), _LEVELS_2, _iq2_xs, 17),
    GgmlType("IQ3_XXS", _SUPER, 98, _vectors(4, 32, 5), _both(4, 12, 20, 28, 36, 44, 52, 62, divisor=4), _iq3_xxs, 18),
    GgmlType("IQ1_S", _SUPER, 50, _vectors(3, 32, 4), _LEVELS_1, _iq1_s, 19),
    GgmlType("IQ4_NL", 32, 18, formats.IQ4_NL, GRIDS["iq4"], _iq4_nl, 20),
    GgmlType("IQ3_S", _SUPER, 110, _vectors(4, 32, 5), _both(1, 3, 5, 7, 9, 11, 13, 15, divisor=1), _iq3_s, 21),
    GgmlType("IQ2_S", _SUPER, 82, _vectors(3, 16, 5), _LEVELS_2, _iq2_s, 22),
    GgmlType("IQ4_XS", _SUPER, 136, formats.IQ4_XS, GRIDS["iq4"], _iq4_xs, 23),
    GgmlType("IQ1_M", _SUPER, 56, _vectors(3, 16, 4), _LEVELS_1, _iq1_m, 29),
    GgmlType("TQ1_0", _SUPER, 54, uniform_format(2, _SUPER), _TERNARY, _tq1_0, 34),
    GgmlType("TQ2_0", _SUPER, 66, uniform_format(2, _SUPER), _TERNARY, _tq2_0, 35),
    GgmlType("MXFP4", 32, 17, formats.MXFP4, GRIDS["mxfp4"], _mxfp4, 39),
    GgmlType("NVFP4", 64, 36, uniform_format(4, 16), GRIDS["mxfp4"], _nvfp4, 40),
)
for _kind in _TYPES:
    register(_kind)
GGML_TYPES = {kind.number: kind for kind in _TYPES}
