"""Kernels as they are written: arguments, helpers, memory; and what calling one checks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.jit import KernelError, Library
from genai.kernels.cpu.lazy import helper, inline
from genai.kernels.cpu.memory import read_int64, stack_array, write_int64
from genai.kernels.cpu.tape.driver import call_operator


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


_four = stack_array("float64", 4)


def test_arrays_numbers_and_what_machine_code_sees_of_them(library: Library) -> None:
    @library.kernel("void(float32[:,:], int32[::1], float64, int64, uint8[:,:,::1], float64[::1])")
    def describe(x: Any, ids: Any, number: float, whole: int, bytes_: Any, out: Any) -> None:
        out[0], out[1], out[2] = x.shape[0], x.shape[1], x[1, 2]
        out[3], out[4], out[5] = ids.shape[0], number, whole
        out[6], out[7] = bytes_.shape[2], bytes_[0, 1, 2]

    x = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-1]
    x.flags.writeable = False
    out = np.zeros(8)
    describe(x, np.zeros(0, np.int32), 0.5, np.int64(-3), np.arange(6, dtype=np.uint8).reshape(1, 2, 3), out)
    assert out.tolist() == [2, 6, x[1, 2], 0, 0.5, -3, 3, 5]


def test_helpers_take_names_and_return_arrays(library: Library) -> None:
    @library.kernel("void(float64[::1], float64[::1], float64[::1])")
    def use(a: Any, b: Any, out: Any) -> None:
        out[0] = _scaled(3.0, 2)
        out[1] = _scaled(3.0, factor=10)
        out[2] = _larger(a, b)[0]

    out = np.zeros(3)
    use(np.full(2, 7.0), np.full(3, 8.0), out)
    assert out.tolist() == [6, 30, 8]
    assert _scaled(2.0, 2.0) == 4.0, "a helper is a plain function too"


def test_an_array_on_the_stack(library: Library) -> None:
    @library.kernel("void(float64[::1], int64, int64)")
    def sums(out: Any, begin: int, end: int) -> None:
        for i in range(begin, end):
            room = _four()
            for j in range(room.shape[0]):
                room[j] = i * j
            out[i] = room[1] + room[2] + room[3]

    out = np.zeros(5)
    sums(out, 1, 5)
    assert out.tolist() == [0, 6, 12, 18, 24]


def test_a_kernel_that_makes_arrays(library: Library) -> None:
    @library.kernel("void(int64, float64[::1])", allocates=True)
    def reverse(size: int, out: Any) -> None:
        copy = np.empty(size, np.float64)
        for i in range(size):
            copy[i] = out[size - 1 - i]
        for i in range(size):
            out[i] = copy[i]

    out = np.arange(1000.0)
    for _ in range(3):
        reverse(1000, out)
    assert out.tolist() == np.arange(1000.0)[::-1].tolist()


def test_making_arrays_must_be_announced(library: Library) -> None:
    @library.kernel("void(float64[::1])")
    def make(out: Any) -> None:
        out[0] = np.empty(out.shape[0], np.float64).shape[0]

    with pytest.raises(Exception, match=r"NRT|returning of array"):
        make(np.zeros(2))


def test_arguments_that_do_not_fit_are_refused(library: Library) -> None:
    @library.kernel("void(float32[:,::1], int64)")
    def nothing(x: Any, count: int) -> None:
        x[0, 0] = count

    good = np.zeros((1, 1), np.float32)
    nothing(good, 4)
    assert good[0, 0] == 4
    for wrong, found in (
        (good.astype(np.float64), "float64 with 2 axes"),
        (good[0], "float32 with 1 axes"),
        ([[1.0]], "list"),
        (None, "NoneType"),
    ):
        with pytest.raises(TypeError, match=rf"kernel nothing: expected float32\[:,::1\], not {found}"):
            nothing(wrong, 1)
    with pytest.raises(ValueError, match="argument"):
        nothing(good)
    with pytest.raises(ctypes.ArgumentError, match="wrong type"):
        nothing(good, "1")


def test_a_kernel_that_fails(library: Library) -> None:
    @library.kernel("void(int64)")
    def fail(code: int) -> None:
        if code != 0:
            raise ValueError("code")

    fail(0)
    with pytest.raises(KernelError, match="kernel fail failed"):
        fail(1)


@pytest.mark.parametrize(
    "signature", ["int64(int64)", "void(float32[:", "void(float32[::1] int64)", "float32", "void(; int64)"]
)
def test_signatures_that_cannot_be_read(library: Library, signature: str) -> None:
    with pytest.raises(ValueError, match="the signature is"):
        library.kernel(signature)(lambda x: None)


def _power(exponent: int) -> Callable[[int, int, int, int, int], int]:
    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        value = 1
        for _ in range(exponent):
            value *= read_int64(arguments)
        write_int64(context, value)
        return end - begin

    op.__name__ = f"power_{exponent}"
    return op


def test_operators_made_by_a_factory_are_kept_apart(library: Library) -> None:
    """Compiled, and loaded by another library over the same folder."""
    again = Library(library._sources)
    for place in (library, again):
        ops = [place.native_op(_power(exponent)) for exponent in (2, 3)]
        report = place.prepare(ops)
        assert (report.compiled, report.loaded) == ((2, 0) if place is library else (0, 2))
        assert ops[0].address != ops[1].address
        call = place.kernel("void(int64, int64)")(_call)
        for op, expected in zip(ops, (25, 125), strict=True):
            words = np.array([5, 0], np.int64)
            call(op.address, words.ctypes.data)
            assert words[1] == expected


def test_operators_of_one_name_are_refused(library: Library) -> None:
    library.native_op(_power(2))
    with pytest.raises(ValueError, match="native operator 'power_2' is there already"):
        library.native_op(_power(2))


def _call(address: int, words: int) -> None:
    call_operator(address, words, words + 8, 0, 1, 0)


def test_threads_that_call_a_kernel_first_at_once(library: Library) -> None:
    @library.kernel("void(int64[::1], int64)")
    def mark(out: Any, index: int) -> None:
        out[index] = index + 1

    out = np.zeros(8, np.int64)
    threads = [threading.Thread(target=mark, args=(out, index)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out.tolist() == list(range(1, 9))


def test_assembly(library: Library) -> None:
    @library.kernel("void(float32[::1])")
    def one(x: Any) -> None:
        x[0] = 1

    assert "genai_kernel" in one.assembly  # type: ignore[attr-defined]
