"""llama.cpp's blocks are converted to weights exactly: every type against the decoder of its `gguf` package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.formats import pack_weight
from genai.kernels.weights import CODE_BITS, QuantizationError, pack_bits, unpack_bits
from genai.quant import block_types
from genai.quant.block_types import dequantize, type_of, weight_of, without_gaps
from genai.quant.ggml import GGML_TYPES, GgmlType
from tools.gguf_models import random_blocks

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.oracle
ROWS, COLUMNS = 20, 768


def made(kind: GgmlType, seed: int = 0) -> Any:
    """A matrix of random blocks."""
    blocks = random_blocks(kind, (ROWS, COLUMNS // kind.columns), np.random.RandomState(seed), 0.5)
    return blocks.view(kind.dtype)[..., 0]


@pytest.mark.parametrize("kind", GGML_TYPES.values(), ids=lambda kind: kind.name)
def test_every_type_to_the_bit(kind: GgmlType) -> None:
    """Also in the kernels' layout; the package uses the same number and sizes for the type."""
    number = gguf.GGMLQuantizationType[kind.name]
    assert (number.value, gguf.GGML_QUANT_SIZES[number]) == (kind.number, (kind.columns, kind.nbytes))
    blocks = made(kind)
    expected = gguf.dequantize(blocks[kind.name].reshape(ROWS, -1), number)
    weight = weight_of(blocks)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    np.testing.assert_array_equal(dequantize(blocks), expected)
    np.testing.assert_array_equal(block_rows(np.arange(ROWS), pack_weight(weight)), expected)


def test_all_types_with_a_decoder_are_known() -> None:
    from gguf import quants

    theirs = {kind.name for kind in quants._type_traits}
    assert theirs - {"BF16", "F16", "F32"} <= {kind.name for kind in GGML_TYPES.values()}


def test_rows_are_cut_joined_and_put_in_another_order() -> None:
    kind = GGML_TYPES[12]
    blocks = made(kind)
    order = np.concatenate([blocks[10:], blocks[:10]]).reshape(2, 10, -1).swapaxes(0, 1).reshape(ROWS, -1)
    values = dequantize(blocks)
    expected = np.concatenate([values[10:], values[:10]]).reshape(2, 10, -1).swapaxes(0, 1).reshape(ROWS, -1)
    np.testing.assert_array_equal(dequantize(order), expected)
    assert type_of(order) is kind and type_of(values) is None


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "IQ1_M", "MXFP4"])
def test_scales_that_are_no_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such blocks are refused; or they become zeros, and nothing else changes."""
    kind = next(kind for kind in GGML_TYPES.values() if kind.name == name)
    blocks = made(kind)
    assert without_gaps(blocks) is blocks
    raw = blocks[name]
    if name == "MXFP4":
        raw[3, 1, 0] = 255
    elif name == "IQ1_M":
        raw[3, 1, 49::2] = raw[3, 1, 49::2] & 15 | np.array([0, 0, 0xC0, 0x70], np.uint8)
    else:
        raw[3, 1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(QuantizationError, match=r"row 3 .* infinite"):
        weight_of(blocks)
    monkeypatch.setattr(block_types, "_CHUNK_WEIGHTS", 2 * COLUMNS)
    mended = dequantize(without_gaps(blocks)).reshape(ROWS, -1, kind.columns)
    assert not mended[3, 1].any() and mended[3, 0].any() and mended[2, 1].any()


def test_arrays_that_hold_no_blocks() -> None:
    for array in (np.zeros((4, 32), np.float32), made(GGML_TYPES[2]).reshape(-1)):
        with pytest.raises(QuantizationError, match="not a matrix of blocks"):
            weight_of(array)
    with pytest.raises(QuantizationError, match="contains no blocks"):
        dequantize(np.zeros((4, 32), np.float32))


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("count", [8, 13, 256])
def test_rows_of_bits(bits: int, count: int) -> None:
    """The fast conversion against the slow one."""
    numbers = np.random.RandomState(bits).randint(0, 1 << bits, (3, count)).astype(np.uint8)
    packed = pack_bits(numbers, bits)
    assert packed.shape == (3, -(-count * bits // 8))
    np.testing.assert_array_equal(unpack_bits(packed, bits, count), numbers)
    whole = sum(int(number) << bits * place for place, number in enumerate(numbers[0]))
    assert packed[0].tobytes() == whole.to_bytes(packed.shape[1], "little")
