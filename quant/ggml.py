"""The blocks of llama.cpp's quantised types (ggml-common.h, MIT) as quantised weights of ours, number for number.

Every type is the one formula of `kernels.weight_formats` with other numbers, so that nothing is rounded: codes choose
values of a grid, blocks have integers, groups have floats. Types that choose whole vectors from a table (IQ1, IQ2, IQ3)
take more bits here, as each number of a vector gets a code of its own.

An array of such blocks is a NumPy array of records: `dtype` has one field, named after the type, of the block's bytes.
Rows of a matrix can therefore be cut, put in another order and joined as those of any array.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weight_formats import WeightFormat, pack_bits

from . import formats
from .blocks import QuantizationError
from .formats import GRIDS, QuantizedWeight, uniform_format, uniform_grid
from .ggml_grids import level_table
from .threads import worker_count

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# Columns of the larger blocks, and weights that are converted at once: 2 MiB of codes.
_SUPER, _CHUNK_WEIGHTS = 256, 1 << 18


class Parts(NamedTuple):
    """What blocks hold: codes [..., columns], floats [..., groups], integers [..., blocks]."""

    codes: Bytes
    scales: Floats
    multipliers: NDArray[Any] | None = None
    offset_scales: Floats | None = None
    offsets: Bytes | None = None


@dataclass(frozen=True)
class GgmlType:
    """A quantised type.

    Attributes:
        name: as llama.cpp has it. number: in GGUF files.
        columns: weights of a block. nbytes: bytes of a block.
        form: what a matrix of such blocks becomes. grid: what its codes stand for.
        read: from blocks, uint8 [..., nbytes], to their parts.
    """

    name: str
    number: int
    columns: int
    nbytes: int
    form: WeightFormat
    grid: Floats
    read: Callable[[Bytes], Parts]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an array of blocks."""
        return np.dtype([(self.name, np.uint8, (self.nbytes,))])

    @property
    def bits_per_weight(self) -> float:
        """Of the blocks, as a file has them."""
        return 8 * self.nbytes / self.columns


def _floats(blocks: Bytes, first: int, count: int = 1) -> Floats:
    """Numbers of 16 bits that lie in blocks from a byte on."""
    cut = np.ascontiguousarray(blocks[..., first : first + 2 * count])
    return cut.view(np.float16).astype(np.float32)


def _words(blocks: Bytes, first: int, last: int, kind: str) -> NDArray[Any]:
    """Bytes of blocks as unsigned integers."""
    return np.ascontiguousarray(blocks[..., first:last]).view(kind)


def _flat(array: NDArray[Any], blocks: Bytes) -> NDArray[Any]:
    return array.reshape(*blocks.shape[:-1], -1)


def _runs(low: Bytes, bits: int, run: int) -> Bytes:
    """Runs of bytes whose lowest `bits` are the first numbers, the next ones the numbers behind these, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    cut = low.reshape(*low.shape[:-1], -1, 1, run)
    return _flat(cut >> shifts & np.uint8((1 << bits) - 1), low)


def _each(packed: NDArray[Any], shifts: range, mask: int) -> NDArray[Any]:
    """Several numbers out of each integer [..., count], side by side: [..., count * len(shifts)]."""
    steps = np.array(shifts, packed.dtype)
    numbers: NDArray[Any] = packed[..., None] >> steps & packed.dtype.type(mask)
    return numbers.reshape(*packed.shape[:-1], -1)


def _single_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _plain(first: int, high: int | None, *, least: bool = False) -> Callable[[Bytes], Parts]:
    """Q4_0 to Q5_1: nibbles from byte `first` on, fifth bits from `high` on, a float, and perhaps a least value."""

    def read(blocks: Bytes) -> Parts:
        codes = _runs(blocks[..., first:], 4, 16)
        if high is not None:
            codes |= _single_bits(blocks[..., high : high + 4]) << np.uint8(4)
        if not least:
            return Parts(codes, _floats(blocks, 0))
        ones = np.ones((*blocks.shape[:-1], 1), np.uint8)
        return Parts(codes, _floats(blocks, 0), ones, -_floats(blocks, 2), ones)

    return read


def _q8_0(blocks: Bytes) -> Parts:
    return Parts(blocks[..., 2:] ^ np.uint8(128), _floats(blocks, 0))


def _q2_k(blocks: Bytes) -> Parts:
    scales = blocks[..., :16]
    return Parts(
        _runs(blocks[..., 16:80], 2, 32), _floats(blocks, 80), scales & 15, _floats(blocks, 82), scales >> np.uint8(4)
    )


def _q3_k(blocks: Bytes) -> Parts:
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> np.uint8(4)], -1)
    upper = packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    multipliers = (low | _flat(upper, blocks) << np.uint8(4)).astype(np.int16) - 32
    codes = _runs(blocks[..., 32:96], 2, 32) | _runs(blocks[..., :32], 1, 32) << np.uint8(2)
    return Parts(codes, _floats(blocks, 108), multipliers)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Twelve bytes: eight scales and eight minima of 6 bits."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], -1)
    return scales, np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], -1)


def _q45_k(high: int | None, low: int) -> Callable[[Bytes], Parts]:
    def read(blocks: Bytes) -> Parts:
        scales, minima = _six_bits(blocks[..., 4:16])
        codes = _runs(blocks[..., low:], 4, 32)
        if high is not None:
            codes |= _runs(blocks[..., high : high + 32], 1, 32) << np.uint8(4)
        return Parts(codes, _floats(blocks, 0), scales, _floats(blocks, 2), minima)

    return read


def _q6_k(blocks: Bytes) -> Parts:
    codes = _runs(blocks[..., :128], 4, 64) | _runs(blocks[..., 128:192], 2, 32) << np.uint8(4)
    return Parts(codes, _floats(blocks, 208), _words(blocks, 192, 208, "i1"))


def _iq4_nl(blocks: Bytes) -> Parts:
    return Parts(_runs(blocks[..., 2:], 4, 16), _floats(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Parts:
    high = _each(_words(blocks, 2, 4, "<u2"), range(0, 16, 2), 3).astype(np.uint8)
    multipliers = (_each(blocks[..., 4:8], range(0, 8, 4), 15) | high << np.uint8(4)).astype(np.int16) - 32
    return Parts(_runs(blocks[..., 8:], 4, 16), _floats(blocks, 0), multipliers)


def _mxfp4(blocks: Bytes) -> Parts:
    with np.errstate(over="ignore"):  # 255 is no number
        scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 127).astype(np.float32)
    return Parts(_runs(blocks[..., 1:], 4, 16), scales)


def _nvfp4(blocks: Bytes) -> Parts:
    """Scales are unsigned floats of 4 bits of exponent and 3 of mantissa, whose 127 means 0."""
    packed = blocks[..., :4]
    exponent, mantissa = (packed >> 3 & 15).astype(np.int32), (packed & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    scales = np.where(exponent == 0, mantissa / 512, normal) * (packed != 127)
    return Parts(_runs(blocks[..., 4:], 4, 8), scales.astype(np.float32))


def _tq1_0(blocks: Bytes) -> Parts:
    """Five ternary digits per byte, as the fraction of 256 that they make."""

    def digits(first: int, last: int, run: int, count: int) -> Bytes:
        cut = blocks[..., first:last].reshape(*blocks.shape[:-1], -1, 1, run)
        powers = np.array([3**digit for digit in range(count)], np.uint8)[:, None]
        return _flat(((cut * powers).astype(np.uint16) * 3 >> 8).astype(np.uint8), blocks)

    codes = np.concatenate([digits(0, 32, 32, 5), digits(32, 48, 16, 5), digits(48, 52, 4, 4)], -1)
    return Parts(codes, _floats(blocks, 52))


def _tq2_0(blocks: Bytes) -> Parts:
    return Parts(_runs(blocks[..., :64], 2, 32), _floats(blocks, 64))


def _eight_signs(seven: NDArray[Any]) -> Bytes:
    """Signs of eight numbers [..., count] to [..., count, 8]: seven bits, and one that makes their number even."""
    single = _single_bits(seven.astype(np.uint8)[..., None])
    single[..., 7] = single[..., :7].sum(-1) & 1
    return single


def _signed(table: str, index: NDArray[Any], signs: Bytes, blocks: Bytes) -> Bytes:
    """Codes of vectors from a table: the level of each number, and its sign above it."""
    levels, shift = level_table(table)[index], np.uint8(3 if table.startswith("IQ3") else 2)
    codes: Bytes = _flat(levels, blocks) | _flat(signs, blocks) << shift
    return codes


def _odd(scales: NDArray[Any]) -> NDArray[np.uint8]:
    """2 s + 1: what multiplies a block is s + 1/2."""
    return (2 * scales + 1).astype(np.uint8)


def _iq2_xxs(blocks: Bytes) -> Parts:
    words = _words(blocks, 2, 66, "<u4").reshape(*blocks.shape[:-1], 8, 2)
    index, packed = np.ascontiguousarray(words[..., 0]).view(np.uint8), words[..., 1]
    signs = _eight_signs(_each(packed, range(0, 28, 7), 127))
    return Parts(_signed("IQ2_XXS", index, signs, blocks), _floats(blocks, 0), _odd(packed >> 28))


def _iq2_xs(blocks: Bytes) -> Parts:
    packed = _words(blocks, 2, 66, "<u2")
    codes = _signed("IQ2_XS", packed & 511, _eight_signs(packed >> 9), blocks)
    return Parts(codes, _floats(blocks, 0), _odd(_each(blocks[..., 66:], range(0, 8, 4), 15)))


def _iq2_s(blocks: Bytes) -> Parts:
    high = _each(blocks[..., 66:74], range(0, 8, 2), 3).astype(np.uint16)
    codes = _signed("IQ2_S", blocks[..., 2:34] | high << 8, _single_bits(blocks[..., 34:66]), blocks)
    return Parts(codes, _floats(blocks, 0), _odd(_each(blocks[..., 74:], range(0, 8, 4), 15)))


def _iq3_xxs(blocks: Bytes) -> Parts:
    packed = _words(blocks, 66, 98, "<u4")
    signs = _eight_signs(_each(packed, range(0, 28, 7), 127))
    return Parts(_signed("IQ3_XXS", blocks[..., 2:66], signs, blocks), _floats(blocks, 0), _odd(packed >> 28))


def _iq3_s(blocks: Bytes) -> Parts:
    high = _each(blocks[..., 66:74], range(8), 1).astype(np.uint16)
    codes = _signed("IQ3_S", blocks[..., 2:66] | high << 8, _single_bits(blocks[..., 74:106]), blocks)
    return Parts(codes, _floats(blocks, 0), _odd(_each(blocks[..., 106:], range(0, 8, 4), 15)))


def _iq1_s(blocks: Bytes) -> Parts:
    """-1, 0 or 1, and an eighth that is added to all numbers of a block, or taken from them."""
    packed = _words(blocks, 34, 50, "<u2")
    high = _each(packed, range(0, 12, 3), 7)
    codes = level_table("IQ1_S")[blocks[..., 2:34] | high << 8].reshape(*blocks.shape[:-1], 8, 32)
    codes = codes | (packed >> 15).astype(np.uint8)[..., None] << np.uint8(2)
    return Parts(_flat(codes, blocks), _floats(blocks, 0), _odd(packed >> 12 & 7))


def _iq1_m(blocks: Bytes) -> Parts:
    """The same with an eighth for every eight numbers, and the float's bits spread over four words."""
    words, packed = _words(blocks, 48, 56, "<u2"), _each(blocks[..., 32:48], range(0, 8, 4), 15)
    shifted = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    scales = np.bitwise_or.reduce(shifted, -1, keepdims=True).astype(np.uint16).view(np.float16).astype(np.float32)
    codes = level_table("IQ1_S")[blocks[..., :32] | (packed & 7).astype(np.uint16) << 8]
    codes = codes | (packed >> 3)[..., None] << np.uint8(2)
    return Parts(_flat(codes, blocks), scales, _odd(_each(words, range(0, 12, 3), 7)))


def _grid(*values: float, divisor: float = 1.0) -> Floats:
    return np.array(values, np.float32) / np.float32(divisor)


def _both(*values: float, divisor: float) -> Floats:
    """Levels and their negatives."""
    return _grid(*values, *(-value for value in values), divisor=divisor)


_LEVELS_2 = _both(8, 25, 43, 0, divisor=8)
_LEVELS_1 = _grid(-7, 1, 9, 0, -9, -1, 7, 0, divisor=8)
_TERNARY = _grid(-1, 0, 1, 2)
# Of one level with a least value: that of each block is its own float, so a group is a block.
_LEAST_4, _LEAST_5 = (WeightFormat(bits, 32, 32, multiplier_bits=2, offset_bits=2) for bits in (4, 5))


def _vectors(bits: int, block: int, multiplier_bits: int) -> WeightFormat:
    return WeightFormat(bits, block, _SUPER, multiplier_bits=multiplier_bits)


_TYPES = (
    GgmlType("Q4_0", 2, 32, 18, uniform_format(4, 32), uniform_grid(4), _plain(2, None)),
    GgmlType("Q4_1", 3, 32, 20, _LEAST_4, uniform_grid(4, centred=False), _plain(4, None, least=True)),
    GgmlType("Q5_0", 6, 32, 22, uniform_format(5, 32), uniform_grid(5), _plain(6, 2)),
    GgmlType("Q5_1", 7, 32, 24, _LEAST_5, uniform_grid(5, centred=False), _plain(8, 4, least=True)),
    GgmlType("Q8_0", 8, 32, 34, uniform_format(8, 32), uniform_grid(8), _q8_0),
    GgmlType("Q2_K", 10, _SUPER, 84, formats.Q2_K, uniform_grid(2, centred=False), _q2_k),
    GgmlType("Q3_K", 11, _SUPER, 110, formats.Q3_K, uniform_grid(3), _q3_k),
    GgmlType("Q4_K", 12, _SUPER, 144, formats.Q4_K, uniform_grid(4, centred=False), _q45_k(None, 16)),
    GgmlType("Q5_K", 13, _SUPER, 176, formats.Q5_K, uniform_grid(5, centred=False), _q45_k(16, 48)),
    GgmlType("Q6_K", 14, _SUPER, 210, formats.Q6_K, uniform_grid(6), _q6_k),
    GgmlType("IQ2_XXS", 16, _SUPER, 66, _vectors(3, 32, 5), _LEVELS_2, _iq2_xxs),
    GgmlType("IQ2_XS", 17, _SUPER, 74, _vectors(3, 16, 5), _LEVELS_2, _iq2_xs),
    GgmlType("IQ3_XXS", 18, _SUPER, 98, _vectors(4, 32, 5), _both(4, 12, 20, 28, 36, 44, 52, 62, divisor=4), _iq3_xxs),
    GgmlType("IQ1_S", 19, _SUPER, 50, _vectors(3, 32, 4), _LEVELS_1, _iq1_s),
    GgmlType("IQ4_NL", 20, 32, 18, formats.IQ4_NL, GRIDS["iq4"], _iq4_nl),
    GgmlType("IQ3_S", 21, _SUPER, 110, _vectors(4, 32, 5), _both(1, 3, 5, 7, 9, 11, 13, 15, divisor=1), _iq3_s),
    GgmlType("IQ2_S", 22, _SUPER, 82, _vectors(3, 16, 5), _LEVELS_2, _iq2_s),
    GgmlType("IQ4_XS", 23, _SUPER, 136, formats.IQ4_XS, GRIDS["iq4"], _iq4_xs),
    GgmlType("IQ1_M", 29, _SUPER, 56, _vectors(3, 16, 4), _LEVELS_1, _iq1_m),
    GgmlType("TQ1_0", 34, _SUPER, 54, uniform_format(2, _SUPER), _TERNARY, _tq1_0),
    GgmlType("TQ2_0", 35, _SUPER, 66, uniform_format(2, _SUPER), _TERNARY, _tq2_0),
    GgmlType("MXFP4", 39, 32, 17, formats.MXFP4, GRIDS["mxfp4"], _mxfp4),
    GgmlType("NVFP4", 40, 64, 36, uniform_format(4, 16), GRIDS["mxfp4"], _nvfp4),
)
GGML_TYPES = {kind.number: kind for kind in _TYPES}
_BY_NAME = {kind.name: kind for kind in _TYPES}


def type_of(array: NDArray[Any]) -> GgmlType | None:
    """The type of an array of blocks; None for any other array."""
    return _BY_NAME.get(array.dtype.names[0]) if array.dtype.names else None


def weight_of(blocks: NDArray[Any]) -> QuantizedWeight:
    """A matrix of blocks [rows, blocks per row] as a weight of ours, without any rounding.

    Raises:
        QuantizationError: the array has no blocks, or a scale among them is infinite or no number.
    """
    kind = type_of(blocks)
    if kind is None or blocks.ndim != 2 or 0 in blocks.shape:
        raise QuantizationError(f"{blocks.dtype} {list(blocks.shape)} is no matrix of blocks")
    form, rows, columns = kind.form, len(blocks), blocks.shape[1] * kind.columns
    made = _empty(form, rows, columns)

    def convert(first: int) -> None:
        part = slice(first, first + step)
        # Overflow is found by what it leaves: a scale that is no number.
        found = kind.read(np.ascontiguousarray(blocks[part])[kind.name])
        for place, array in zip(made, found, strict=True):
            if place is not None and array is not None:
                flat = array.reshape(len(array), -1)
                place[part] = pack_bits(flat, form.bits) if place is made.codes else flat

    step = max(1, _CHUNK_WEIGHTS // columns)
    with ThreadPoolExecutor(worker_count()) as pool:
        for _ in pool.map(convert, range(0, rows, step)):
            pass
    for floats in (made.scales, made.offset_scales):
        if floats is not None and not np.isfinite(floats).all():
            row = int(np.flatnonzero(~np.isfinite(floats).all(axis=1))[0])
            raise QuantizationError(f"row {row} of {kind.name} blocks has a scale that is infinite or no number")
    return QuantizedWeight(form, rows, columns, made.codes, kind.grid, *made[1:])


def without_gaps(blocks: NDArray[Any]) -> NDArray[Any]:
    """The same blocks, but those whose scales are infinite or no numbers stand for zeros; itself if there are none."""
    kind = type_of(blocks)
    assert kind is not None
    matrix = blocks.reshape(-1, blocks.shape[-1])
    bad = np.zeros(matrix.shape, np.bool_)
    step = max(1, _CHUNK_WEIGHTS // (matrix.shape[1] * kind.columns))
    for first in range(0, len(matrix), step):
        part = slice(first, first + step)
        found = kind.read(np.ascontiguousarray(matrix[part])[kind.name])
        for floats in (found.scales, found.offset_scales):
            if floats is not None:
                bad[part] |= ~np.isfinite(floats).all(axis=-1)
    if not bad.any():
        return blocks
    mended = matrix.copy()
    mended[bad] = np.zeros((), kind.dtype)  # of every type a block of zeros stands for zeros
    return mended.reshape(blocks.shape)


def _empty(form: WeightFormat, rows: int, columns: int) -> Parts:
    """Arrays of a weight, to be filled; codes as rows of bits."""
    groups, blocks = (rows, form.groups(columns)), (rows, form.blocks(columns))
    return Parts(
        np.empty((rows, columns * form.bits // 8), np.uint8),
        np.empty(groups, np.float32),
        np.empty(blocks, np.int16) if form.multiplier_bits else None,
        np.empty(groups, np.float32) if form.offset_bits else None,
        np.empty(blocks, np.uint8) if form.offset_bits else None,
    )


def dequantise(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Blocks [..., rows, blocks per row] as float32 [..., rows, columns]; raises as `weight_of` does."""
    kind = type_of(blocks)
    if kind is None:
        raise QuantizationError(f"{blocks.dtype} {list(blocks.shape)} holds no blocks")
    matrix = blocks.reshape(-1, blocks.shape[-1])
    values = np.empty((len(matrix), blocks.shape[-1] * kind.columns), np.float32)
    step = max(1, _CHUNK_WEIGHTS // values.shape[1])
    for first in range(0, len(matrix), step):
        values[first : first + step] = weight_of(matrix[first : first + step]).dequantise()
    return values.reshape(*blocks.shape[:-1], -1)
