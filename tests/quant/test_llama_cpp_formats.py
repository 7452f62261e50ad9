"""The formats represent llama.cpp's blocks exactly: every bit of a block has a place, and the same meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.formats import pack_weight
from genai.kernels.weights import QuantizedWeight, uniform_grid
from genai.quant import formats
from genai.quant.formats import GRIDS

pytestmark = pytest.mark.oracle
Bytes = NDArray[np.uint8]
Parts = dict[str, Any]
ROWS, GROUPS = 20, 3


# What the blocks hold, from their bytes [..., bytes of a block], as ggml-common.h and ggml-quants.c (MIT) have them:
# codes [..., columns], multipliers and offsets [..., blocks], d and dmin [...].


def half(blocks: Bytes, first: int) -> NDArray[np.float32]:
    found = np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)[..., 0]
    return found.astype(np.float32)


def by_twos(low: Bytes) -> Bytes:
    """64 bytes: two halves of 32 bytes, in which each pair of bits belongs to a run of 32 numbers."""
    halves = low.reshape(*low.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (halves >> shifts & 3).reshape(*low.shape[:-1], 256)


def nibbles(low: Bytes, run: int) -> Bytes:
    """Runs of bytes whose low nibbles come first, then the high ones."""
    cut = low.reshape(*low.shape[:-1], -1, 1, run)
    return (cut >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(*low.shape[:-1], -1)


def six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Twelve bytes: eight scales and eight minima of 6 bits."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], -1)
    return scales, np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], -1)


def q2_k(blocks: Bytes) -> Parts:
    scales = blocks[..., :16]
    return {"codes": by_twos(blocks[..., 16:80]), "multipliers": scales & 15, "offsets": scales >> 4,
            "d": half(blocks, 80), "dmin": half(blocks, 82)}  # fmt: skip


def q3_k(blocks: Bytes) -> Parts:
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], -1)
    upper = packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    multipliers = (low | upper.reshape(low.shape) << 4).astype(np.int16) - 32
    codes = by_twos(blocks[..., 32:96]) | high.reshape(*blocks.shape[:-1], 256) << 2
    return {"codes": codes, "multipliers": multipliers, "d": half(blocks, 108)}


def q4_k(blocks: Bytes) -> Parts:
    scales, minima = six_bits(blocks[..., 4:16])
    return {"codes": nibbles(blocks[..., 16:], 32), "multipliers": scales, "offsets": minima,
            "d": half(blocks, 0), "dmin": half(blocks, 2)}  # fmt: skip


def q5_k(blocks: Bytes) -> Parts:
    scales, minima = six_bits(blocks[..., 4:16])
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = nibbles(blocks[..., 48:], 32) | high.reshape(*blocks.shape[:-1], 256) << 4
    return {"codes": codes, "multipliers": scales, "offsets": minima, "d": half(blocks, 0), "dmin": half(blocks, 2)}


def q6_k(blocks: Bytes) -> Parts:
    low = nibbles(blocks[..., :128], 64)  # of a half 64 low nibbles, then 64 high ones
    codes = low | by_twos(blocks[..., 128:192]) << 4
    return {"codes": codes, "multipliers": blocks[..., 192:208].view(np.int8), "d": half(blocks, 208)}


def iq4_xs(blocks: Bytes) -> Parts:
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(*blocks.shape[:-1], 8)
    multipliers = (low | high << 4).astype(np.int16) - 32
    return {"codes": nibbles(blocks[..., 8:], 16), "multipliers": multipliers, "d": half(blocks, 0)}


def iq4_nl(blocks: Bytes) -> Parts:
    return {"codes": nibbles(blocks[..., 2:], 16), "d": half(blocks, 0)}


def mxfp4(blocks: Bytes) -> Parts:
    d = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 127)
    return {"codes": nibbles(blocks[..., 1:], 16), "d": d.astype(np.float32)}


READERS: dict[str, tuple[Callable[[Bytes], Parts], Any, int, tuple[int, ...]]] = {
    "Q2_K": (q2_k, None, 84, (80, 82)),
    "Q3_K": (q3_k, None, 110, (108,)),
    "Q4_K": (q4_k, None, 144, (0, 2)),
    "Q5_K": (q5_k, None, 176, (0, 2)),
    "Q6_K": (q6_k, None, 210, (208,)),
    "IQ4_XS": (iq4_xs, GRIDS["iq4"], 136, (0,)),
    "IQ4_NL": (iq4_nl, GRIDS["iq4"], 18, (0,)),
    "MXFP4": (mxfp4, GRIDS["mxfp4"], 17, ()),
}


def weight_of(name: str, blocks: Bytes) -> QuantizedWeight:
    form, (read, grid, *_) = getattr(formats, name), READERS[name]
    parts = read(blocks)
    rows = len(blocks)
    multipliers, offsets, dmin = (parts.get(part) for part in ("multipliers", "offsets", "dmin"))
    return QuantizedWeight.from_codes(
        form, parts["codes"].reshape(rows, -1),
        uniform_grid(form.bits, centred=not form.offset_bits) if grid is None else grid, parts["d"],
        None if multipliers is None else multipliers.reshape(rows, -1).astype(np.int16), dmin,
        None if offsets is None else offsets.reshape(rows, -1),
    )  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_blocks_mean_the_same(name: str) -> None:
    """Random bytes: our format gives the same values as gguf's NumPy decoder, bit for bit, also for packed rows."""
    gguf = pytest.importorskip("gguf")
    _, _, size, floats = READERS[name]
    rng = np.random.default_rng(list(name.encode()))
    blocks = rng.integers(0, 256, (ROWS, GROUPS, size), np.uint8)
    for place in floats:
        numbers = rng.standard_normal((ROWS, GROUPS, 1)).astype(np.float16)
        blocks[..., place : place + 2] = numbers.view(np.uint8).reshape(ROWS, GROUPS, 2)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(100, 150, (ROWS, GROUPS))
    kind = getattr(gguf.GGMLQuantizationType, name)
    expected = gguf.quants.dequantize(blocks.reshape(ROWS, -1), kind)
    weight = weight_of(name, blocks)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    found = block_rows(np.arange(ROWS), pack_weight(weight))
    np.testing.assert_array_equal(found, expected)
