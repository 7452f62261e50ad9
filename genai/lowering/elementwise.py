"""Row and lowering rules of element-wise operators and casts."""

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
from .rules import Lowered, LoweringSpec, NodeRows, States, lowering_rule, row_rule, slice_columns, stored_weights


@lowering_rule("Identity")
def lower_identity(spec: LoweringSpec) -> Lowered | None:
    """Lower Identity to a slice of all columns, which only renames the value."""
    x = spec.rows(0)
    return None if x is None else slice_columns(spec, x)


_UNARY_FUNCTIONS = {
    "Abs": "abs", "Erf": "erf", "Exp": "exp", "HardSwish": "hard_swish", "Log": "log", "Neg": "neg",
    "Reciprocal": "reciprocal", "Relu": "relu", "Sigmoid": "sigmoid", "Softplus": "softplus", "Sqrt": "sqrt",
    "Tanh": "tanh",
}  # fmt: skip


_BINARY_FUNCTIONS = {"Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide"}


def lower_unary(spec: LoweringSpec, function: str, *parameters: float) -> Lowered | None:
    x, out = spec.rows(0), spec.outputs[0]
    if x is None:
        return None
    return Lowered([Unary(function, spec.inputs[0], out, parameters, op_type=spec.op_type)], {out: x})


@lowering_rule(*_UNARY_FUNCTIONS)
def plain(spec: LoweringSpec) -> Lowered | None:
    """Lower unary functions without parameters."""
    return lower_unary(spec, _UNARY_FUNCTIONS[spec.op_type])


@lowering_rule(*_BINARY_FUNCTIONS)
def two_operands(spec: LoweringSpec) -> Lowered | None:
    """Lower arithmetic on two values of equal shape, or on rows and a constant that is the same for every row.

    One of the values may have one number per row.
    """
    shapes = {type_ for index in (0, 1) if (type_ := spec.rows(index)) is not None}
    if any(type_.width == 1 for type_ in shapes) and len({type_.with_width(1) for type_ in shapes}) == 1:
        shapes = {max(shapes, key=lambda type_: type_.last == type_.width and type_.width)}
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
    function, out = _BINARY_FUNCTIONS[spec.op_type], spec.outputs[0]
    op = Binary(function, values[0], values[1], out, constants[0], constants[1], op_type=spec.op_type)
    return Lowered([op], {out: shape})


def _is_per_row(constant: NDArray[Any] | None, shape: RowsType) -> bool:
    """Return True if a constant broadcasts only along the last axis."""
    if constant is None or constant.size not in (1, shape.last) or constant.ndim > len(shape.shape):
        return False
    return constant.size == 1 or constant.shape[-1] == shape.last


def elementwise_rows(at: NodeRows) -> States:
    states = [state for state in at.states if state is not None]
    if all(state.kind in (Kind.LENGTHS, Kind.UNIFORM) for state in states):
        return [_length_arithmetic(at)]
    if any(state.kind not in (Kind.ROWS, Kind.UNIFORM) for state in states):
        raise NotFlattenable("tokens are combined with values computed from the attention mask or from lengths")
    rank = max(state.rank for state in states)
    axes = {state.axis + rank - state.rank for state in states if state.kind is Kind.ROWS}
    if len(axes) != 1:
        raise NotFlattenable("the token axes of two values differ")
    axis = axes.pop()
    shape = tuple(_broadcast(states, rank, i, axis) for i in range(rank))
    return [State(Kind.ROWS, shape, axis)] * len(at.node.outputs)


def _broadcast(states: Sequence[State], rank: int, index: int, axis: int) -> RowDim:
    result = ONE
    for state in states:
        own_axis = index - (rank - state.rank)
        dim = state.known_shape[own_axis] if own_axis >= 0 else ONE
        if state.kind is Kind.UNIFORM and index == axis and dim != ONE:
            raise NotFlattenable(f"a constant of size {dim} extends along the token axis")
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
    """Divide dimensions, such as a head size by 2; None if the quotient is unknown or not a whole number."""
    whole = not (right.batch or right.tokens) and right.factor > 0 and left.factor % right.factor == 0
    return RowDim(left.factor // right.factor, left.batch, left.tokens) if whole else None


row_rule(
    *(
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Cos "
        "Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log Max Mean Min "
        "Mod Mul Neg Not Or Pow Reciprocal Relu Round Sign Sin Sinh Sqrt Sub Sum Tan Tanh Where Xor"
    ).split()
)(elementwise_rows)


@lowering_rule("Clip")
def lower_clip(spec: LoweringSpec) -> Lowered | None:
    """Lower Clip with constant limits (attributes, before version 11)."""
    limits = []
    for index, (name, default) in enumerate((("min", -np.inf), ("max", np.inf)), 1):
        if spec.has(index):
            if spec.constants[index] is None:
                return None
            limits.append(float(spec.constant(index).reshape(-1)[0]))
        else:
            limits.append(float(spec.attributes.get(name, default)))
    return lower_unary(spec, "clip", *limits)


row_rule(
    *"Celu Clip Elu HardSigmoid HardSwish LeakyRelu Mish PRelu Selu Shrink Sigmoid Softplus Softsign Swish".split(),
    "ThresholdedRelu",
)(elementwise_rows)


@lowering_rule("Gelu")
@lowering_rule("Gelu", "FastGelu", "QuickGelu", domain=MS)
def lower_gelu(spec: LoweringSpec) -> Lowered | None:
    """Lower exact or tanh GELU; GELU with a bias has no op."""
    if spec.has(1):
        return None
    if spec.op_type == "QuickGelu":
        return lower_unary(spec, "quick_gelu", float(spec.attributes.get("alpha", 1.702)))
    by_tanh = spec.op_type == "FastGelu" or spec.attributes.get("approximate", "none") == "tanh"
    return lower_unary(spec, "gelu_tanh" if by_tanh else "gelu")


@lowering_rule("SwiGLU", domain=OURS)
def lower_swiglu(spec: LoweringSpec) -> Lowered | None:
    """Lower silu(gate) * up."""
    gate, up, out = spec.rows(0), spec.rows(1), spec.outputs[0]
    if gate is None or gate != up:
        return None
    return Lowered([Gate("silu", spec.inputs[0], spec.inputs[1], out, op_type=spec.op_type)], {out: gate})


row_rule("Gelu")(elementwise_rows)
row_rule("Gelu", domain=MS)(elementwise_rows)


@lowering_rule("Cast")
def lower_cast(spec: LoweringSpec) -> Lowered | None:
    """Lower casts to float32, the type of rows."""
    return lower_identity(spec) if int(spec.attributes["to"]) == DataType.FLOAT else None


row_rule("Cast", "CastLike")(elementwise_rows)


stored_weights("DequantizeLinear", beside=(1, 2))
