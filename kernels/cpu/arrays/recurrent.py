"""The steps of LSTM, GRU and RNN layers. Each sequence of a batch is computed by one thread.

The states of a sequence are padded to whole vectors. The recurrence is stored in panels of PANEL columns, so that each
step reads it from one end to the other. Up to SIDE sequences share what is read. Each sum adds its terms in order, so
no result depends on the sequences beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import load, load_float32, read_float32, read_int32, store, store_float32
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, absolute, maximum, minimum, multiply_add, splat_float32, where_less
from ..jit.vector_math import UNARY, tanh
from ..program.bound_program import NodeProgram
from ..program.calls import Call, Items
from ..program.step_table import ErrorCode
from ..program.thread_pool import Threads

_NANOSECONDS_PER_WEIGHT = 0.05
_INT32 = np.dtype(np.int32)
_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)
Layer = Literal["LSTM", "GRU", "RNN"]
_GATES: dict[Layer, int] = {"LSTM": 4, "GRU": 3, "RNN": 1}
# The names of the kernel's arrays (of each direction, and of all directions) and parameters; see `RecurrentArguments`.
_OF_ONE = ("x", "recurrence", "last", "bias")
_OF_ALL = ("peepholes", "lengths", "initial_states", "initial_cells", "states", "cells", "out")
_PARAMETERS = ("p0", "q0", "p1", "q1", "p2", "q2")
PANEL, SIDE = 4 * LANES, 4
# The activations of the operators, by their names in lower case: functions of a vector, alpha and beta.
_ACTIVATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "affine": inline(lambda x, p, q: x * p + q),
    "elu": UNARY["elu"].function,
    "hardsigmoid": UNARY["hard_sigmoid"].function,
    "leakyrelu": UNARY["leaky_relu"].function,
    "relu": UNARY["relu"].function,
    "scaledtanh": inline(lambda x, p, q: tanh(x * q) * p),
    "sigmoid": UNARY["sigmoid"].function,
    "softplus": UNARY["softplus"].function,
    "softsign": inline(lambda x, p, q: x / (absolute(x) + 1.0)),
    "tanh": UNARY["tanh"].function,
    "thresholdedrelu": inline(lambda x, p, q: where_less(splat_float32(p), x, x, 0.0)),
}


@dataclass(frozen=True)
class Steps:
    """What one direction of a layer computes.

    Attributes:
        layer: operator. The gates are i, o, f, c (LSTM) or z, r, h (GRU).
        functions: names of the activations, in lower case.
        couples: True if the forget gate of an LSTM is 1 - i.
        has_peepholes: True if the gates of an LSTM also depend on the cell.
        resets_product: True if r of a GRU scales the product with the recurrence; False if it scales the state before.
    """

    layer: Layer
    functions: tuple[str, ...]
    couples: bool = False
    has_peepholes: bool = False
    resets_product: bool = True

    @property
    def name(self) -> str:
        """The name of the kernel."""
        flags = ("coupled", self.couples), ("peepholes", self.has_peepholes), ("early", not self.resets_product)
        return "_".join([self.layer.lower(), "steps", *self.functions, *(name for name, is_set in flags if is_set)])

    @property
    def is_two_products(self) -> bool:
        """True if the last gate needs a second product in each step."""
        return self.layer == "GRU" and not self.resets_product


USUAL_LSTM = Steps("LSTM", ("sigmoid", "tanh", "tanh"))
# The steps of layers without attributes that change them, and of a GRU with linear_before_reset.
USUAL_STEPS = (
    USUAL_LSTM, Steps("GRU", ("sigmoid", "tanh")), Steps("GRU", ("sigmoid", "tanh"), resets_product=False),
    Steps("RNN", ("tanh",)),
)  # fmt: skip


class RecurrentArguments(Arguments):
    """Steps of `batch` sequences. Each step's `x` already contains the product with the input weights and the biases.

    `recurrence` is packed (see `packed`); `last` is the same for the second product. `bias` is added to the last gate
    of a GRU before its reset. `peepholes` are [3, hidden]. `lengths` are int32 [batch], 0 for whole sequences. Initial
    states and cells may be 0. `..._step` and `..._row` are the bytes between steps and between sequences. `beside`
    sequences are one item. The gates are limited to +-`limit`; p and q are alpha and beta of the activations.
    """

    x: Address
    recurrence: Address
    last: Address
    bias: Address
    peepholes: Address
    lengths: Address
    initial_states: Address
    initial_cells: Address
    states: Address
    cells: Address
    out: Address
    steps: int
    batch: int
    hidden: int
    backwards: int
    beside: int
    x_step: int
    x_row: int
    out_step: int
    out_row: int
    state_row: int
    limit: float
    p0: float
    q0: float
    p1: float
    q1: float
    p2: float
    q2: float


@inline
def _multiply_side(state: int, stride: int, matrix: int, hidden: int, width: int, out: int) -> None:
    """Write the products of SIDE states with the matrix: out [SIDE, width]."""
    second, third, fourth = state + 4 * stride, state + 8 * stride, state + 12 * stride
    for column in range(0, width, 2 * LANES):
        panel = column // PANEL * PANEL
        at = matrix + 4 * (panel * hidden + column - panel)
        a = b = c = d = e = f = g = h = splat_float32(0.0)
        for row in range(hidden):
            one, two = load_float32(at), load_float32(at + 4 * LANES)
            number = splat_float32(read_float32(state + 4 * row))
            a, b = multiply_add(one, number, a), multiply_add(two, number, b)
            number = splat_float32(read_float32(second + 4 * row))
            c, d = multiply_add(one, number, c), multiply_add(two, number, d)
            number = splat_float32(read_float32(third + 4 * row))
            e, f = multiply_add(one, number, e), multiply_add(two, number, f)
            number = splat_float32(read_float32(fourth + 4 * row))
            g, h = multiply_add(one, number, g), multiply_add(two, number, h)
            at += 4 * PANEL
        there = out + 4 * column
        _store_two(there, a, b)
        _store_two(there + 4 * width, c, d)
        _store_two(there + 8 * width, e, f)
        _store_two(there + 12 * width, g, h)


@inline
def _store_two(out: int, first: Any, second: Any) -> None:
    store_float32(out, first)
    store_float32(out + 4 * LANES, second)


@inline
def _multiply_all(state: int, stride: int, matrix: int, hidden: int, width: int, count: int, out: int) -> None:
    """Write the products of `count` states of `hidden` numbers with the packed matrix: out [count, width].

    `stride` is the distance of the states. `width` is a multiple of PANEL.
    """
    if count == SIDE:
        _multiply_side(state, stride, matrix, hidden, width, out)
    else:
        for index in range(count):
            _multiply(state + 4 * index * stride, matrix, hidden, width, out + 4 * index * width)


@inline
def _multiply(state: int, matrix: int, hidden: int, width: int, out: int) -> None:
    """Write the columns of state [hidden] @ matrix."""
    at = matrix
    for column in range(0, width, PANEL):
        a = b = c = d = splat_float32(0.0)
        for row in range(hidden):
            number = splat_float32(read_float32(state + 4 * row))
            a = multiply_add(load_float32(at), number, a)
            b = multiply_add(load_float32(at + 4 * LANES), number, b)
            c = multiply_add(load_float32(at + 8 * LANES), number, c)
            d = multiply_add(load_float32(at + 12 * LANES), number, d)
            at += 4 * PANEL
        _store_two(out + 4 * column, a, b)
        _store_two(out + 4 * (column + 2 * LANES), c, d)


@inline
def _sum(x: int, products: int, place: int) -> Any:
    return load_float32(x + 4 * place) + load_float32(products + 4 * place)


@inline
def _limited(x: Any, limit: Any) -> Any:
    return minimum(maximum(x, 0.0 - limit), limit)


def lstm_gates(kind: Steps) -> Callable[..., None]:
    """Return a helper that replaces one state and one cell by those of the next step.

    The rows are of `padded` numbers, and `out` of `hidden` numbers; see `RecurrentArguments`.
    """
    squash, activate, show = (_ACTIVATIONS[name] for name in kind.functions)
    couples, has_peepholes = kind.couples, kind.has_peepholes

    @inline
    def gates(
        x: int, products: int, padded: int, hidden: int, state: int, cell: int, out: int, peepholes: int, limit: Any,
        p0: Any, q0: Any, p1: Any, q1: Any, p2: Any, q2: Any,
    ) -> None:  # fmt: skip
        for column in range(0, padded, LANES):
            at, left = 4 * column, hidden - column
            old = load_float32(cell + at)
            admitted = _sum(x, products, column)
            if has_peepholes:
                admitted = multiply_add(load(peepholes + at, left), old, admitted)
            admitted = squash(_limited(admitted, limit), p0, q0)
            if couples:
                kept = 1.0 - admitted
            else:
                kept = _sum(x, products, column + 2 * padded)
                if has_peepholes:
                    kept = multiply_add(load(peepholes + 8 * hidden + at, left), old, kept)
                kept = squash(_limited(kept, limit), p0, q0)
            candidate = activate(_limited(_sum(x, products, column + 3 * padded), limit), p1, q1)
            updated = kept * old + admitted * candidate
            exposed = _sum(x, products, column + padded)
            if has_peepholes:
                exposed = multiply_add(load(peepholes + 4 * hidden + at, left), updated, exposed)
            shown = squash(_limited(exposed, limit), p0, q0) * show(updated, p2, q2)
            store_float32(cell + at, updated)
            store_float32(state + at, shown)
            store(out + at, shown, left)

    return gates


def _gru_resets(kind: Steps) -> Callable[..., None]:
    """Return a helper that writes r * state, the left operand of the second product."""
    squash = _ACTIVATIONS[kind.functions[0]]

    @inline
    def reset(x: int, products: int, padded: int, state: int, out: int, limit: Any, p: Any, q: Any) -> None:
        for column in range(0, padded, LANES):
            scale = squash(_limited(_sum(x, products, column + padded), limit), p, q)
            store_float32(out + 4 * column, scale * load_float32(state + 4 * column))

    return reset


def _gru_gates(kind: Steps) -> Callable[..., None]:
    """Return a helper that replaces one state by that of the next step. `last` is the product for the last gate."""
    squash, activate = (_ACTIVATIONS[name] for name in kind.functions)
    resets_product = kind.resets_product

    @inline
    def gates(
        x: int, products: int, last: int, padded: int, hidden: int, state: int, out: int, bias: int, limit: Any,
        p0: Any, q0: Any, p1: Any, q1: Any,
    ) -> None:  # fmt: skip
        for column in range(0, padded, LANES):
            at = 4 * column
            update = squash(_limited(_sum(x, products, column), limit), p0, q0)
            recalled = load_float32(last + at)
            if resets_product:
                scale = squash(_limited(_sum(x, products, column + padded), limit), p0, q0)
                recalled = scale * (recalled + load_float32(bias + at))
            total = load_float32(x + 8 * padded + at) + recalled
            candidate = activate(_limited(total, limit), p1, q1)
            shown = (1.0 - update) * candidate + update * load_float32(state + at)
            store_float32(state + at, shown)
            store(out + at, shown, hidden - column)

    return gates


def _rnn_gates(kind: Steps) -> Callable[..., None]:
    """Return a helper that replaces one state by that of the next step."""
    activate = _ACTIVATIONS[kind.functions[0]]

    @inline
    def gates(
        x: int, products: int, padded: int, hidden: int, state: int, out: int, limit: Any, p: Any, q: Any
    ) -> None:
        for column in range(0, padded, LANES):
            shown = activate(_limited(_sum(x, products, column), limit), p, q)
            store_float32(state + 4 * column, shown)
            store(out + 4 * column, shown, hidden - column)

    return gates


@inline
def _begin(initial: int, state: int, padded: int, hidden: int, is_zero: bool) -> None:
    """Write the first state, padded with zeros."""
    for column in range(0, padded, LANES):
        if is_zero:
            store_float32(state + 4 * column, splat_float32(0.0))
        else:
            store_float32(state + 4 * column, load(initial + 4 * column, hidden - column))


@inline
def _end(state: int, out: int, padded: int, hidden: int) -> None:
    """Write the last state without its padding."""
    for column in range(0, padded, LANES):
        store(out + 4 * column, load_float32(state + 4 * column), hidden - column)


@inline
def _begin_rows(arguments: Any, first: int, count: int, padded: int, states: int, cells: int, has_cell: bool) -> int:
    """Write the first states and cells, and the zeros after the ends of sequences. Return the length of the longest.

    A length outside the steps gives -1.
    """
    longest, steps, hidden = 0, arguments.steps, arguments.hidden
    for index in range(count):
        row, length = first + index, steps
        if arguments.lengths != 0:
            length = int(read_int32(arguments.lengths + 4 * row))
            if length < 0 or length > steps:
                return -1
        longest = max(longest, length)
        start = row * arguments.state_row
        is_zero = arguments.initial_states == 0 or length == 0
        _begin(arguments.initial_states + start, states + 4 * index * padded, padded, hidden, is_zero)
        if has_cell:
            is_zero = arguments.initial_cells == 0 or length == 0
            _begin(arguments.initial_cells + start, cells + 4 * index * padded, padded, hidden, is_zero)
        for step in range(length, steps):
            out = arguments.out + row * arguments.out_row + step * arguments.out_step
            for column in range(0, hidden, LANES):
                store(out + 4 * column, splat_float32(0.0), hidden - column)
    return longest


@once
def steps_op(kind: Steps) -> NativeOp:
    """Return the operator that computes all steps. Items are groups of `beside` sequences."""
    has_cell, is_gru, is_two_products = kind.layer == "LSTM", kind.layer == "GRU", kind.is_two_products
    gates = _GATES[kind.layer] - is_two_products
    advance: Any = {"LSTM": lstm_gates, "GRU": _gru_gates, "RNN": _rnn_gates}[kind.layer](kind)
    reset: Any = _gru_resets(kind) if is_gru else None

    def compute_steps(arguments: RecurrentArguments, context: int, begin: int, end: int, scratch: int) -> int:
        hidden, batch, limit = arguments.hidden, arguments.batch, arguments.limit
        padded = (hidden + LANES - 1) // LANES * LANES
        width = (gates * padded + PANEL - 1) // PANEL * PANEL
        narrow = (padded + PANEL - 1) // PANEL * PANEL
        states = scratch + 4 * SIDE * width
        cells = states + 4 * SIDE * padded
        scaled = cells + 4 * SIDE * padded
        seconds = scaled + 4 * SIDE * padded
        for item in range(begin, end):
            first = item * arguments.beside
            count = min(arguments.beside, batch - first)
            longest = _begin_rows(arguments, first, count, padded, states, cells, has_cell)
            if longest < 0:
                return _OUTSIDE
            for number in range(longest):
                step = longest - 1 - number if arguments.backwards != 0 else number
                _multiply_all(states, padded, arguments.recurrence, hidden, width, count, scratch)
                x_rows = arguments.x + step * arguments.x_step + first * arguments.x_row
                if is_two_products:
                    for index in range(count):
                        at = 4 * index * padded
                        reset(
                            x_rows + index * arguments.x_row, scratch + 4 * index * width, padded, states + at,
                            scaled + at, limit, arguments.p0, arguments.q0,
                        )  # fmt: skip
                    _multiply_all(scaled, padded, arguments.last, hidden, narrow, count, seconds)
                for index in range(count):
                    row = first + index
                    if arguments.lengths != 0 and step >= read_int32(arguments.lengths + 4 * row):
                        continue
                    x, products = x_rows + index * arguments.x_row, scratch + 4 * index * width
                    out = arguments.out + step * arguments.out_step + row * arguments.out_row
                    state = states + 4 * index * padded
                    if has_cell:
                        advance(
                            x, products, padded, hidden, state, cells + 4 * index * padded, out, arguments.peepholes,
                            limit, arguments.p0, arguments.q0, arguments.p1, arguments.q1, arguments.p2, arguments.q2,
                        )  # fmt: skip
                    elif is_gru:
                        last = seconds + 4 * index * narrow if is_two_products else products + 8 * padded
                        advance(
                            x, products, last, padded, hidden, state, out, arguments.bias, limit, arguments.p0,
                            arguments.q0, arguments.p1, arguments.q1,
                        )  # fmt: skip
                    else:
                        advance(x, products, padded, hidden, state, out, limit, arguments.p0, arguments.q0)
            for index in range(count):
                start = (first + index) * arguments.state_row
                _end(states + 4 * index * padded, arguments.states + start, padded, hidden)
                if has_cell:
                    _end(cells + 4 * index * padded, arguments.cells + start, padded, hidden)
        return 0

    return native_op(RecurrentArguments, name=kind.name)(compute_steps)


def padded_size(hidden: int) -> int:
    """Return the size of a padded state, a multiple of LANES."""
    return -(-hidden // LANES) * LANES


def padded_gates(array: Float32, gates: int) -> Float32:
    """Return an array [..., gates * hidden] with each gate padded with zeros, [..., gates * padded size]."""
    *outer, width = array.shape
    hidden = width // gates
    if hidden == padded_size(hidden):
        return array
    padded = np.zeros((*outer, gates, padded_size(hidden)), array.dtype)
    padded[..., :hidden] = array.reshape(*outer, gates, hidden)
    return padded.reshape(*outer, -1)


def packed(recurrence: Float32, gates: int) -> Float32:
    """Return the recurrence [hidden, gates * hidden] with padded gates, in panels [panel][hidden][PANEL]."""
    recurrence = padded_gates(recurrence, gates)
    hidden, width = recurrence.shape
    whole = np.zeros((-(-width // PANEL), hidden, PANEL), np.float32)
    for panel, part in enumerate(whole):
        columns = recurrence[:, panel * PANEL : (panel + 1) * PANEL]
        part[:, : columns.shape[1]] = columns
    return whole


@dataclass(frozen=True)
class Direction:
    """One direction of a layer.

    Attributes:
        recurrence: return value of `packed`, for all gates, or for all but the last if there are two products.
        last: return value of `packed` for the last gate if there are two products; otherwise None.
        bias: float32 [padded size], for the last gate of a GRU before its reset; None for others.
        backwards: True to compute the steps from the last to the first.
        limit: the largest absolute value of the gates before their activations.
        parameters: alpha and beta of each activation.
    """

    kind: Steps
    recurrence: Float32
    last: Float32 | None
    bias: Float32 | None
    backwards: bool
    limit: float
    parameters: tuple[float, ...]


@dataclass(frozen=True)
class States:
    """The arrays of all directions, float32 except `lengths` (int32 [batch]), and all contiguous; see `run_steps`."""

    out: Float32
    states: Float32
    cells: Float32 | None
    initial_states: Float32 | None = None
    initial_cells: Float32 | None = None
    peepholes: Float32 | None = None
    lengths: Any = None


def run_steps(
    directions: Sequence[Direction], xs: Sequence[Float32], arrays: States, *, batch_first: bool,
    threads: Threads | None = None,
) -> None:  # fmt: skip
    """Compute all steps of all directions. Threads may compute the directions side by side.

    Args:
        xs: for each direction, float32 [steps, batch, gates * padded size], the product with the input weights plus
            the biases.
        arrays: `out` [steps, directions, batch, hidden], `states` and `cells` [directions, batch, hidden], which are
            written, and the initial states and cells; None = zeros. `peepholes` are [directions, 3 * hidden].
        batch_first: True if `xs` are [batch, steps, ...], `out` is [batch, steps, directions, hidden], and the states
            and cells are [batch, directions, hidden].
    """
    x = xs[0]
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    hidden, count = arrays.out.shape[-1], len(directions)
    state = (batch, count, hidden) if batch_first else (count, batch, hidden)
    fitting: list[tuple[str, Any, tuple[int, ...]]] = [
        ("out", arrays.out, (batch, steps, count, hidden) if batch_first else (steps, count, batch, hidden)),
        ("states", arrays.states, state), ("cells", arrays.cells, state),
        ("initial_states", arrays.initial_states, state), ("initial_cells", arrays.initial_cells, state),
        ("peepholes", arrays.peepholes, (count, 3 * hidden)),
    ]  # fmt: skip
    given: dict[str, Any] = {name: getattr(arrays, name) for name in _OF_ALL if getattr(arrays, name) is not None}
    for index, (direction, projected) in enumerate(zip(directions, xs, strict=True)):
        kind = direction.kind
        gates, size = _GATES[kind.layer], padded_size(hidden)
        inner = gates - kind.is_two_products
        own = {
            "x": (projected, (*x.shape[:2], gates * size)),
            "recurrence": (direction.recurrence, (-(-inner * size // PANEL), hidden, PANEL)),
            "last": (direction.last, (-(-size // PANEL), hidden, PANEL)), "bias": (direction.bias, (size,)),
        }  # fmt: skip
        fitting += [(name, array, shape) for name, (array, shape) in own.items()]
        given |= {f"{name} {index}": array for name, (array, _) in own.items() if array is not None}
    for name, array, shape in fitting:
        if array is not None:
            check(name, array, shape)
    if arrays.lengths is not None:
        check("lengths", arrays.lengths, (batch,), _INT32)
    beside = SIDE if batch * count >= SIDE * (threads.count if threads else 1) else 1
    kinds = tuple([(one.kind, one.backwards, one.limit, one.parameters) for one in directions])
    program = _program(kinds, tuple(given), (steps, batch, hidden), batch_first, beside)
    program.run(threads, **given)


@lru_cache(maxsize=256)
def _program(
    kinds: tuple[tuple[Steps, bool, float, tuple[float, ...]], ...], given: tuple[str, ...], sizes: tuple[int, ...],
    batch_first: bool, beside: int,
) -> NodeProgram:  # fmt: skip
    """Return the program, of which the directions are calls that do not depend on each other."""
    steps, batch, hidden = sizes
    count, size, row = len(kinds), padded_size(hidden), 4 * hidden
    calls, nanoseconds = [], 0.0
    for index, (kind, backwards, limit, parameters) in enumerate(kinds):
        gates = _GATES[kind.layer]
        # The bytes before the direction's part of each array.
        state = index * row if batch_first else index * batch * row
        starts = dict.fromkeys(_OF_ALL, state) | {"peepholes": 3 * index * row, "lengths": 0}
        own = {name: f"{name} {index}" for name in _OF_ONE}
        addresses: dict[str, Any] = {name: Binding(name, start) for name, start in starts.items() if name in given}
        addresses |= {name: Binding(known) for name, known in own.items() if known in given}
        addresses = dict.fromkeys((*_OF_ALL, *_OF_ONE)) | addresses
        x_row = 4 * gates * size
        strides: dict[str, Any] = {
            "x_step": x_row if batch_first else batch * x_row, "x_row": steps * x_row if batch_first else x_row,
            "out_step": count * row if batch_first else count * batch * row,
            "out_row": steps * count * row if batch_first else row, "state_row": count * row if batch_first else row,
        }  # fmt: skip
        numbered: dict[str, Any] = dict.fromkeys(_PARAMETERS, 0.0) | dict(zip(_PARAMETERS, parameters, strict=False))
        arguments = RecurrentArguments(
            **addresses, **strides, **numbered, steps=steps, batch=batch, hidden=hidden,
            backwards=int(backwards), beside=beside, limit=limit,
        )  # fmt: skip
        width, narrow = (-(-columns // PANEL) * PANEL for columns in ((gates - kind.is_two_products) * size, size))
        scratch = 4 * SIDE * (width + 3 * size + narrow)
        calls.append(Call(steps_op(kind), arguments, Items(factor=-(-batch // beside)), scratch))
        nanoseconds += steps * batch * hidden * gates * size * _NANOSECONDS_PER_WEIGHT
    return NodeProgram([calls], nanoseconds)
