"""Steps of small models, such as the linear models and pipelines of scikit-learn.

Each step is so short that calls of NumPy take most of the time. In a recorded program the steps take no calls.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32, check
from ...errors import StepError
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import load, read_float32, read_int32, read_int64, store, write_float32, write_int32, write_int64
from ..jit.native import native_op
from ..jit.vector import LANES, multiply_add, splat_float32
from ..jit.vector_math import sigmoid
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.step_table import ErrorCode, StepField
from ..program.thread_pool import Threads, recorder_of_thread, temporary
from .functions import softmax_of_row

# The results of `classify`: scores as they are, or after a function. `PAIR` and `SIGMOIDS` are for two classes of which
# the second has the score s: (1 - s, s), and (sigmoid(-s), sigmoid(s)).
NONE, SOFTMAX, LOGISTIC, PAIR, SIGMOIDS = range(5)
# The results of `normalized`.
MAX, L1, L2 = range(3)
# Matrices with more elements are multiplied by BLAS, which has blocks for caches and registers.
MOST_WEIGHTS = 1 << 12
# Rough costs on one thread, in nanoseconds.
_NANOSECONDS_PER_TERM, _NANOSECONDS_PER_ELEMENT = 0.3, 1.0
_GRAIN = 8
_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)


class ProductArguments(Arguments):
    """out = alpha * x @ weight + addend, for rows x of `terms` numbers, and weights [terms, columns].

    `addend` is the address of numbers whose neighbours in a column and a row are `addend_row` and `addend_column` bytes
    apart, or 0. `addend_column` is 0 or 4.
    """

    x: Address
    weight: Address
    addend: Address
    out: Address
    terms: int
    columns: int
    addend_row: int
    addend_column: int
    alpha: float


@inline
def _finish(arguments: ProductArguments, row: int, first: int, total: Any) -> None:
    """Write a vector of results of a row, from a column on."""
    left = arguments.columns - first
    if arguments.alpha != 1.0:
        total = total * np.float32(arguments.alpha)
    if arguments.addend != 0:
        addend = arguments.addend + row * arguments.addend_row
        if arguments.addend_column != 0:
            total = total + load(addend + 4 * first, left)
        else:
            total = total + read_float32(addend)
    store(arguments.out + 4 * (row * arguments.columns + first), total, left)


@inline
def _multiply(arguments: ProductArguments, begin: int, end: int) -> None:
    terms, columns = arguments.terms, arguments.columns
    for first in range(0, columns, LANES):
        left = columns - first
        row = begin
        # Four rows at a time, because each sum waits for the one before it.
        while row + 4 <= end:
            a = arguments.x + 4 * row * terms
            b, c, d = a + 4 * terms, a + 8 * terms, a + 12 * terms
            at = arguments.weight + 4 * first
            p = q = r = s = splat_float32(0.0)
            for term in range(terms):
                weight = load(at, left)
                p = multiply_add(weight, splat_float32(read_float32(a + 4 * term)), p)
                q = multiply_add(weight, splat_float32(read_float32(b + 4 * term)), q)
                r = multiply_add(weight, splat_float32(read_float32(c + 4 * term)), r)
                s = multiply_add(weight, splat_float32(read_float32(d + 4 * term)), s)
                at += 4 * columns
            _finish(arguments, row, first, p)
            _finish(arguments, row + 1, first, q)
            _finish(arguments, row + 2, first, r)
            _finish(arguments, row + 3, first, s)
            row += 4
        while row < end:
            a, at = arguments.x + 4 * row * terms, arguments.weight + 4 * first
            p = splat_float32(0.0)
            for term in range(terms):
                p = multiply_add(load(at, left), splat_float32(read_float32(a + 4 * term)), p)
                at += 4 * columns
            _finish(arguments, row, first, p)
            row += 1


@native_op(ProductArguments)
def multiply_rows(arguments: ProductArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute rows [begin, end) of a product. Each sum adds its terms in order, so rows do not depend on others."""
    _multiply(arguments, begin, end)
    return 0


class ClassifierArguments(Arguments):
    """A product, and what follows: `kind` is a result of `classify`.

    `labels` is the address of int64 [rows], and `names` of the labels, int64 [`classes`]; both are 0 without labels.
    `scores` is the address of the results [rows, columns], or [rows, 2] for PAIR and SIGMOIDS.
    """

    product: ProductArguments
    scores: Address
    labels: Address
    names: Address
    classes: int
    kind: int


@native_op(ClassifierArguments)
def classify_rows(arguments: ClassifierArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute rows [begin, end) of the scores and labels."""
    product, kind = arguments.product, arguments.kind
    _multiply(product, begin, end)
    columns, classes = product.columns, arguments.classes
    for row in range(begin, end):
        at = product.out + 4 * row * columns
        if kind >= PAIR:
            value, out = read_float32(at), arguments.scores + 8 * row
            chosen = np.int64(1 if value > 0 else 0)
            write_float32(out, -value if kind == SIGMOIDS else np.float32(1.0) - value)
            write_float32(out + 4, value)
            if kind == SIGMOIDS:
                store(out, sigmoid(load(out, 2)), 2)
        else:
            out = arguments.scores + 4 * row * columns
            chosen = _largest(at, columns) % max(classes, 1)
            if kind == SOFTMAX:
                softmax_of_row(at, out, columns)
            else:
                for first in range(0, columns, LANES):
                    values = load(at + 4 * first, columns - first)
                    store(out + 4 * first, sigmoid(values) if kind == LOGISTIC else values, columns - first)
        if arguments.labels != 0:
            write_int64(arguments.labels + 8 * row, read_int64(arguments.names + 8 * chosen))
    return 0


@inline
def _largest(at: int, width: int) -> Any:
    """Return the index of the first largest number of a row, or of the first NaN."""
    best, chosen = read_float32(at), np.int64(0)
    for index in range(1, width):
        value = read_float32(at + 4 * index)
        if best == best and (value > best or value != value):
            best, chosen = value, np.int64(index)
    return chosen


@inline
def _smallest(at: int, width: int) -> Any:
    """Return the index of the first smallest number of a row, or of the first NaN."""
    best, chosen = read_float32(at), np.int64(0)
    for index in range(1, width):
        value = read_float32(at + 4 * index)
        if best == best and (value < best or value != value):
            best, chosen = value, np.int64(index)
    return chosen


class ExtremeArguments(Arguments):
    """Rows of float32 x, and the int64 index of the largest (of the smallest if `is_least` is 1) of each row."""

    x: Address
    out: Address
    width: int
    is_least: int


@native_op(ExtremeArguments)
def find_extremes(arguments: ExtremeArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Find the indices for rows [begin, end)."""
    for row in range(begin, end):
        at = arguments.x + 4 * row * arguments.width
        chosen = _smallest(at, arguments.width) if arguments.is_least != 0 else _largest(at, arguments.width)
        write_int64(arguments.out + 8 * row, chosen)
    return 0


class ScaledArguments(Arguments):
    """out = (x - offset) * scale, for rows of float32. `offset` and `scale` are vectors."""

    x: Address
    offset: Address
    scale: Address
    out: Address
    width: int


@native_op(ScaledArguments)
def scale_rows(arguments: ScaledArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Scale rows [begin, end)."""
    width = arguments.width
    for row in range(begin, end):
        at = 4 * row * width
        for first in range(0, width, LANES):
            left, place = width - first, at + 4 * first
            moved = load(arguments.x + place, left) - load(arguments.offset + 4 * first, left)
            store(arguments.out + place, moved * load(arguments.scale + 4 * first, left), left)
    return 0


class NormalizedArguments(Arguments):
    """out = x / norm of x, for rows of float32. `kind` is MAX, L1 or L2."""

    x: Address
    out: Address
    width: int
    kind: int


@native_op(NormalizedArguments)
def normalize_rows(arguments: NormalizedArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Normalise rows [begin, end). Rows with the norm 0 are copied."""
    width, kind = arguments.width, arguments.kind
    for row in range(begin, end):
        at, out = arguments.x + 4 * row * width, arguments.out + 4 * row * width
        size = read_float32(at) if kind == MAX else np.float32(0.0)
        for index in range(width):
            value = read_float32(at + 4 * index)
            if kind == MAX:
                size = value if value > size or value != value else size
            elif kind == L1:
                size += abs(value)
            else:
                size += value * value
        if kind == L2:
            size = np.sqrt(size)
        if size == 0:
            size = np.float32(1.0)
        for first in range(0, width, LANES):
            store(out + 4 * first, load(at + 4 * first, width - first) / size, width - first)
    return 0


class ColumnsArguments(Arguments):
    """Rows of x, and the int64 indices of the columns that each row of `out` consists of."""

    x: Address
    indices: Address
    out: Address
    rows: int
    width: int
    count: int
    bytes: int


@native_op(ColumnsArguments)
def pick_columns(arguments: ColumnsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Copy columns of elements of 4 or 8 bytes. There is one item."""
    out, width, item = arguments.out, arguments.width, arguments.bytes
    for row in range(arguments.rows):
        at = arguments.x + row * width * item
        for number in range(arguments.count):
            index = read_int64(arguments.indices + 8 * number)
            if index < 0 or index >= width:
                return _OUTSIDE
            if item == 4:
                write_int32(out, read_int32(at + 4 * index))
            else:
                write_int64(out, read_int64(at + 8 * index))
            out += item
    return 0


def product(
    x: Float32, weight: Float32, addend: Float32 | None = None, alpha: float = 1.0, *, threads: Threads | None = None
) -> Float32:
    """Return alpha * x @ weight + addend. Results of a row do not depend on other rows.

    Args:
        x: float32 [rows, K].
        weight: float32 [K, N].
        addend: float32 that broadcasts to [rows, N]; None = nothing is added.
    """
    rows, terms = x.shape
    check("weight", weight, (terms, None))
    check("x", x, (rows, terms))
    columns = weight.shape[1]
    out = np.empty((rows, columns), np.float32)
    if not out.size:
        return out
    step_row = step_column = at = 0
    if addend is not None:
        check("addend", addend, addend.shape)
        wide = np.broadcast_to(addend, out.shape)
        step_row, step_column, at = *wide.strides, first_element(addend)
    program = _product_program(terms, columns, step_row, step_column if columns > 1 else 4, alpha)
    addresses = {"x": first_element(x), "weight": first_element(weight), "addend": at, "out": first_element(out)}
    program.run_bound(addresses, threads, rows, rows * _row_work(terms, columns))
    return out


def _row_work(terms: int, columns: int) -> float:
    return 4.0 + _NANOSECONDS_PER_TERM * terms * -(-columns // LANES)


def _product(terms: int, columns: int, addend_row: int, addend_column: int, alpha: float) -> ProductArguments:
    return ProductArguments(
        x=Binding("x"), weight=Binding("weight"), addend=Binding("addend"), out=Binding("out"), terms=terms,
        columns=columns, addend_row=addend_row, addend_column=addend_column, alpha=alpha,
    )  # fmt: skip


def _by_rows(operator: Any, arguments: Arguments) -> NodeProgram:
    return NodeProgram([[Call(operator, arguments, Items(StepField.TOKENS, grain=_GRAIN))]])


@lru_cache(maxsize=256)
def _product_program(*layout: Any) -> NodeProgram:
    return _by_rows(multiply_rows, _product(*layout))


def classified(
    x: Float32, weight: Float32, addend: Float32, kind: int, names: NDArray[np.int64] | None = None, *,
    threads: Threads | None = None,
) -> tuple[Float32, NDArray[np.int64] | None]:  # fmt: skip
    """Return the scores of x @ weight + addend after a function, and the labels of the largest, None without names.

    Args:
        x: float32 [rows, K].
        weight: float32 [K, N]; N = 1 for PAIR and SIGMOIDS.
        addend: float32 [N].
        kind: NONE, SOFTMAX, LOGISTIC, PAIR or SIGMOIDS.
        names: labels of the classes, which repeat if they are fewer than N; at least two for PAIR and SIGMOIDS.
    """
    rows, terms = x.shape
    check("weight", weight, (terms, 1 if kind >= PAIR else None))
    check("x", x, (rows, terms))
    columns = weight.shape[1]
    check("addend", addend, (columns,))
    if names is not None:
        check("names", names, (None,), np.dtype(np.int64))
    if kind >= PAIR and (names is None or len(names) < 2):
        raise ValueError("scores of two classes need two names")
    out = np.empty((rows, 2 if kind >= PAIR else columns), np.float32)
    labels = None if names is None else np.empty(rows, np.int64)
    if not out.size:
        return out, labels
    sums = temporary(np.empty((rows, columns), np.float32))
    addresses = {
        "x": first_element(x), "weight": first_element(weight), "addend": first_element(addend),
        "out": first_element(sums), "scores": first_element(out),
        "labels": 0 if labels is None else first_element(labels), "names": 0 if names is None else first_element(names),
    }  # fmt: skip
    program = _classifier_program(terms, columns, kind, 0 if names is None else len(names))
    work = rows * (_row_work(terms, columns) + _NANOSECONDS_PER_ELEMENT * columns)
    program.run_bound(addresses, threads, rows, work)
    return out, labels


@lru_cache(maxsize=256)
def _classifier_program(terms: int, columns: int, kind: int, classes: int) -> NodeProgram:
    arguments = ClassifierArguments(
        product=_product(terms, columns, 0, 4, 1.0), scores=Binding("scores"), labels=Binding("labels"),
        names=Binding("names"), classes=classes, kind=kind,
    )  # fmt: skip
    return _by_rows(classify_rows, arguments)


def scaled(x: Float32, offset: Float32, scale: Float32, *, threads: Threads | None = None) -> Float32:
    """Return (x - offset) * scale.

    Args:
        x: float32 [rows, width].
        offset, scale: float32 [width].
    """
    rows, width = x.shape
    check("x", x, (rows, width))
    check("offset", offset, (width,))
    check("scale", scale, (width,))
    out = np.empty(x.shape, np.float32)
    if x.size:
        given = {"x": x, "offset": offset, "scale": scale, "out": out}
        addresses = {name: first_element(array) for name, array in given.items()}
        _scaling_program(width).run_bound(addresses, threads, rows, rows * -(-width // LANES) * 4.0)
    return out


@lru_cache(maxsize=256)
def _scaling_program(width: int) -> NodeProgram:
    places = {name: Binding(name) for name in ("x", "offset", "scale", "out")}
    return _by_rows(scale_rows, ScaledArguments(**places, width=width))


def normalized(x: Float32, kind: int, *, threads: Threads | None = None) -> Float32:
    """Return rows divided by their norm (MAX, L1 or L2); rows with the norm 0 are unchanged.

    Args:
        x: float32 [rows, width].
    """
    check("x", x, (None, None))
    out = np.empty(x.shape, np.float32)
    if x.size:
        addresses = {"x": first_element(x), "out": first_element(out)}
        work = x.size * _NANOSECONDS_PER_ELEMENT
        _normalizing_program(x.shape[1], kind).run_bound(addresses, threads, len(x), work)
    return out


@lru_cache(maxsize=256)
def _normalizing_program(width: int, kind: int) -> NodeProgram:
    return _by_rows(normalize_rows, NormalizedArguments(x=Binding("x"), out=Binding("out"), width=width, kind=kind))


def extremes(x: Float32, *, least: bool, threads: Threads | None = None) -> NDArray[np.int64]:
    """Return the index of the first largest number (smallest if `least`) of each row, or of the first NaN.

    Args:
        x: float32 [rows, width], width > 0.
    """
    check("x", x, (None, None))
    out = np.empty(len(x), np.int64)
    if x.size:
        addresses = {"x": first_element(x), "out": first_element(out)}
        work = x.size * _NANOSECONDS_PER_ELEMENT
        _extremes_program(x.shape[1], least).run_bound(addresses, threads, len(x), work)
    return out


@lru_cache(maxsize=256)
def _extremes_program(width: int, least: bool) -> NodeProgram:
    arguments = ExtremeArguments(x=Binding("x"), out=Binding("out"), width=width, is_least=int(least))
    return _by_rows(find_extremes, arguments)


def columns_of(x: NDArray[Any], indices: NDArray[Any]) -> NDArray[Any] | None:
    """Return x[:, indices] for indices [count].

    Returns None if no program is recorded, or nothing fits, or an index is negative or too large. In later runs of a
    recorded program, such an index raises StepError.
    """
    if (
        recorder_of_thread() is None or x.dtype.hasobject or x.itemsize not in (4, 8) or indices.dtype != np.int64
        or x.ndim != 2 or not x.size or not 0 < len(x) * indices.size <= MOST_WEIGHTS
        or not x.flags.c_contiguous or not indices.flags.c_contiguous
    ):  # fmt: skip
        return None
    out = np.empty((len(x), indices.size), x.dtype)
    program = _columns_program(len(x), x.shape[1], indices.size, x.itemsize)
    given = {"x": x, "indices": indices, "out": out}
    try:
        program.run_bound({name: first_element(array) for name, array in given.items()}, None, 0, out.size * 2.0)
    except StepError:
        return None
    return out


@lru_cache(maxsize=256)
def _columns_program(rows: int, width: int, count: int, size: int) -> NodeProgram:
    arguments = ColumnsArguments(
        x=Binding("x"), indices=Binding("indices"), out=Binding("out"), rows=rows, width=width, count=count, bytes=size,
    )  # fmt: skip
    return NodeProgram([[Call(pick_columns, arguments, Items(factor=1))]])
