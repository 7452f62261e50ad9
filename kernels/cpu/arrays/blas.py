"""Float matmuls with NumPy's BLAS, shared among this package's threads.

OpenBLAS splits a matmul evenly and spins until the slowest thread is done, so one core that is busy with other work
slows the matmul by a multiple of the core's share. If OpenBLAS can be limited to one thread and its functions can be
found, this package's threads call the functions on smaller parts instead.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from genai.common.forks import renew_locks

from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import typed_intrinsic, types
from ..jit.emit import FLOAT, INT32, INT64, POINTER, VOID, Emitter
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.thread_pool import Threads

_FLOPS_PER_NANOSECOND = 40.0
# Matmuls with fewer operations run on one thread.
_MIN_FLOPS = 4_000_000
# Minimum number of rows and columns per thread.
_ROWS, _COLUMNS = 16, 64
# The kind of an item: rows of the first matrix, columns of the second matrix, or whole matmuls.
_BY_ROWS, _BY_COLUMNS, _BY_MATRICES = 0, 1, 2
# Constants of cblas.
_ROW_MAJOR, _AS_IS, _TRANSPOSED = 101, 111, 112
# Function names in builds of OpenBLAS, and True if their integers have 64 bits.
_NAMES = (("scipy_{}64_", True), ("scipy_{}", False), ("{}64_", True), ("{}", False))
_LETTERS = {np.dtype(np.float32): "s", np.dtype(np.float64): "d"}


@dataclass(frozen=True)
class OpenBlas:
    """The functions of OpenBLAS that we call.

    Attributes:
        get_threads, set_threads: functions that return and set the library's number of threads.
        functions: addresses of the cblas functions gemm and gemv by the letter of their type; empty if they were not
            found.
        has_wide_integers: True if sizes have 64 bits.
    """

    get_threads: Any
    set_threads: Any
    functions: Mapping[str, tuple[int, int]]
    has_wide_integers: bool


class BlasThreads:
    """Control of the number of threads of NumPy's OpenBLAS. Has no effect if no OpenBLAS is found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        renew_locks(self, "_lock")
        self._users: set[_OneThread] = set()
        self._before = 0

    @property
    def library(self) -> OpenBlas | None:
        """OpenBLAS while its matmuls run only on the calling thread, so that threads can share them; otherwise None."""
        return _openblas() if self._users else None

    def single(self) -> _OneThread:
        """Return a context with one thread per matmul. The last user that leaves restores the previous number."""
        return _OneThread(self)

    def add(self, user: _OneThread) -> None:
        """Add a user. The first user limits OpenBLAS to one thread."""
        with self._lock:
            library = _openblas()
            if library is None or self._users:
                self._users.add(user)
                return
            self._before = library.get_threads()
            # If an interrupt follows, `remove` restores the number, which may not have been changed yet.
            self._users.add(user)
            library.set_threads(1)

    def remove(self, user: _OneThread) -> None:
        """Remove a user if it was added. The last user restores the number of threads."""
        with self._lock:
            library = _openblas()
            if library is not None and self._users == {user}:
                library.set_threads(self._before)
            self._users.discard(user)


class _OneThread:
    """A user of BlasThreads.single. It is removed even if an interrupt arrives while the context is entered or left.

    Deferring interrupts would take longer than a small graph.
    """

    def __init__(self, threads: BlasThreads) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        try:
            self._threads.add(self)
        except BaseException:
            self._threads.remove(self)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._threads.remove(self)
        except BaseException:
            self._threads.remove(self)
            raise


BLAS_THREADS = BlasThreads()


@cache
def _openblas() -> OpenBlas | None:
    """Return the OpenBLAS of NumPy's wheel, or None."""
    folders = (Path(np.__file__).parent.parent / "numpy.libs", Path(np.__file__).parent / ".dylibs")
    for path in (item for folder in folders if folder.is_dir() for item in folder.iterdir()):
        if "openblas" not in path.name:
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for name, is_wide in _NAMES:
            get, put = (getattr(library, name.format(f"openblas_{verb}_num_threads"), None) for verb in ("get", "set"))
            if get is not None and put is not None:
                functions = {letter: _cblas(library, name, letter) for letter in _LETTERS.values()}
                return OpenBlas(get, put, {key: found for key, found in functions.items() if all(found)}, is_wide)
    return None


def _cblas(library: ctypes.CDLL, name: str, letter: str) -> tuple[int, int]:
    """Return the addresses of gemm and gemv, or 0 if they are not found."""
    found = (getattr(library, name.format(f"cblas_{letter}{kind}"), None) for kind in ("gemm", "gemv"))
    gemm, gemv = (ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0 for function in found)
    return gemm, gemv


class MatrixArguments(Arguments, kw_only=False):
    """Matrices in memory: their address, the bytes between them, the leading dimension, and _AS_IS or _TRANSPOSED."""

    address: Address
    step: int
    stride: int
    order: int


# The part of a program's cache key that describes a matrix: step, stride and order.
_Layout = tuple[int, int, int]


class BlasArguments(Arguments):
    """Matmuls of matrices a [rows, terms] and b [terms, columns].

    `gemm` and `gemv` are functions of cblas. `shared` is the kind of item, such as _BY_ROWS.
    """

    gemm: Address
    gemv: Address
    shared: int
    rows: int
    columns: int
    terms: int
    a: MatrixArguments
    b: MatrixArguments
    out: Address


def _c_call(letter: str, is_wide: bool, kinds: str) -> Any:
    """Return an intrinsic that calls the C function at an address with arguments of these kinds.

    Args:
        kinds: a letter per argument: e(num), n(umber, such as rows), a(ddress), f(actor).
    """
    integer, real = INT64 if is_wide else INT32, FLOAT if letter == "s" else ir.DoubleType()
    native = {"e": INT32, "n": integer, "a": POINTER, "f": real}

    @typed_intrinsic
    def call(function: Any, given: Any) -> Any:
        def emit(e: Emitter, address: Any, values: Any) -> None:
            b, passed = e.builder, []
            for index, kind in enumerate(kinds):
                value, type_ = b.extract_value(values, index), native[kind]
                if kind == "a":
                    value = b.inttoptr(value, type_)
                elif kind == "f":
                    value = b.sitofp(value, type_)
                elif type_.width < 64:
                    value = b.trunc(value, type_)
                passed.append(value)
            type_ = ir.FunctionType(VOID, [native[kind] for kind in kinds])
            b.call(b.inttoptr(address, ir.PointerType(type_)), passed)

        return types.void(types.int64, types.UniTuple(types.int64, len(kinds))), emit

    return call


@once
def product_op(letter: str, is_wide: bool) -> NativeOp:
    """Return the operator. Items are rows, columns or matrices. gemv computes a single row or column, as in NumPy."""
    size = 4 if letter == "s" else 8
    gemm = _c_call(letter, is_wide, "eeennnfananfan")
    gemv = _c_call(letter, is_wide, "eennfananfan")

    def product(arguments: BlasArguments, context: int, begin: int, end: int, scratch: int) -> int:
        a, a_step, a_stride, a_order = arguments.a.address, arguments.a.step, arguments.a.stride, arguments.a.order
        b, b_step, b_stride, b_order = arguments.b.address, arguments.b.step, arguments.b.stride, arguments.b.order
        rows, columns, terms, out = arguments.rows, arguments.columns, arguments.terms, arguments.out
        # The steps between the rows of a and between the elements of a row; likewise for the columns of b.
        a_row, a_next = (a_stride, 1) if a_order == _AS_IS else (1, a_stride)
        b_column, b_next = (1, b_stride) if b_order == _AS_IS else (b_stride, 1)
        out_stride, count = columns, 1
        if arguments.shared == _BY_ROWS:
            a, out, rows = a + begin * size * a_row, out + begin * size * out_stride, end - begin
        elif arguments.shared == _BY_COLUMNS:
            b, out, columns = b + begin * size * b_column, out + begin * size, end - begin
        else:
            a, b, out = a + begin * a_step, b + begin * b_step, out + begin * size * rows * columns
            count = end - begin
        for _ in range(count):
            if columns == 1:
                height, width = (rows, terms) if a_order == _AS_IS else (terms, rows)
                operands = (_ROW_MAJOR, a_order, height, width, 1, a, a_stride, b, b_next, 0, out, out_stride)
                gemv(arguments.gemv, operands)
            elif rows == 1:
                height, width = (terms, columns) if b_order == _AS_IS else (columns, terms)
                opposite = _TRANSPOSED if b_order == _AS_IS else _AS_IS
                gemv(arguments.gemv, (_ROW_MAJOR, opposite, height, width, 1, b, b_stride, a, a_next, 0, out, 1))
            else:
                matrices = (1, a, a_stride, b, b_stride, 0, out, out_stride)
                gemm(arguments.gemm, (_ROW_MAJOR, a_order, b_order, rows, columns, terms, *matrices))
            a, b, out = a + a_step, b + b_step, out + size * rows * columns
        return 0

    name = f"blas_{letter}gemm_{64 if is_wide else 32}"
    return native_op(BlasArguments, name=name)(product)


def matmul(a: NDArray[Any], b: NDArray[Any], threads: Threads | None = None) -> NDArray[Any]:
    """Return a @ b. Inside `BLAS_THREADS.single`, large matmuls are shared by rows, columns or matrices."""
    flops = 2.0 * a.size * (b.shape[-1] if b.ndim > 1 else 1)
    library = BLAS_THREADS.library
    if threads is None or threads.count == 1 or flops < _MIN_FLOPS or library is None or not _fits(a, b, library):
        result: NDArray[Any] = np.matmul(a, b)
        return result
    if b.ndim == 2:
        rows = a.reshape(-1, a.shape[-1])
        out = np.empty((len(rows), b.shape[1]), a.dtype)
        _share(library, threads, rows, b, out)
        return out.reshape(*a.shape[:-1], b.shape[1])
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*batch, a.shape[-2], b.shape[-1]), a.dtype)
    left, right = (np.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (a, b))
    flat = out.reshape(-1, *out.shape[-2:])
    if math.prod(batch) >= threads.count:
        _share(library, threads, left, right, flat)
    else:
        for x, y, z in zip(left, right, flat, strict=True):
            _share(library, threads, x, y, z)
    return out


def matmul_apart(a: NDArray[Any], b: NDArray[Any], threads: Threads | None = None) -> NDArray[Any]:
    """Return a @ b. No result depends on the number of matrices in a stack, or on the number of rows if b is a matrix.

    Each matrix of a stack, or each row, is a separate call of BLAS, on contiguous operands of the same size.
    """
    if b.ndim <= 2 or a.ndim < 2:
        if a.ndim < 2 or b.ndim < 2:
            return np.asarray(np.matmul(a, b))
        rows: NDArray[Any] = np.matmul(np.ascontiguousarray(a)[..., None, :], np.ascontiguousarray(b))
        return rows[..., 0, :]
    a, b, library = np.ascontiguousarray(a), np.ascontiguousarray(b), BLAS_THREADS.library
    if threads is None or library is None or not _fits(a, b, library):
        return np.asarray(np.matmul(a, b))
    return _shared_stack(library, threads, a, b)


def _shared_stack(library: OpenBlas, threads: Threads, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Multiply stacks of matrices. Each matrix is multiplied by one thread."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*batch, a.shape[-2], b.shape[-1]), a.dtype)
    if out.size:
        left, right = (np.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (a, b))
        _share(library, threads, left, right, out.reshape(-1, *out.shape[-2:]))
    return out


def _fits(a: NDArray[Any], b: NDArray[Any], library: OpenBlas) -> bool:
    """Return True if the library can multiply these matrices."""
    if a.ndim < 2 or b.ndim < 2 or a.dtype != b.dtype or a.shape[-1] != b.shape[-2]:
        return False
    reach = max(a.nbytes, b.nbytes, *a.strides, *b.strides)
    return _LETTERS.get(a.dtype) in library.functions and (library.has_wide_integers or reach < 1 << 31)


def _share(library: OpenBlas, threads: Threads, a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """Share several matmuls by matrices. Share one matmul by rows of a or, if there are more, by columns of b."""
    if out.ndim > 2:
        shared, items = _BY_MATRICES, Items(factor=len(out))
    elif len(a) >= b.shape[1]:
        shared, items = _BY_ROWS, Items(factor=len(a), grain=_ROWS)
    else:
        shared, items = _BY_COLUMNS, Items(factor=b.shape[1], grain=_COLUMNS)
    letter = _LETTERS[a.dtype]
    (a, a_layout), (b, b_layout) = _laid_out(a), _laid_out(b)
    functions, sizes = library.functions[letter], (*out.shape[-2:], a.shape[-1])
    program = _program(letter, functions, library.has_wide_integers, shared, sizes, a_layout, b_layout, items)
    program.run(threads, a=first_element(a), b=first_element(b), out=first_element(out))


def _laid_out(x: NDArray[Any]) -> tuple[NDArray[Any], _Layout]:
    """Return matrices and their layout. Matrices with neither contiguous rows nor columns are copied for BLAS."""
    (rows, columns), size = x.shape[-2:], x.itemsize
    row_step, column_step = x.strides[-2:]
    step = x.strides[0] if x.ndim > 2 else 0
    if x.flags.aligned and not row_step % size and not column_step % size:
        if (column_step == size or columns == 1) and (row_step >= columns * size or rows == 1):
            return x, (step, max(row_step // size if rows > 1 else columns, 1), _AS_IS)
        if (row_step == size or rows == 1) and (column_step >= rows * size or columns == 1):
            return x, (step, max(column_step // size if columns > 1 else rows, 1), _TRANSPOSED)
    x = np.ascontiguousarray(x)
    return x, (x.strides[0], max(columns, 1), _AS_IS)


@lru_cache(maxsize=256)
def _program(
    letter: str, functions: tuple[int, int], is_wide: bool, shared: int, sizes: tuple[int, int, int], a: _Layout,
    b: _Layout, items: Items,
) -> NodeProgram:  # fmt: skip
    (gemm, gemv), (rows, columns, terms) = functions, sizes
    arguments = BlasArguments(
        gemm=gemm, gemv=gemv, shared=shared, rows=rows, columns=columns, terms=terms,
        a=MatrixArguments(Binding("a"), *a), b=MatrixArguments(Binding("b"), *b), out=Binding("out"),
    )  # fmt: skip
    products = items.factor if shared == _BY_MATRICES else 1
    flops = 2.0 * products * rows * columns * terms
    return NodeProgram([[Call(product_op(letter, is_wide), arguments, items)]], flops / _FLOPS_PER_NANOSECOND)
