"""The steps of an LSTM layer with 8-bit weights, whose states are quantised to uint8 before each step.

The states of all sequences of a batch are quantised over one range, as DynamicQuantizeLSTM of onnxruntime defines, so
one thread computes all sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32, check
from ..jit import memory
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.native import native_op
from ..jit.vector import (
    LANES,
    maximum,
    minimum,
    reduce_add,
    reduce_max,
    splat_float32,
    splat_int32,
)
from ..jit.vector_math import rounded
from ..program.bound_program import BoundPrograms, NodeProgram
from ..program.calls import Call, Items
from ..program.driver import call_operator
from ..program.thread_pool import Threads, own_memory
from .functions import activation
from .gemm.micro import WORD_BYTES, integers
from .gemm.packing import (
    HALF,
    ByteRowsArguments,
    PackedOperand,
    byte_rows_call,
    pack_byte_rows,
    zero_point_terms,
)
from .gemm.product import FinishArguments, GemmArguments, finish_op, product_call, product_op
from .recurrent import USUAL_LSTM, lstm_gates

_STEPS = 255.0
_GATES = 4
_PRODUCTS_PER_NANOSECOND = 40.0
_gates = lstm_gates(USUAL_LSTM)


class QuantizedStepsArguments(Arguments):
    """Steps of `batch` sequences. Each step's `x` already contains the product with the input weights and the biases.

    `states` and `cells` [batch, hidden] are replaced. `out` is [steps, batch, hidden]. `packing` and `product` multiply
    the bytes of the states by the recurrence and write `products` [batch, 4 hidden]. `sums` are the sums of the
    recurrence's columns without their zero points; `scales` are the scales of its columns. `terms` and `factors` are
    the terms and scales of the product's columns, which depend on the range of the states.
    """

    x: Address
    states: Address
    cells: Address
    out: Address
    steps: int
    batch: int
    hidden: int
    backwards: int
    sums: Address
    scales: Address
    terms: Address
    factors: Address
    products: Address
    pack: Address
    multiply: Address
    items: int
    packing: ByteRowsArguments
    product: GemmArguments


@inline
def _quantize(states: int, count: int, out: int, sums: int, scales: int, width: int, terms: int, factors: int) -> Any:
    """Quantise states to uint8 over their range and 0, and write the terms and factors of the product's columns.

    Returns 1.0, or the number that all products are instead: 0 if all states are 0, NaN if a state is not finite.
    """
    least, most, poison = splat_float32(0.0), splat_float32(0.0), splat_float32(0.0)
    for index in range(0, count, LANES):
        value = memory.load_float32(states + 4 * index)
        least, most = minimum(least, value), maximum(most, value)
        poison = poison + (value - value)  # 0, or NaN
    below = reduce_max(0.0 - least)
    spread = reduce_max(most) + below
    one = spread / np.float32(_STEPS)
    if not 0.0 < one < np.inf:
        return spread - spread + reduce_add(poison)
    if reduce_add(poison) != 0.0:
        return reduce_add(poison)
    scale = splat_float32(one)
    point = minimum(maximum(rounded(splat_float32(below) / scale), 0.0), _STEPS)
    low, top = 0.0 - point, _STEPS - point
    for index in range(0, count, LANES):
        value = minimum(maximum(memory.load_float32(states + 4 * index) / scale, low), top)
        memory.store_bytes(out + index, rounded(value) + point)
    moved = splat_int32(HALF - int(reduce_max(point)))
    for column in range(0, width, LANES):
        memory.store_int32(terms + 4 * column, memory.load_int32(sums + 4 * column) * moved)
        memory.store_float32(factors + 4 * column, memory.load_float32(scales + 4 * column) * scale)
    return np.float32(1.0)


@native_op(QuantizedStepsArguments)
def quantized_lstm_steps(arguments: QuantizedStepsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute all steps. There is one item."""
    hidden, steps, batch, products = arguments.hidden, arguments.steps, arguments.batch, arguments.products
    states, cells, panels = arguments.states, arguments.cells, arguments.packing.panels
    width = 4 * hidden
    for number in range(steps):
        step = steps - 1 - number if arguments.backwards != 0 else number
        found = _quantize(
            states, batch * hidden, arguments.packing.x, arguments.sums, arguments.scales, width, arguments.terms,
            arguments.factors,
        )  # fmt: skip
        if found == 1.0:
            call_operator(arguments.pack, arguments.packing, context, 0, panels, scratch)
            call_operator(arguments.multiply, arguments.product, context, 0, arguments.items, scratch)
        else:
            for index in range(0, batch * width, LANES):
                memory.store_float32(products + 4 * index, splat_float32(found))
        for index in range(batch):
            row = step * batch + index
            _gates(
                arguments.x + 4 * row * width, products + 4 * index * width, hidden, hidden,
                states + 4 * index * hidden, cells + 4 * index * hidden, arguments.out + 4 * row * hidden, 0, np.inf,
                0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
            )  # fmt: skip
    return 0


def is_supported(hidden: int) -> bool:
    """Return True if a state of this size consists of whole vectors."""
    return hidden > 0 and hidden % LANES == 0


class QuantizedLstmSteps:
    """The steps of one direction.

    Args:
        recurrence: return value of `pack_integer_weight` for the recurrence [hidden, 4 hidden] (gates i, o, f, c).
        zero: zero point of the recurrence, a single one or one per column.
        scales: scale of the recurrence, a single one or one per column.
    """

    def __init__(self, threads: Threads, recurrence: PackedOperand, zero: NDArray[Any], scales: Any) -> None:
        hidden, width = recurrence.terms, recurrence.lines
        if not is_supported(hidden) or width != _GATES * hidden:
            raise ValueError(f"the recurrence is [{hidden}, {width}], expected [n, 4 n] for a multiple n of {LANES}")
        self._threads, self._recurrence, self._hidden = threads, recurrence, hidden
        self._factors, self._sums = zero_point_terms(recurrence, zero)
        self._scales = np.array(np.broadcast_to(np.asarray(scales, np.float32).reshape(-1), (width,)))
        self._programs: BoundPrograms[NodeProgram] = BoundPrograms()

    def __call__(
        self, x: Float32, state: Float32, cell: Float32, *, backwards: bool
    ) -> tuple[Float32, Float32, Float32]:
        """Return the outputs [steps, batch, hidden], the last states and the last cells.

        Args:
            x: float32 [steps, batch, 4 hidden], the product with the input weights, plus the biases.
            state, cell: float32 [batch, hidden].
        """
        steps, batch, hidden, width = *x.shape[:2], self._hidden, _GATES * self._hidden
        for name, array, shape in (
            ("x", x, (steps, batch, width)), ("state", state, (batch, hidden)), ("cell", cell, (batch, hidden)),
        ):  # fmt: skip
            check(name, array, shape)
        out = np.empty((steps, batch, hidden), np.float32)
        if not out.size:
            return out, state, cell
        states, cells = activation("copy", state), activation("copy", cell)  # the kernel replaces them
        tiling, words = integers().tiling, self._recurrence.words
        self._programs.get(self._made, steps, batch, backwards).run(
            self._threads, x=x, out=out, states=states, cells=cells, bytes=own_memory("state bytes", batch * hidden),
            left=own_memory("left", tiling.left_bytes(batch, words)), row_sums=own_memory("row sums", 4 * batch),
            terms=own_memory("terms", 4 * width), factors=own_memory("factors", 4 * width),
            products=own_memory("products", 4 * batch * width),
        )  # fmt: skip
        return out, states, cells

    def _made(self, steps: int, batch: int, backwards: bool) -> NodeProgram:
        kind, weight, hidden, width = integers(), self._recurrence, self._hidden, _GATES * self._hidden
        left, sums = Binding("left"), Binding("row_sums")
        packing = byte_rows_call(Binding("bytes"), np.uint8, batch, hidden, kind.tiling, left, sums)
        finishing = FinishArguments(
            out=Binding("products"), out_stride=width * WORD_BYTES, width=width, row_sums=sums,
            column_factors=self._factors, column_terms=Binding("terms"), column_scales=Binding("factors"),
        )  # fmt: skip
        product = product_call(
            kind, left, batch, weight.data, len(weight.data), weight.words, finish_op(kind, "copy", "float32"),
            finishing, threads=1,
        )  # fmt: skip
        assert isinstance(packing.arguments, ByteRowsArguments)
        assert isinstance(product.arguments, GemmArguments)
        arguments = QuantizedStepsArguments(
            x=Binding("x"), states=Binding("states"), cells=Binding("cells"), out=Binding("out"), steps=steps,
            batch=batch, hidden=hidden, backwards=int(backwards), sums=self._sums, scales=self._scales,
            terms=Binding("terms"), factors=Binding("factors"), products=Binding("products"), pack=pack_byte_rows,
            multiply=product_op(kind), items=product.items.factor, packing=packing.arguments,
            product=product.arguments,
        )  # fmt: skip
        call = Call(quantized_lstm_steps, arguments, Items(factor=1), product.scratch)
        return NodeProgram([[call]], steps * batch * hidden * width / _PRODUCTS_PER_NANOSECOND)
