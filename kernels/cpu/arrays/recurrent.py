"""The steps of LSTM and GRU layers with their usual activations. Each sequence of a batch is computed by one thread.

The recurrence is stored in panels of PANEL columns, so that each step reads it from one end to the other. Up to SIDE
sequences share what is read. Each sum adds its terms in order, so no result depends on the sequences beside it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import load_float32, read_float32, store_float32
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, multiply_add, splat_float32
from ..jit.vector_math import sigmoid, tanh
from ..program.bound_program import run_alone
from ..program.calls import Items
from ..program.thread_pool import Threads
from .functions import activation

_NANOSECONDS_PER_WEIGHT = 0.05
Layer = Literal["LSTM", "GRU"]
_GATES: dict[Layer, int] = {"LSTM": 4, "GRU": 3}
PANEL, SIDE = 4 * LANES, 4


class RecurrentArguments(Arguments):
    """Steps of `batch` sequences. Each step's `x` already contains the product with the input weights and the biases.

    `recurrence` is packed (see `packed`). `bias` [hidden] is added to the last gate of a GRU before its reset. `states`
    and `cells` [batch, hidden] are replaced. `out` is [steps, batch, hidden]. `beside` sequences are one item.
    """

    x: Address
    recurrence: Address
    bias: Address
    states: Address
    cells: Address
    out: Address
    steps: int
    batch: int
    hidden: int
    backwards: int
    beside: int


@inline
def _multiply_side(state: int, matrix: int, hidden: int, width: int, out: int) -> None:
    """Write the products of SIDE states with the whole panels of the matrix: out [SIDE, width]."""
    second, third, fourth = state + 4 * hidden, state + 8 * hidden, state + 12 * hidden
    for column in range(0, width - width % PANEL, 2 * LANES):
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
def _multiply_all(state: int, matrix: int, hidden: int, width: int, count: int, out: int) -> None:
    """Write the products of `count` states [count, hidden] with the packed matrix: out [count, width]."""
    if count == SIDE:
        _multiply_side(state, matrix, hidden, width, out)
    for index in range(count):
        start = width - width % PANEL if count == SIDE else 0
        _multiply(state + 4 * index * hidden, matrix, hidden, width, start, out + 4 * index * width)


@inline
def _multiply(state: int, matrix: int, hidden: int, width: int, start: int, out: int) -> None:
    """Write the columns from `start` on of state [hidden] @ matrix; width is a multiple of LANES."""
    wide = width - width % PANEL
    for column in range(start, wide, PANEL):
        a = b = c = d = splat_float32(0.0)
        at = matrix + 4 * column * hidden
        for row in range(hidden):
            number = splat_float32(read_float32(state + 4 * row))
            a = multiply_add(load_float32(at), number, a)
            b = multiply_add(load_float32(at + 4 * LANES), number, b)
            c = multiply_add(load_float32(at + 8 * LANES), number, c)
            d = multiply_add(load_float32(at + 12 * LANES), number, d)
            at += 4 * PANEL
        store_float32(out + 4 * column, a)
        store_float32(out + 4 * (column + LANES), b)
        store_float32(out + 4 * (column + 2 * LANES), c)
        store_float32(out + 4 * (column + 3 * LANES), d)
    for column in range(wide, width, LANES):
        total, at = splat_float32(0.0), matrix + 4 * column * hidden
        for row in range(hidden):
            total = multiply_add(load_float32(at), splat_float32(read_float32(state + 4 * row)), total)
            at += 4 * LANES
        store_float32(out + 4 * column, total)


@inline
def _sum(x: int, products: int, place: int) -> Any:
    return load_float32(x + 4 * place) + load_float32(products + 4 * place)


@inline
def lstm_gates(x: int, products: int, hidden: int, state: int, cell: int, out: int) -> None:
    """Replace one state and one cell by those of the next step; the gates are i, o, f, c."""
    for column in range(0, hidden, LANES):
        at = 4 * column
        forgotten = sigmoid(_sum(x, products, column + 2 * hidden)) * load_float32(cell + at)
        admitted = sigmoid(_sum(x, products, column)) * tanh(_sum(x, products, column + 3 * hidden))
        updated = forgotten + admitted
        shown = sigmoid(_sum(x, products, column + hidden)) * tanh(updated)
        store_float32(cell + at, updated)
        store_float32(state + at, shown)
        store_float32(out + at, shown)


@inline
def _gru_gates(x: int, products: int, hidden: int, state: int, bias: int, out: int) -> None:
    """Replace one state by that of the next step. The gates are z, r, h, and r scales the product with the state."""
    for column in range(0, hidden, LANES):
        at, last = 4 * column, 4 * (column + 2 * hidden)
        update = sigmoid(_sum(x, products, column))
        recalled = load_float32(products + last) + load_float32(bias + at)
        reset = sigmoid(_sum(x, products, column + hidden)) * recalled
        candidate = tanh(load_float32(x + last) + reset)
        shown = (1.0 - update) * candidate + update * load_float32(state + at)
        store_float32(state + at, shown)
        store_float32(out + at, shown)


@once
def steps_op(kind: Layer) -> NativeOp:
    """Return the operator that computes all steps. Items are groups of `beside` sequences."""
    gates, has_cell = _GATES[kind], kind == "LSTM"

    def compute_steps(arguments: RecurrentArguments, context: int, begin: int, end: int, scratch: int) -> int:
        hidden, steps, batch = arguments.hidden, arguments.steps, arguments.batch
        width = gates * hidden
        for item in range(begin, end):
            first = item * arguments.beside
            count = min(arguments.beside, batch - first)
            states, cells = arguments.states + 4 * first * hidden, arguments.cells + 4 * first * hidden
            for number in range(steps):
                step = steps - 1 - number if arguments.backwards != 0 else number
                _multiply_all(states, arguments.recurrence, hidden, width, count, scratch)
                for index in range(count):
                    row, products = step * batch + first + index, scratch + 4 * index * width
                    x, out = arguments.x + 4 * row * width, arguments.out + 4 * row * hidden
                    state = states + 4 * index * hidden
                    if has_cell:
                        lstm_gates(x, products, hidden, state, cells + 4 * index * hidden, out)
                    else:
                        _gru_gates(x, products, hidden, state, arguments.bias, out)
        return 0

    return native_op(RecurrentArguments, name=f"{kind.lower()}_steps")(compute_steps)


def packed(recurrence: Float32) -> Float32:
    """Return the recurrence [hidden, gates * hidden] in panels of PANEL columns, and the rest in panels of LANES."""
    width = recurrence.shape[1]
    wide = width - width % PANEL
    starts = [*range(0, wide, PANEL), *range(wide, width, LANES)]
    parts = [recurrence[:, i:j].ravel() for i, j in zip(starts, [*starts[1:], width], strict=True)]
    return np.concatenate(parts).astype(np.float32, copy=False)


def is_supported(hidden: int) -> bool:
    """Return True if a state of this size consists of whole vectors."""
    return hidden > 0 and hidden % LANES == 0


def walked(
    kind: Layer, x: Float32, recurrence: Float32, bias: Float32, state: Float32, cell: Float32, *, backwards: bool,
    threads: Threads | None = None,
) -> tuple[Float32, Float32, Float32]:  # fmt: skip
    """Return the outputs [steps, batch, hidden], the last states and the last cells of one direction.

    Args:
        kind: "LSTM" (gates i, o, f, c), or "GRU" (gates z, r, h, with linear_before_reset).
        x: float32 [steps, batch, gates * hidden], the product with the input weights, plus the biases.
        recurrence: return value of `packed`.
        bias: float32 [hidden], for the last gate of a GRU; not used by an LSTM.
        state, cell: float32 [batch, hidden]; a GRU returns the array of the cells.
    """
    steps, batch, width = x.shape
    hidden = width // _GATES[kind]
    for name, array, shape in (
        ("x", x, (steps, batch, _GATES[kind] * hidden)), ("recurrence", recurrence, (hidden * width,)),
        ("bias", bias, (hidden,)), ("state", state, (batch, hidden)), ("cell", cell, (batch, hidden)),
    ):  # fmt: skip
        check(name, array, shape)
    if not is_supported(hidden):
        raise ValueError(f"the hidden size is {hidden}, expected a multiple of {LANES}")
    # The kernel replaces the states, and the cells of an LSTM.
    states = activation("copy", state) if state.size else state
    cells = activation("copy", cell) if cell.size and kind == "LSTM" else cell
    out = np.empty((steps, batch, hidden), np.float32)
    if out.size:
        beside = SIDE if batch >= SIDE * (threads.count if threads else 1) else 1
        run_alone(
            steps_op(kind), Items(factor=-(-batch // beside)),
            steps * batch * recurrence.size * _NANOSECONDS_PER_WEIGHT, threads, scratch=4 * width * beside, x=x,
            recurrence=recurrence, bias=bias, states=states, cells=cells, out=out, steps=steps, batch=batch,
            hidden=hidden, backwards=int(backwards), beside=beside,
        )  # fmt: skip
    return out, states, cells
