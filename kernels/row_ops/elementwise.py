"""Functions of one and two operands, and gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cpu.rowwise.binary import Operand, binary
from ..cpu.rowwise.unary import unary
from ..cpu.tape.program import Call, Rows
from ..registry import NodeSpec
from .base import RowNode, RowType, ValueType, row_input, rule
from .nodes import Gate, RowCall

MS, OURS = "com.microsoft", "genai"

_PLAIN = {
    "Abs": "abs", "Erf": "erf", "Exp": "exp", "HardSwish": "hard_swish", "Log": "log", "Neg": "neg",
    "Reciprocal": "reciprocal", "Relu": "relu", "Sigmoid": "sigmoid", "Softplus": "softplus", "Sqrt": "sqrt",
    "Tanh": "tanh",
}  # fmt: skip
_BINARY = {"Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide"}


def _unary(spec: NodeSpec, types: Sequence[ValueType], function: str, *parameters: float) -> RowNode | None:
    x = row_input(types, 0)
    if x is None:
        return None

    def make(sources: Sequence[Rows], targets: Sequence[Rows]) -> Call:
        return unary(function, sources[0], targets[0], *parameters)

    return RowCall((spec.inputs[0],), {spec.outputs[0]: x}, make)


@rule(*_PLAIN)
def plain(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Functions without parameters."""
    return _unary(spec, types, _PLAIN[spec.op_type])


@rule("Gelu")
def gelu(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Exact, or by the tanh approximation."""
    return _unary(spec, types, "gelu_tanh" if spec.attributes.get("approximate", "none") == "tanh" else "gelu")


@rule("Gelu", "FastGelu", "QuickGelu", domain=MS)
def contributed_gelu(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """The forms of com.microsoft."""
    if spec.has(1):
        return None
    if spec.op_type == "QuickGelu":
        return _unary(spec, types, "quick_gelu", float(spec.attributes.get("alpha", 1.702)))
    return _unary(spec, types, "gelu" if spec.op_type == "Gelu" else "gelu_tanh")


@rule("Clip")
def clip(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Limits that are constants (or attributes, before version 11)."""
    limits = []
    for index, (name, default) in enumerate((("min", -np.inf), ("max", np.inf)), 1):
        if spec.has(index):
            if spec.constants[index] is None:
                return None
            limits.append(float(spec.constant(index).reshape(-1)[0]))
        else:
            limits.append(float(spec.attributes.get(name, default)))
    return _unary(spec, types, "clip", *limits)


@rule(*_BINARY)
def two_operands(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Rows with rows of the same shape, or with constants that are the same for every row."""
    operands: list[str | Operand] = []
    shapes = {type_ for index in (0, 1) if (type_ := row_input(types, index)) is not None}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    for index in (0, 1):
        if row_input(types, index) is not None:
            operands.append(spec.inputs[index])
        else:
            vector = _per_row(spec.constants[index], shape)
            if vector is None:
                return None
            operands.append(vector)

    names = tuple(dict.fromkeys(operand for operand in operands if isinstance(operand, str)))

    def make(sources: Sequence[Rows], targets: Sequence[Rows]) -> Call:
        found = dict(zip(names, sources, strict=True))
        a, b = (found[operand] if isinstance(operand, str) else operand for operand in operands)
        return binary(_BINARY[spec.op_type], a, b, targets[0])

    return RowCall(names, {spec.outputs[0]: shape}, make)


def _per_row(constant: NDArray[Any] | None, shape: RowType) -> NDArray[np.float32] | None:
    """A constant that broadcasts along the last axis only, as wide as a row; None if it is something else."""
    if constant is None or constant.size not in (1, shape.last) or constant.ndim > len(shape.shape):
        return None
    if constant.size != 1 and constant.shape[-1] != shape.last:
        return None
    flat = np.ascontiguousarray(constant, np.float32).reshape(-1)
    return flat if flat.size == 1 else np.tile(flat, shape.width // shape.last)


@rule("SwiGLU", domain=OURS)
def swiglu(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """silu(gate) * up."""
    gate, up = row_input(types, 0), row_input(types, 1)
    if gate is None or gate != up:
        return None
    return Gate("silu", spec.inputs[0], spec.inputs[1], spec.outputs[0], gate)
