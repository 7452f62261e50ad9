"""The steps of LSTM and GRU layers with their usual activations. Each sequence of a batch is computed by one thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import load_float32, read_float32, store_float32
from ..jit.native import native_op
from ..jit.vector import LANES, multiply_add, splat_float32
from ..jit.vector_math import sigmoid, tanh
from ..program.bound_program import run_alone
from ..program.calls import Items
from ..program.thread_pool import Threads

_NANOSECONDS_PER_WEIGHT = 0.05
_GATES = {"LSTM": 4, "GRU": 3}


class RecurrentArguments(Arguments):
    """Steps of `batch` sequences. Each step's `x` already contains the product with the input weights and the biases.

    `recurrence` is [hidden, gates * hidden], and `bias` [hidden] is added to the last gate of a GRU before its reset.
    `states` and `cells` [batch, hidden] are replaced. `out` is [steps, batch, hidden].
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


@inline
def _multiply(state: int, matrix: int, hidden: int, width: int, out: int) -> None:
    """Write state [hidden] @ matrix [hidden, width]; width is a multiple of LANES."""
    wide = width - width % (4 * LANES)
    for column in range(0, wide, 4 * LANES):
        a = b = c = d = splat_float32(0.0)
        at = matrix + 4 * column
        for row in range(hidden):
            number = splat_float32(read_float32(state + 4 * row))
            a = multiply_add(load_float32(at), number, a)
            b = multiply_add(load_float32(at + 4 * LANES), number, b)
            c = multiply_add(load_float32(at + 8 * LANES), number, c)
            d = multiply_add(load_float32(at + 12 * LANES), number, d)
            at += 4 * width
        store_float32(out + 4 * column, a)
        store_float32(out + 4 * (column + LANES), b)
        store_float32(out + 4 * (column + 2 * LANES), c)
        store_float32(out + 4 * (column + 3 * LANES), d)
    for column in range(wide, width, LANES):
        total, at = splat_float32(0.0), matrix + 4 * column
        for row in range(hidden):
            total = multiply_add(load_float32(at), splat_float32(read_float32(state + 4 * row)), total)
            at += 4 * width
        store_float32(out + 4 * column, total)


@inline
def _sum(x: int, products: int, place: int) -> Any:
    return load_float32(x + 4 * place) + load_float32(products + 4 * place)


@native_op(RecurrentArguments)
def lstm_steps(arguments: RecurrentArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute all steps of an LSTM with the gates i, o, f, c. Items are sequences."""
    hidden, steps, batch = arguments.hidden, arguments.steps, arguments.batch
    for sequence in range(begin, end):
        state, cell = arguments.states + 4 * sequence * hidden, arguments.cells + 4 * sequence * hidden
        for number in range(steps):
            step = steps - 1 - number if arguments.backwards != 0 else number
            row = step * batch + sequence
            x, out = arguments.x + 16 * row * hidden, arguments.out + 4 * row * hidden
            _multiply(state, arguments.recurrence, hidden, 4 * hidden, scratch)
            for column in range(0, hidden, LANES):
                at = 4 * column
                forgotten = sigmoid(_sum(x, scratch, column + 2 * hidden)) * load_float32(cell + at)
                admitted = sigmoid(_sum(x, scratch, column)) * tanh(_sum(x, scratch, column + 3 * hidden))
                updated = forgotten + admitted
                shown = sigmoid(_sum(x, scratch, column + hidden)) * tanh(updated)
                store_float32(cell + at, updated)
                store_float32(state + at, shown)
                store_float32(out + at, shown)
    return 0


@native_op(RecurrentArguments)
def gru_steps(arguments: RecurrentArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute all steps of a GRU with the gates z, r, h, which resets the product with the state. Items: sequences."""
    hidden, steps, batch = arguments.hidden, arguments.steps, arguments.batch
    for sequence in range(begin, end):
        state = arguments.states + 4 * sequence * hidden
        for number in range(steps):
            step = steps - 1 - number if arguments.backwards != 0 else number
            row = step * batch + sequence
            x, out = arguments.x + 12 * row * hidden, arguments.out + 4 * row * hidden
            _multiply(state, arguments.recurrence, hidden, 3 * hidden, scratch)
            for column in range(0, hidden, LANES):
                at, last = 4 * column, 4 * (column + 2 * hidden)
                update = sigmoid(_sum(x, scratch, column))
                recalled = load_float32(scratch + last) + load_float32(arguments.bias + at)
                reset = sigmoid(_sum(x, scratch, column + hidden)) * recalled
                candidate = tanh(load_float32(x + last) + reset)
                shown = (1.0 - update) * candidate + update * load_float32(state + at)
                store_float32(state + at, shown)
                store_float32(out + at, shown)
    return 0


def is_supported(hidden: int) -> bool:
    """Return True if a state of this size consists of whole vectors."""
    return hidden > 0 and hidden % LANES == 0


def walked(
    kind: str, x: Float32, recurrence: Float32, bias: Float32, state: Float32, cell: Float32, *, backwards: bool,
    threads: Threads | None = None,
) -> tuple[Float32, Float32, Float32]:  # fmt: skip
    """Return the outputs [steps, batch, hidden], the last states and the last cells of one direction.

    Args:
        kind: "LSTM" (gates i, o, f, c), or "GRU" (gates z, r, h, with linear_before_reset).
        x: float32 [steps, batch, gates * hidden], the product with the input weights, plus the biases.
        recurrence: float32 [hidden, gates * hidden].
        bias: float32 [hidden], for the last gate of a GRU; not used by an LSTM.
        state, cell: float32 [batch, hidden]; a GRU returns the cells unchanged.
    """
    steps, batch, width = x.shape
    hidden = width // _GATES[kind]
    for name, array, shape in (
        ("x", x, (steps, batch, _GATES[kind] * hidden)), ("recurrence", recurrence, (hidden, width)),
        ("bias", bias, (hidden,)), ("state", state, (batch, hidden)), ("cell", cell, (batch, hidden)),
    ):  # fmt: skip
        check(name, array, shape)
    if not is_supported(hidden):
        raise ValueError(f"the hidden size is {hidden}, expected a multiple of {LANES}")
    states, cells, out = state.copy(), cell.copy(), np.empty((steps, batch, hidden), np.float32)
    if out.size:
        run_alone(
            lstm_steps if kind == "LSTM" else gru_steps, Items(factor=batch),
            steps * batch * recurrence.size * _NANOSECONDS_PER_WEIGHT, threads, scratch=4 * width, x=x,
            recurrence=recurrence, bias=bias, states=states, cells=cells, out=out, steps=steps, batch=batch,
            hidden=hidden, backwards=int(backwards),
        )  # fmt: skip
    return out, states, cells
