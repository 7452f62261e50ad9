"""Element by element operators and casts over rows: how tokens pass through them, and the ops that they become."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.ir import Binary, Gate, RowsType, Unary

from ..onnx.node import MS, OURS
from ..onnx.types import DataType
from .rows import ONE, Kind, NotFlattenable, RowDim, State
from .rules import Made, NodeRows, RowSpec, States, columns_record, record_rule, row_rule, stored_weights


@record_rule("Identity")
def identity_record(spec: RowSpec) -> Made | None:
    """Another name."""
    x = spec.rows(0)
    return None if x is None else columns_record(spec, x)


_UNARY_RECORDS = {
    "Abs": "abs", "Erf": "erf", "Exp": "exp", "HardSwish": "hard_swish", "Log": "log", "Neg": "neg",
    "Reciprocal": "reciprocal", "Relu": "relu", "Sigmoid": "sigmoid", "Softplus": "softplus", "Sqrt": "sqrt",
    "Tanh": "tanh",
}  # fmt: skip


_BINARY_RECORDS = {"Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide"}


def unary_record(spec: RowSpec, function: str, *parameters: float) -> Made | None:
    x, out = spec.rows(0), spec.outputs[0]
    if x is None:
        return None
    return Made([Unary(function, spec.inputs[0], out, parameters, op_type=spec.op_type)], {out: x})


@record_rule(*_UNARY_RECORDS)
def plain(spec: RowSpec) -> Made | None:
    """Functions without parameters."""
    return unary_record(spec, _UNARY_RECORDS[spec.op_type])


@record_rule(*_BINARY_RECORDS)
def two_operands(spec: RowSpec) -> Made | None:
    """Rows with rows of the same shape, or with constants that are the same for every row."""
    shapes = {type_ for index in (0, 1) if (type_ := spec.rows(index)) is not None}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    values, constants = ["", ""], ["", ""]
    for index in (0, 1):
        if spec.rows(index) is not None:
            values[index] = spec.inputs[index]
        elif _is_per_row(spec.constants[index], shape):
            constants[index] = spec.inputs[index]
        else:
            return None
    function, out = _BINARY_RECORDS[spec.op_type], spec.outputs[0]
    record = Binary(function, values[0], values[1], out, constants[0], constants[1], op_type=spec.op_type)
    return Made([record], {out: shape})


def _is_per_row(constant: NDArray[Any] | None, shape: RowsType) -> bool:
    """Whether a constant broadcasts along the last axis only."""
    if constant is None or constant.size not in (1, shape.last) or constant.ndim > len(shape.shape):
        return False
    return constant.size == 1 or constant.shape[-1] == shape.last


def elementwise_rows(at: NodeRows) -> States:
    given = [state for state in at.states if state is not None]
    if all(state.kind in (Kind.LENGTHS, Kind.UNIFORM) for state in given):
        return [_length_arithmetic(at)]
    if any(state.kind not in (Kind.ROWS, Kind.UNIFORM) for state in given):
        raise NotFlattenable("tokens meet values computed from the attention mask or from lengths")
    rank = max(state.rank for state in given)
    axes = {state.axis + rank - state.rank for state in given if state.kind is Kind.ROWS}
    if len(axes) != 1:
        raise NotFlattenable("two values bring their tokens along different axes")
    axis = axes.pop()
    shape = tuple(_broadcast(given, rank, i, axis) for i in range(rank))
    return [State(Kind.ROWS, shape, axis)] * len(at.node.outputs)


def _broadcast(given: Sequence[State], rank: int, index: int, axis: int) -> RowDim:
    result = ONE
    for state in given:
        own = index - (rank - state.rank)
        dim = state.known_shape[own] if own >= 0 else ONE
        if state.kind is Kind.UNIFORM and index == axis and dim != ONE:
            raise NotFlattenable(f"a constant of size {dim} runs along the token axis")
        result = dim if dim != ONE else result
    return result


def _length_arithmetic(at: NodeRows) -> State:
    if at.node.op_type in ("Cast", "Identity"):
        return at.first()
    if at.node.op_type in ("Mul", "Div") and len(at.states) == 2:
        left, right = at.lengths(0), at.lengths(1)
        if left and right and len(left) == len(right):
            combine: Callable[[RowDim, RowDim], RowDim | None] = python.mul if at.node.op_type == "Mul" else _quotient
            entries = [combine(a, b) for a, b in zip(left, right, strict=True)]
            if None not in entries:
                return State(Kind.LENGTHS, entries=tuple(entry for entry in entries if entry is not None))
    return State(Kind.CONTEXT)


def _quotient(left: RowDim, right: RowDim) -> RowDim | None:
    """Half a head, say; None where the quotient is no whole number or not known."""
    whole = not (right.batch or right.tokens) and right.factor > 0 and left.factor % right.factor == 0
    return RowDim(left.factor // right.factor, left.batch, left.tokens) if whole else None


row_rule(
    *(
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Cos "
        "Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log Max Mean Min "
        "Mod Mul Neg Not Or Pow Reciprocal Relu Round Sign Sin Sinh Sqrt Sub Sum Tan Tanh Where Xor"
    ).split()
)(elementwise_rows)


@record_rule("Clip")
def clip_record(spec: RowSpec) -> Made | None:
    """Limits that are constants (or attributes, before version 11)."""
    limits = []
    for index, (name, default) in enumerate((("min", -np.inf), ("max", np.inf)), 1):
        if spec.has(index):
            if spec.constants[index] is None:
                return None
            limits.append(float(spec.constant(index).reshape(-1)[0]))
        else:
            limits.append(float(spec.attributes.get(name, default)))
    return unary_record(spec, "clip", *limits)


row_rule(
    *"Celu Clip Elu HardSigmoid HardSwish LeakyRelu Mish PRelu Selu Shrink Sigmoid Softplus Softsign Swish".split(),
    "ThresholdedRelu",
)(elementwise_rows)


@record_rule("Gelu")
@record_rule("Gelu", "FastGelu", "QuickGelu", domain=MS)
def gelu_record(spec: RowSpec) -> Made | None:
    """Exact, or by the tanh approximation; a bias has no record."""
    if spec.has(1):
        return None
    if spec.op_type == "QuickGelu":
        return unary_record(spec, "quick_gelu", float(spec.attributes.get("alpha", 1.702)))
    by_tanh = spec.op_type == "FastGelu" or spec.attributes.get("approximate", "none") == "tanh"
    return unary_record(spec, "gelu_tanh" if by_tanh else "gelu")


@record_rule("SwiGLU", domain=OURS)
def swiglu_record(spec: RowSpec) -> Made | None:
    """silu(gate) * up."""
    gate, up, out = spec.rows(0), spec.rows(1), spec.outputs[0]
    if gate is None or gate != up:
        return None
    return Made([Gate("silu", spec.inputs[0], spec.inputs[1], out, op_type=spec.op_type)], {out: gate})


row_rule("Gelu")(elementwise_rows)


@record_rule("Cast")
def cast_record(spec: RowSpec) -> Made | None:
    """float32 to float32."""
    return identity_record(spec) if int(spec.attributes["to"]) == DataType.FLOAT else None


row_rule("Cast", "CastLike")(elementwise_rows)


stored_weights("DequantizeLinear", beside=(1, 2))
