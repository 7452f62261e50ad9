"""Copies of arrays with any strides against NumPy's copies."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.copying import contiguous, copy_by_program, padded, reshaped, tiled
from genai.kernels.cpu.program.thread_pool import Threads

SIZES = (1, 2, 3, 5, 8, 16, 17, 33, 40)


def strided(rng, rank, dtype):
    """An array whose axes are permuted, reversed, repeated, or skip elements. Some bits are those of NaNs."""
    shape = [int(rng.choice(SIZES)) for _ in range(rank)]
    while np.prod(shape) > 50_000:
        shape[int(rng.integers(rank))] = 1
    x = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
    x = x.transpose(rng.permutation(rank))
    for axis in range(rank):
        first = np.moveaxis(x, axis, 0)
        forms = [first, first, first, first[::-1], first[::2], np.broadcast_to(first[:1], (3, *first.shape[1:]))]
        x = np.moveaxis(forms[int(rng.integers(len(forms)))], 0, axis)
    return x


@pytest.mark.parametrize("threads", [None, Threads(2)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.complex128, np.int16])
def test_copies_have_the_same_bits_and_write_nothing_else(threads, dtype, rng):
    copied = 0
    for rank in (1, 2, 3, 4, 5, 6) * 12:
        x = strided(rng, rank, dtype)
        around = np.full([size + 2 for size in x.shape], 77, dtype)
        inner = tuple(slice(1, -1) for _ in x.shape)
        if copy_by_program(x, around[inner], threads):
            copied += 1
            assert around[inner].tobytes() == x.tobytes()
            around[inner] = 77
            assert np.all(around == 77)
    assert copied > 20 or dtype == np.int16


@pytest.mark.parametrize(
    ("shape", "order"), [((64, 50, 56), (0, 2, 1)), ((3, 3137, 5), (1, 2, 0)), ((1, 64, 3136), (0, 2, 1))]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_large_transposes(shape, order, dtype, rng):
    x = rng.integers(0, 200, shape).astype(dtype).transpose(order)
    for found in (contiguous(x), reshaped(x, (1, -1)).reshape(x.shape)):
        assert found.flags.c_contiguous and not np.shares_memory(found, x)
        np.testing.assert_array_equal(found, x)


def test_reshapes_without_a_copy_are_views(rng):
    x = rng.standard_normal((4, 6, 8)).transpose(1, 0, 2)
    assert np.shares_memory(reshaped(x, (6, 4, 2, 4)), x)
    assert np.shares_memory(reshaped(x[::2], (3, 1, 4, 8)), x)
    with pytest.raises(ValueError, match="reshape"):
        reshaped(x, (5, 7))


@pytest.mark.parametrize("threads", [None, Threads(2)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, object])
def test_tiles(threads, dtype, rng):
    for shape, repeats in (((64, 16, 32), (1, 2, 2)), ((5, 3000), (3, 1)), ((1, 9000), (2, 2)), ((300, 0), (1, 4)),
                           ((7, 1, 1), (1, 400, 33)), ((2, 3), (2, 1)), ((40, 40), (0, 9)), ((), ())):  # fmt: skip
        x = rng.integers(0, 9, shape).astype(dtype)
        for given in (x, x.T):
            counts = repeats[:: 1 if given is x else -1]
            found = tiled(given, counts, threads)
            assert found.dtype == x.dtype and not np.shares_memory(found, x)
            np.testing.assert_array_equal(found, np.tile(given, counts))


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_pads(mode, dtype, rng):
    for shape, pads in (((1, 16, 40, 40), [(0, 0), (0, 0), (1, 1), (1, 1)]), ((3, 99, 64), [(0, 2), (4, 0), (17, 31)]),
                        ((12000,), [(3, 11999)]), ((200, 64), [(0, 0), (0, 0)])):  # fmt: skip
        x = rng.standard_normal(shape).astype(dtype)
        for given, sides in ((x, pads), (x.T, pads[::-1])):
            found = padded(given, sides, mode, 7)
            assert found is not None
            more = {"constant_values": 7} if mode == "constant" else {}
            np.testing.assert_array_equal(found, np.pad(given, sides, mode, **more))
    assert padded(np.zeros((100, 200), dtype), [(0, 0), (0, 200)], "reflect") is None  # NumPy reflects several times
    assert padded(np.zeros((3, 3), dtype), [(1, 1), (1, 1)], mode) is None  # small
