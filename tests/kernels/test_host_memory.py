"""Memory for large arrays."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from genai.common.host_memory import HUGE_PAGE, Arena, huge_array, mapped_array


def test_arrays_of_an_arena_are_zeroed_lie_side_by_side_and_do_not_overlap() -> None:
    arena = Arena()
    arrays = [arena.array((3, size), np.int32) for size in (1, 16, 100, 1 << 20, 7)]
    assert all(not array.any() for array in arrays)
    for number, array in enumerate(arrays, 1):
        array[...] = number
    assert [int(array.min()) for array in arrays] == [int(array.max()) for array in arrays] == [1, 2, 3, 4, 5]
    starts = np.array([array.ctypes.data for array in arrays])
    assert not (starts % 64).any()
    gaps = starts[1:] - starts[:-1] - [array.nbytes for array in arrays[:-1]]
    assert gaps.min() >= 0 and gaps.max() < 64


def test_an_array_larger_than_a_mapping_has_one_of_its_own() -> None:
    arena = Arena()
    large, small = arena.array(((1 << 26) + 1,), np.uint8), arena.array((4,), np.uint8)
    large[-1] = 1
    assert not small.any() and large.shape == ((1 << 26) + 1,)


def test_arrays_outlive_their_arena() -> None:
    array = Arena().array((1 << 20,), np.float32)
    array[...] = 2.0
    assert float(array.sum()) == 2.0 * (1 << 20)


def test_huge_arrays_are_zeroed_and_aligned() -> None:
    for shape in ((5,), (1 << 20,)):
        array = huge_array(shape, np.float32)
        assert array.shape == shape and not array.any() and array.ctypes.data % 64 == 0


def test_mapped_arrays_are_zeroed_aligned_and_take_what_they_use() -> None:
    for size in (0, 1, 4097, 1 << 17, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 4097):
        array = mapped_array(size)
        assert array.shape == (size,) and not array.any()
        assert size == 0 or array.ctypes.data % 64 == 0  # numbers of no array lie anywhere


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system's own account of memory")
def test_memory_of_mapped_arrays_goes_back() -> None:
    size, count = HUGE_PAGE + HUGE_PAGE // 4, 40

    def used() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))

    before, arrays = used(), [mapped_array(size) for _ in range(count)]
    for array in arrays:
        array[...] = 1
    taken = used() - before
    assert size * count <= taken + (1 << 20) <= 1.1 * size * count  # whole huge pages would be 1.6
    del array, arrays
    assert used() - before < 0.05 * size * count
