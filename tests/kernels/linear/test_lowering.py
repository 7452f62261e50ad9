"""Matmuls of a program: their inputs are not overwritten before they have finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genai.kernels import ir
from genai.kernels.cpu.program.calls import BARRIER
from genai.kernels.cpu.program.lower import lower
from genai.kernels.cpu.program.packed_weights import PackedWeights
from genai.kernels.cpu.program.step_table import StepField
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.cpu.program.value_memory import Lowering
from genai.kernels.weights import uniform_format


class Constants(dict[str, np.ndarray]):
    """Arrays by name. Packed weights are cached per object, whatever its arrays."""

    __hash__ = object.__hash__

    def array(self, name: str) -> np.ndarray:
        return self[name]

    def packed(self, weight: ir.Weight) -> None:
        """Arrays may be read again."""


def test_an_addend_that_is_the_input(stored: Callable[..., dict[str, Any]]) -> None:
    """Memory that is reused for another value is not written before the matmul has read it."""
    constants, arrays = Constants(), stored(64, 64)
    constants["w"], constants["s"] = arrays["weight"], arrays["scales"]
    branch = ir.Projection(ir.BlockWeight("w", "s", "", 64, 64, uniform_format(4, 32)), addend="x")
    types = {name: ir.RowsType((1, -1, 64), 64) for name in "xyab"}
    lowering = Lowering({StepField.TOKENS: 64, StepField.LOGITS_ROWS: 4}, types, constants, PackedWeights(Threads(1)))
    lowering.expect("xyab")
    for name in "xy":
        lowering.make(name)
    for op in (ir.Linear("x", branch, "a", exact=False), ir.Unary("neg", "y", "b")):
        lower(op, lowering)
        lowering.done(op.inputs, op.outputs)
    program, buffers = lowering.finish(), lowering.buffers
    reading = next(i for i, call in enumerate(program.calls) if hasattr(call.arguments, "weights"))
    assert buffers["b"].address != buffers["x"].address or program.table[reading:-1, BARRIER].any()
