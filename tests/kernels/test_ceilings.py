"""The kernels that measure: what they read is read once and entirely; what they multiply is counted right."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from genai.kernels.cpu import ceilings
from genai.kernels.cpu.jit.vector import LANES


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (0, 4), (1, 10), (5, 64)])
def test_every_number_is_read_once(begin: int, end: int) -> None:
    numbers = ceilings.ITEM_BYTES // 4
    buffer = np.random.default_rng(0).integers(-100, 100, 64 * numbers, dtype=np.int32)
    call = ceilings.read_call(buffer, 64, 1)
    words, total = np.array(call.arguments.encoded(), np.int64), np.zeros(LANES, np.int32)
    read = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(call.op.address)
    assert read(words.ctypes.data, 0, begin, end, total.ctypes.data) == 0
    part = buffer[begin * numbers : end * numbers]
    np.testing.assert_array_equal(total, part.reshape(-1, LANES).sum(axis=0, dtype=np.int32))


def test_multiply_float32_does_the_work() -> None:
    """Twelve times x + x + ... from x + i, with x = 1: each round adds 1."""
    total = np.ones(LANES, np.float32)
    ceilings.multiply_float32(10, total.ctypes.data)
    np.testing.assert_array_equal(total, np.float32(sum(1 + i + 10 for i in range(12))))


def test_the_tile_configuration() -> None:
    config = ceilings.TILE_CONFIG
    assert config[0] == 1
    assert (config[16:32].view(np.uint16) == 64).all()
    assert (config[48:56] == 16).all()
    assert not config.flags.writeable
