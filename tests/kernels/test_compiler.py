"""Kernels as they are written: helpers, arrays in memory; and what becomes of those that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.jit.dsl import helper, inline
from genai.kernels.cpu.jit.memory import array_at, read_int64, stack_array, write_float64, write_int64
from genai.kernels.cpu.jit.native import Library, NativeFunctionError
from genai.kernels.cpu.program.driver import call_operator


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library of its own, without kernels."""
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "sources").mkdir()
    return Library(tmp_path / "sources")


@helper
def _scaled(x: float, factor: float) -> Any:
    return x * factor


@inline
def _larger(a: Any, b: Any) -> Any:
    return a if a.shape[0] >= b.shape[0] else b


_doubles, _matrix, _four = array_at("float64", 1), array_at("float64", 2), stack_array("float64", 4)


def test_arrays_in_memory(library: Library) -> None:
    @library.kernel
    def describe(address: int, rows: int, columns: int, out: int) -> int:
        matrix, found = _matrix(address, rows, columns), _doubles(out, 4)
        found[0], found[1] = matrix.shape[0], matrix.shape[1]
        found[2], found[3] = matrix[1, 2], matrix[1:].sum()
        return 0

    x, out = np.arange(12, dtype=np.float64).reshape(3, 4), np.zeros(4)
    describe(x.ctypes.data, 3, 4, out.ctypes.data)
    assert out.tolist() == [3, 4, x[1, 2], x[1:].sum()]


def test_helpers_take_names_and_return_arrays(library: Library) -> None:
    @library.kernel
    def use(a: int, b: int, out: int) -> int:
        write_float64(out, _scaled(3.0, 2))
        write_float64(out + 8, _scaled(3.0, factor=10))
        write_float64(out + 16, _larger(_doubles(a, 2), _doubles(b, 3))[0])
        return 0

    a, b, out = np.full(2, 7.0), np.full(3, 8.0), np.zeros(3)
    use(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    assert out.tolist() == [6, 30, 8]
    assert _scaled(2.0, 2.0) == 4.0, "a helper is a plain function too"


def test_an_array_on_the_stack(library: Library) -> None:
    @library.kernel
    def sums(out: int, begin: int, end: int) -> int:
        for i in range(begin, end):
            room = _four()
            for j in range(room.shape[0]):
                room[j] = i * j
            write_float64(out + 8 * i, room[1] + room[2] + room[3])
        return 0

    out = np.zeros(5)
    sums(out.ctypes.data, 1, 5)
    assert out.tolist() == [0, 6, 12, 18, 24]


def test_a_kernel_cannot_make_arrays(library: Library) -> None:
    @library.kernel
    def make(out: int) -> int:
        write_float64(out, np.empty(out, np.float64).shape[0])
        return 0

    with pytest.raises(Exception, match=r"NRT|returning of array"):
        make(0)


def test_a_kernel_that_fails(library: Library) -> None:
    @library.kernel
    def fail(code: int) -> int:
        if code == 1:
            raise ValueError("code")
        return code

    fail(0)
    for code in (1, 2):
        with pytest.raises(NativeFunctionError, match="kernel fail failed"):
            fail(code)


def _power(exponent: int) -> Callable[[int, int, int, int, int], int]:
    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        value = 1
        for _ in range(exponent):
            value *= read_int64(arguments)
        write_int64(context, value)
        return end - begin

    return op


def test_operators_made_by_a_factory_are_kept_apart(library: Library) -> None:
    """Compiled, and loaded by another library over the same folder."""
    again = Library(library._sources)
    for place in (library, again):
        ops = [place.native_op(None, name=f"power_{exponent}")(_power(exponent)) for exponent in (2, 3)]
        report = place.prepare(ops)
        assert (report.compiled, report.loaded) == ((2, 0) if place is library else (0, 2))
        assert ops[0].address != ops[1].address
        call = place.kernel(_call)
        for op, expected in zip(ops, (25, 125), strict=True):
            words = np.array([5, 0], np.int64)
            call(op.address, words.ctypes.data)
            assert words[1] == expected


def test_operators_of_one_name_are_refused(library: Library) -> None:
    library.native_op(None, name="power")(_power(2))
    with pytest.raises(ValueError, match="a kernel named 'power' already exists"):
        library.native_op(None, name="power")(_power(3))


def _call(address: int, words: int) -> int:
    call_operator(address, words, words + 8, 0, 1, 0)
    return 0


def test_threads_that_call_a_kernel_first_at_once(library: Library) -> None:
    @library.kernel
    def mark(out: int, index: int) -> int:
        write_int64(out + 8 * index, index + 1)
        return 0

    out = np.zeros(8, np.int64)
    threads = [threading.Thread(target=mark, args=(out.ctypes.data, index)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out.tolist() == list(range(1, 9))
