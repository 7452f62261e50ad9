"""Operators that run on a GPU, and their lowering to the array functions of `kernels.cuda`.

A node's inputs have one of two forms: arrays in device memory, of which only shapes and types are known, and host
arrays, which are constants or depend only on shapes. A node whose attributes would depend on anything else is rejected
before the graph is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.arrays import linear, rows
from genai.kernels.cuda.arrays.device import Status
from genai.kernels.cuda.arrays.launches import (  # fmt: skip
    ANY_FUNCTIONS,
    ANY_PAIRS,
    AXES,
    BOOL,
    COMPARISONS,
    FLOAT_FUNCTIONS,
    FLOAT_PAIRS,
    SCALARS,
    Array,
    ArrayError,
    Recorder,
)
from genai.kernels.cuda.arrays.linear import Tail, WindowShape
from genai.ops.pooling import WindowSpec
from genai.ops.registry import NodeSpec

from ..onnx.ir import Node
from ..onnx.node import MS, OURS
from ..onnx.types import DataType, TensorType

Known: TypeAlias = NDArray[Any]
Given: TypeAlias = Array | Known | None
FLOATS = frozenset({"float32", "float16"})
INTEGERS = frozenset({"int32", "int64"})
NUMBERS = FLOATS | INTEGERS


@dataclass(frozen=True)
class Seen:
    """The properties of a node that are known before the shapes are known.

    Attributes:
        types: type per input; None if the input is absent or not a tensor.
        known: per input, True if its value will be available on the host.
        outputs: type per output; None if the output is unused or not a tensor.
    """

    node: Node
    version: int
    types: Sequence[TensorType | None]
    known: Sequence[bool]
    outputs: Sequence[TensorType | None]

    def has(self, index: int) -> bool:
        """Return True if an input is present."""
        return bool(self.node.input(index))

    def dtype(self, index: int) -> str:
        """Return an input's element type, or "" if it is unknown."""
        return element_name(self.types[index]) if index < len(self.types) else ""

    def is_known(self, *indices: int) -> bool:
        """Return True if the values of these inputs, apart from absent inputs, will be available on the host."""
        return all(not self.has(index) or self.known[index] for index in indices)

    def rank(self, index: int) -> int:
        """Return an input's number of axes, or -1 if it is unknown."""
        found = self.types[index] if index < len(self.types) else None
        return -1 if found is None or found.shape is None else len(found.shape)

    def are(self, dtypes: frozenset[str], *indices: int) -> bool:
        """Return True if these inputs, apart from absent inputs, all have the same element type, one of `dtypes`."""
        found = {self.dtype(index) for index in (indices or range(len(self.types))) if self.has(index)}
        return len(found) == 1 and found <= dtypes

    def only(self, *outputs: int) -> bool:
        """Return True if no other outputs than these are used."""
        return not any(name for index, name in enumerate(self.node.outputs) if index not in outputs)


def element_name(known: Any) -> str:
    """Return the NumPy name of a tensor's element type; "" if it is unknown or the type is not a tensor."""
    plain = isinstance(known, TensorType) and known.dtype is not DataType.UNDEFINED
    return str(known.dtype.numpy_dtype.name) if plain else ""


@dataclass
class NodeCall:
    """A node while its kernel launches are recorded.

    Attributes:
        given: the inputs.
        upload: function that copies a host array to device memory, given the input's name and the array.
    """

    to: Recorder
    node: Node
    version: int
    given: Sequence[Given]
    upload: Callable[[str, Known], Array]
    status: Status
    attributes: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = self.node.attribute_values()

    @property
    def label(self) -> str:
        """The node's description in messages."""
        return f"{self.node.op_type} {self.node.name!r}"

    def array(self, index: int) -> Array:
        """Return an input in device memory."""
        value = self.given[index]
        if value is None:
            raise ArrayError(f"input {index} is missing")
        return value if isinstance(value, Array) else self.upload(self.node.inputs[index], value)

    def maybe(self, index: int) -> Array | None:
        """Return an input in device memory, or None if it is absent."""
        return self.array(index) if index < len(self.given) and self.given[index] is not None else None

    def known(self, index: int) -> Known | None:
        """Return an input that is on the host, or None if it is absent."""
        value = self.given[index] if index < len(self.given) else None
        assert not isinstance(value, Array)
        return value

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def whole_numbers(self, index: int, attribute: str) -> list[int] | None:
        """Return integers from an input (newer operator versions) or an attribute (older operator versions)."""
        value = self.known(index)
        found = self.attributes.get(attribute) if value is None else value.reshape(-1).tolist()
        return None if found is None else [int(number) for number in found]

    def spec(self) -> NodeSpec:
        """The node as a NodeSpec, for the registry's helper functions."""
        nothing = (None,) * len(self.node.inputs)
        names = tuple(self.node.inputs), tuple(self.node.outputs)
        return NodeSpec(self.node.domain, self.node.op_type, self.version, self.attributes, *names, nothing, None)  # type: ignore[arg-type]


Accepts: TypeAlias = Callable[[Seen], bool]
Lowering: TypeAlias = Callable[[NodeCall], "Array | list[Array]"]
TABLE: dict[tuple[str, str], tuple[Accepts, Lowering]] = {}
# Nodes that move no data, so they alone do not justify the use of a device.
VIEWS = {("", name) for name in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")}


def lowers(*names: str, domain: str = "", accepts: Accepts) -> Callable[[Lowering], Lowering]:
    """Return a decorator that registers a function as the lowering of these operators' nodes that pass `accepts`."""

    def add(lowering: Lowering) -> Lowering:
        TABLE.update({(domain, name): (accepts, lowering) for name in names})
        return lowering

    return add


def takes(seen: Seen) -> bool:
    """Return True if a node can run on a GPU."""
    found = TABLE.get(seen.node.key)
    if found is None or seen.node.subgraphs():
        return False
    for index, known in enumerate((*seen.types, *seen.outputs)):
        name = (*seen.node.inputs, *seen.node.outputs)[index]
        if name and (known is None or element_name(known) not in SCALARS or len(known.shape or ()) > AXES):
            return False
    return found[0](seen)


def _floats(seen: Seen) -> bool:
    return seen.are(FLOATS)


# --- element-wise functions -----------------------------------------------------------------------------------------

_FLOAT_NAMES = {
    "Ceil": "ceil", "Cos": "cos", "Erf": "erf", "Exp": "exp", "Floor": "floor", "HardSwish": "hard_swish",
    "Log": "log", "Mish": "mish", "Reciprocal": "reciprocal", "Round": "round", "Sigmoid": "sigmoid", "Sin": "sin",
    "Softplus": "softplus", "Softsign": "softsign", "Sqrt": "sqrt", "Tanh": "tanh",
}  # fmt: skip
# Functions, with the names and defaults of their parameters.
_PARAMETERS: dict[str, tuple[str, dict[str, float]]] = {
    "Elu": ("elu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Selu": ("selu", {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}),
    "QuickGelu": ("quick_gelu", {"alpha": 1.702}),
    "Swish": ("quick_gelu", {"alpha": 1.0}),
}


def _unary(call: NodeCall, function: str, parameters: Sequence[float] = (), dtype: Any = None) -> Array:
    x = call.array(0)
    return call.to.map(function, [x], call.to.new(x.shape, x.dtype if dtype is None else np.dtype(dtype)), parameters)


@lowers(*_FLOAT_NAMES, accepts=_floats)
def _float_function(call: NodeCall) -> Array:
    return _unary(call, FLOAT_FUNCTIONS[_FLOAT_NAMES[call.node.op_type]])


@lowers("QuickGelu", domain=MS, accepts=_floats)
@lowers("Elu", "HardSigmoid", "LeakyRelu", "Selu", "Swish", accepts=_floats)
def _parametric(call: NodeCall) -> Array:
    name, defaults = _PARAMETERS[call.node.op_type]
    return _unary(call, FLOAT_FUNCTIONS[name], [float(call.get(key, value)) for key, value in defaults.items()])


@lowers("Abs", "Neg", "Sign", accepts=lambda seen: seen.are(NUMBERS))
def _any_function(call: NodeCall) -> Array:
    return _unary(call, ANY_FUNCTIONS[call.node.op_type.lower()])


@lowers("Relu", accepts=lambda seen: seen.are(NUMBERS))
def _relu(call: NodeCall) -> Array:
    return _unary(call, "unary::relu" if call.array(0).dtype.kind == "f" else "whole::relu")


@lowers("Not", accepts=lambda seen: seen.are(frozenset({"bool"})))
def _not(call: NodeCall) -> Array:
    return _unary(call, "whole::invert")


@lowers("IsNaN", accepts=_floats)
def _is_nan(call: NodeCall) -> Array:
    return _unary(call, "more::is_nan", dtype=bool)


@lowers("Cast", accepts=lambda seen: True)
def _cast(call: NodeCall) -> Array:
    dtype = DataType(int(call.attributes["to"])).numpy_dtype
    x = call.array(0)
    if dtype == x.dtype:
        return x
    return _unary(call, "whole::truth" if dtype == BOOL else "whole::copy", dtype=dtype)


@lowers("Clip", accepts=lambda seen: seen.are(FLOATS) and seen.is_known(1, 2))
def _clip(call: NodeCall) -> Array:
    least, most = (
        call.get(name, default) if value is None else value.reshape(-1)[0]
        for value, name, default in ((call.known(1), "min", -math.inf), (call.known(2), "max", math.inf))
    )
    return _unary(call, "unary::clip", [float(least), float(most)])


@lowers("Gelu", domain=MS, accepts=_floats)
@lowers("Gelu", accepts=_floats)
def _gelu(call: NodeCall) -> Array:
    by_tanh = call.get("approximate", "none") == "tanh"
    return _unary(call, "unary::gelu_tanh" if by_tanh else "unary::gelu")


@lowers("BiasGelu", domain=MS, accepts=_floats)
@lowers("FastGelu", domain=MS, accepts=_floats)
def _gelu_of_sum(call: NodeCall) -> Array:
    exact = call.node.op_type == "BiasGelu"
    if call.maybe(1) is None:
        return _unary(call, "unary::gelu_tanh")
    return _pair(call, "more::gelu_of_sum" if exact else "more::gelu_tanh_of_sum", call.array(0), call.array(1))


def _pair(call: NodeCall, function: str, a: Array, b: Array, dtype: Any = None) -> Array:
    out = call.to.new(_broadcast(a.shape, b.shape), a.dtype if dtype is None else np.dtype(dtype))
    return call.to.map(function, [a, b], out)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ArrayError(f"shapes {[list(shape) for shape in shapes]} cannot be broadcast to each other") from None


def _function_of_two(name: str, dtype: np.dtype[Any]) -> str:
    return (FLOAT_PAIRS if dtype.kind == "f" else ANY_PAIRS)[name]


_TWO = {"Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide"}


# Before operator set 7, these operators aligned axes differently.
@lowers(*_TWO, accepts=lambda seen: seen.are(NUMBERS) and seen.version >= 7)
def _two(call: NodeCall) -> Array:
    a, b = call.array(0), call.array(1)
    return _pair(call, _function_of_two(_TWO[call.node.op_type], a.dtype), a, b)


@lowers("Pow", accepts=lambda seen: seen.are(FLOATS) and seen.version >= 7)
def _pow(call: NodeCall) -> Array:
    exponent = call.given[1]
    if isinstance(exponent, np.ndarray) and exponent.size == 1 and exponent.ndim <= 1:
        special = {2.0: "whole::square", 3.0: "unary::cube", 0.5: "unary::sqrt", 1.0: "whole::copy"}
        function = special.get(float(exponent.reshape(-1)[0]))
        if function is not None and len(call.array(0).shape) >= exponent.ndim:
            return _unary(call, function)
    return _pair(call, "binary::power", call.array(0), call.array(1))


@lowers("PRelu", accepts=lambda seen: seen.are(FLOATS) and seen.version >= 7)
def _prelu(call: NodeCall) -> Array:
    x = call.array(0)
    return _pair(call, "binary::prelu", x, call.array(1).expanded(x.shape))


_SEVERAL = {"Max": "maximum", "Min": "minimum", "Sum": "add", "Mean": "add"}


@lowers("Max", "Min", accepts=lambda seen: seen.are(NUMBERS) and seen.version >= 8)
@lowers("Sum", "Mean", accepts=lambda seen: seen.are(FLOATS) and seen.version >= 8)
def _several(call: NodeCall) -> Array:
    """Combine the inputs pairwise. In float16, every partial result is float16."""
    found = call.array(0)
    for index in range(1, len(call.given)):
        function = _function_of_two(_SEVERAL[call.node.op_type], found.dtype)
        found = _pair(call, function, found, call.array(index))
    if call.node.op_type == "Mean" and len(call.given) > 1:
        factor = call.upload("", np.asarray(1 / len(call.given), found.dtype))
        found = _pair(call, "binary::multiply", found, factor)
    return found


_COMPARED = {
    "Equal": "equal", "Less": "less", "LessOrEqual": "less_equal", "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
}  # fmt: skip
_LOGIC = {"And": "both", "Or": "either", "Xor": "one"}


@lowers(*_COMPARED, accepts=lambda seen: seen.are(NUMBERS | {"bool"}) and seen.version >= 7)
@lowers(*_LOGIC, accepts=lambda seen: seen.are(frozenset({"bool"})) and seen.version >= 7)
def _compared(call: NodeCall) -> Array:
    name = {**_COMPARED, **_LOGIC}[call.node.op_type]
    return _pair(call, COMPARISONS[name], call.array(0), call.array(1), bool)


@lowers("Where", accepts=lambda seen: seen.dtype(0) == "bool" and seen.are(NUMBERS | {"bool"}, 1, 2))
def _where(call: NodeCall) -> Array:
    parts = [call.array(index) for index in range(3)]
    out = call.to.new(_broadcast(*(part.shape for part in parts)), parts[1].dtype)
    return call.to.map("choose", parts, out)


# --- matmuls --------------------------------------------------------------------------------------------------------


@lowers("MatMul", accepts=_floats)
def _matmul(call: NodeCall) -> Array:
    return linear.product(call.to, call.array(0), call.array(1))


@lowers("FusedMatMul", domain=MS, accepts=_floats)
def _fused_matmul(call: NodeCall) -> Array:
    a, b = (
        _swapped(call.array(index)) if call.get(f"trans{'AB'[index]}", 0) else call.array(index) for index in (0, 1)
    )
    return linear.product(call.to, a, b, Tail(alpha=float(call.get("alpha", 1.0))))


TABLE[MS, "FusedMatMul"] = (
    lambda seen: _floats(seen) and not any(seen.node.integer(f"transBatch{side}", 0) for side in "AB"),
    _fused_matmul,
)


def _swapped(x: Array) -> Array:
    order = list(range(len(x.shape)))
    return x.transposed([*order[:-2], *reversed(order[-2:])])


@lowers("Gemm", accepts=lambda seen: _floats(seen) and seen.version >= 7)
def _gemm(call: NodeCall) -> Array:
    a, b = call.array(0), call.array(1)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ArrayError(f"the operands have shapes {list(a.shape)} and {list(b.shape)}, but both must be matrices")
    a, b = (_swapped(x) if call.get(name, 0) else x for x, name in ((a, "transA"), (b, "transB")))
    beta = float(call.get("beta", 1.0))
    tail = Tail(call.maybe(2) if beta else None, alpha=float(call.get("alpha", 1.0)), beta=beta)
    return linear.product(call.to, a, b, tail)


def _knows_function(seen: Seen) -> bool:
    return str(seen.node.attribute("function", "") or "copy") in linear.FUNCTIONS


@lowers("Linear", domain=OURS, accepts=lambda seen: _floats(seen) and _knows_function(seen))
def _linear(call: NodeCall) -> Array:
    """function(x @ weight + bias) + addend; a node has a function or an addend, not both."""
    x, weight, addend = call.array(0), call.array(1), call.maybe(3)
    shape = (*x.shape[:-1], weight.shape[-1])
    own = addend if addend is not None and addend.shape == shape else None
    function, parameters = str(call.get("function", "") or "copy"), tuple(call.get("parameters", ()) or ())
    tail = Tail(call.maybe(2), own, function=function, parameters=tuple(float(number) for number in parameters))
    out = linear.product(call.to, x, weight, tail)
    return out if addend is None or own is not None else _pair(call, "binary::add", out, addend)


@lowers("DenseAttention", domain=OURS, accepts=_floats)
def _attention(call: NodeCall) -> Array:
    """softmax(scale * query @ keys + bias) @ values."""
    query, keys, values, bias = call.array(0), call.array(1), call.array(2), call.maybe(3)
    scores = linear.product(call.to, query, keys, Tail(alpha=float(call.get("scale", 1.0))))
    if bias is not None:
        scores = scores.expanded(_broadcast(scores.shape, bias.shape))
    zero = bool(call.get("nan_is_zero", 0))
    weights = rows.softmax(call.to, scores, -1, addend=bias, nan_is_zero=zero)
    return linear.product(call.to, weights, values)


_ACTIVATIONS = {
    "": "copy", "Relu": "relu", "Clip": "clip", "Sigmoid": "sigmoid", "Tanh": "tanh", "LeakyRelu": "leaky_relu",
    "HardSigmoid": "hard_sigmoid",
}  # fmt: skip


def _has_images(seen: Seen) -> bool:
    """Return True if the input has one or two spatial axes, and the activation is supported."""
    known = str(seen.node.attribute("activation", "")) in _ACTIVATIONS
    return _floats(seen) and seen.rank(0) in (3, 4) and known and seen.only(0)


@lowers("FusedConv", domain=MS, accepts=_has_images)
@lowers("Conv", accepts=_has_images)
def _conv(call: NodeCall) -> Array:
    x, weight, addend = call.array(0), call.array(1), call.maybe(3)
    if len(x.shape) != len(weight.shape) or len(x.shape) < 3:
        raise ArrayError(f"weights of shape {list(weight.shape)} do not match images of shape {list(x.shape)}")
    window, positions, _ = _window(call, x, weight.shape[2:])
    parameters = tuple(float(number) for number in call.get("activation_params", ()) or ())
    function = _ACTIVATIONS[str(call.get("activation", ""))]
    tail = Tail(call.maybe(2), None if addend is None else _image(call, addend), 1.0, 1.0, function, parameters)
    groups = int(call.get("group", 1))
    out = linear.convolution(call.to, _image(call, x), _image(call, weight), window, positions, groups, tail)
    return _like(call, out, x)


def _image(call: NodeCall, x: Array) -> Array:
    """Return x as [n, channels, height, width]; a single spatial axis becomes the width, with height 1."""
    return x if len(x.shape) == 4 else call.to.reshaped(x, (*x.shape[:2], 1, x.shape[2]))


def _like(call: NodeCall, out: Array, x: Array) -> Array:
    return out if len(x.shape) == 4 else call.to.reshaped(out, (*out.shape[:2], out.shape[3]))


def _window(
    call: NodeCall, x: Array, kernel: Sequence[int], *, may_exceed: bool = False
) -> tuple[WindowShape, tuple[int, int], tuple[int, int]]:
    """Return the window shape, the number of window positions, and the padding at the ends."""
    found = WindowSpec(call.spec(), may_exceed=may_exceed).windows(x.shape[2:], kernel)

    def pair(numbers: Sequence[int], filler: int) -> tuple[int, int]:
        return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else (filler, int(numbers[0]))

    window = WindowShape(pair(found.kernel, 1), pair(found.strides, 1), pair(found.dilations, 1), pair(found.begins, 0))
    return window, pair(found.counts, 1), pair(found.ends, 0)


@lowers("MaxPool", "AveragePool", accepts=_has_images)
def _pool(call: NodeCall) -> Array:
    x = call.array(0)
    window, positions, ends = _window(call, x, call.attributes["kernel_shape"], may_exceed=True)
    kind = "Largest" if call.node.op_type == "MaxPool" else "Mean"
    counted = bool(call.get("count_include_pad", 0))
    return _like(call, linear.pooled(call.to, _image(call, x), kind, window, positions, ends, counted), x)


@lowers("GlobalAveragePool", "GlobalMaxPool", accepts=lambda seen: _floats(seen) and seen.rank(0) > 2)
def _global_pool(call: NodeCall) -> Array:
    x = call.array(0)
    kind = "mean" if call.node.op_type == "GlobalAveragePool" else "max"
    return rows.reduced(call.to, x, kind, range(2, len(x.shape)), keep=True)


# --- rows -----------------------------------------------------------------------------------------------------------


@lowers("Softmax", "LogSoftmax", accepts=_floats)
def _softmax(call: NodeCall) -> Array:
    x, logarithm = call.array(0), call.node.op_type == "LogSoftmax"
    if call.version >= 13:
        return rows.softmax(call.to, x, int(call.get("axis", -1)), logarithm=logarithm)
    axis = x.axis(int(call.get("axis", 1)))  # softmax runs over this axis and all axes after it together
    flat = call.to.reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return call.to.reshaped(rows.softmax(call.to, flat, -1, logarithm=logarithm), x.shape)


@lowers("LayerNormalization", accepts=lambda seen: _floats(seen) and seen.only(0) and _is_plain_norm(seen))
@lowers("SimplifiedLayerNormalization", accepts=lambda seen: _floats(seen) and seen.only(0))
@lowers("RMSNormalization", accepts=lambda seen: _floats(seen) and seen.only(0))
@lowers("SimplifiedLayerNormalization", domain=MS, accepts=lambda seen: _floats(seen) and seen.only(0))
def _layer_norm(call: NodeCall) -> Array:
    x = call.array(0)
    width = math.prod(x.shape[x.axis(int(call.get("axis", -1))) :])
    centred = call.node.op_type == "LayerNormalization"
    out, _ = rows.normalised(
        call.to, x, width, call.array(1), call.maybe(2), float(call.get("epsilon", 1e-5)), centred=centred
    )
    return out


def _is_plain_norm(seen: Seen) -> bool:
    return seen.node.integer("stash_type", 1) == 1


@lowers("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MS,
        accepts=lambda seen: _floats(seen) and seen.only(0, 3))  # fmt: skip
def _skip_norm(call: NodeCall) -> list[Array]:
    centred = call.node.op_type == "SkipLayerNormalization"
    x, inputs = call.array(0), (3, 4) if centred else (-1, 3)
    wants = len(call.node.outputs) > 3 and bool(call.node.outputs[3])
    out, total = rows.normalised(
        call.to, x, x.shape[-1], call.array(2), call.maybe(inputs[0]) if centred else None,
        float(call.get("epsilon", 1e-12)), centred=centred, skip=call.array(1), input_bias=call.maybe(inputs[1]),
        wants_total=wants,
    )  # fmt: skip
    return [out, out, out, total] if total is not None else [out]


@lowers("InstanceNormalization", accepts=lambda seen: _floats(seen) and seen.rank(0) > 2 and seen.version >= 6)
def _instance_norm(call: NodeCall) -> Array:
    x = call.array(0)
    out, _ = rows.normalised(
        call.to, x, math.prod(x.shape[2:]), call.array(1), call.array(2), float(call.get("epsilon", 1e-5)),
        channels=x.shape[1],
    )  # fmt: skip
    return out


def _is_inference(seen: Seen) -> bool:
    node = seen.node
    plain = not node.integer("training_mode", 0) and node.integer("spatial", 1) == 1 and seen.version >= 7
    return seen.are(FLOATS, 0) and plain and seen.only(0) and seen.is_known(1, 2, 3, 4) and seen.rank(0) > 1


@lowers("BatchNormalization", accepts=_is_inference)
def _batch_norm(call: NodeCall) -> Array:
    """Compute the factor and shift of each channel on the host, because they depend only on constants."""
    x = call.array(0)
    scale, bias, mean, variance = (np.asarray(call.known(index), np.float64) for index in range(1, 5))
    factor = scale / np.sqrt(variance + float(call.get("epsilon", 1e-5)))
    shape = (-1, *[1] * (len(x.shape) - 2))
    named = {"factor": factor, "shift": bias - mean * factor}
    parts = [
        call.upload(f"{call.node.output(0)}\0{name}", value.astype(x.dtype).reshape(shape))
        for name, value in named.items()
    ]
    return call.to.map("scale_shift", [x, *parts], call.to.new(x.shape, x.dtype))


_REDUCED = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod"}


@lowers(*_REDUCED, accepts=lambda seen: seen.are(NUMBERS, 0) and seen.is_known(1))
def _reduce(call: NodeCall) -> Array:
    x, axes = call.array(0), call.whole_numbers(1, "axes")
    if not axes:
        if call.get("noop_with_empty_axes", 0):
            return x
        axes = list(range(len(x.shape)))
    return rows.reduced(call.to, x, _REDUCED[call.node.op_type], axes, keep=bool(call.get("keepdims", 1)))


@lowers("Gather", accepts=lambda seen: seen.dtype(1) in INTEGERS)
def _gather(call: NodeCall) -> Array:
    return call.status.gathered(call.array(0), call.array(1), int(call.get("axis", 0)), call.label)


@lowers("GatherND", accepts=lambda seen: seen.dtype(1) in INTEGERS)
def _gather_nd(call: NodeCall) -> Array:
    return call.status.gathered_by_tuples(call.array(0), call.array(1), int(call.get("batch_dims", 0)), call.label)


def _is_plain_pad(seen: Seen) -> bool:
    constant = str(seen.node.attribute("mode", "constant")) == "constant"
    return constant and seen.version >= 11 and seen.is_known(1, 2, 3)


@lowers("Pad", accepts=_is_plain_pad)
def _pad(call: NodeCall) -> Array:
    x, pads, axes = call.array(0), call.whole_numbers(1, "pads") or [], call.whole_numbers(3, "axes")
    which = [x.axis(axis) for axis in (range(len(x.shape)) if axes is None else axes)]
    if len(pads) != 2 * len(which):
        raise ArrayError(f"{len(pads)} pads are given for {len(which)} axes; two pads per axis are needed")
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    for index, axis in enumerate(which):
        before[axis], after[axis] = pads[index], pads[index + len(which)]
    filler = call.known(2)
    return rows.surrounded(call.to, x, before, after, np.zeros(1) if filler is None else filler)


# --- shapes and indices ---------------------------------------------------------------------------------------------


@lowers("Identity", accepts=lambda seen: True)
def _identity(call: NodeCall) -> Array:
    return call.array(0)


@lowers("Reshape", accepts=lambda seen: seen.version >= 5 and seen.is_known(1))
def _reshape(call: NodeCall) -> Array:
    x, wanted = call.array(0), call.whole_numbers(1, "shape") or []
    zero = bool(call.get("allowzero", 0))
    if not zero and any(size == 0 and axis >= len(x.shape) for axis, size in enumerate(wanted)):
        raise ArrayError(f"an array of shape {list(x.shape)} cannot be reshaped to {wanted}")
    sizes = [x.shape[axis] if size == 0 and not zero else size for axis, size in enumerate(wanted)]
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        if (x.size % rest if rest else x.size) != 0:
            raise ArrayError(f"an array of shape {list(x.shape)} cannot be reshaped to {wanted}")
        sizes[sizes.index(-1)] = x.size // rest if rest else 0
    return call.to.reshaped(x, sizes)


@lowers("Flatten", accepts=lambda seen: True)
def _flatten(call: NodeCall) -> Array:
    x, axis = call.array(0), int(call.get("axis", 1))
    axis += len(x.shape) if axis < 0 else 0
    return call.to.reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@lowers("Squeeze", accepts=lambda seen: seen.is_known(1))
def _squeeze(call: NodeCall) -> Array:
    x, axes = call.array(0), call.whole_numbers(1, "axes")
    which = {x.axis(axis) for axis in axes} if axes is not None else {i for i, size in enumerate(x.shape) if size == 1}
    if any(x.shape[axis] != 1 for axis in which):
        raise ArrayError(f"axes {sorted(which)} of an array of shape {list(x.shape)} are not all of size 1")
    kept = [axis for axis in range(len(x.shape)) if axis not in which]
    return replace(x, shape=tuple(x.shape[i] for i in kept), strides=tuple(x.strides[i] for i in kept))


@lowers("Unsqueeze", accepts=lambda seen: seen.is_known(1))
def _unsqueeze(call: NodeCall) -> Array:
    x, axes = call.array(0), call.whole_numbers(1, "axes") or []
    rank = len(x.shape) + len(axes)
    which = {axis % rank for axis in axes}
    if len(which) != len(axes) or any(not -rank <= axis < rank for axis in axes):
        raise ArrayError(f"the axes {axes} are repeated or out of range for an array of shape {list(x.shape)}")
    shape, strides = iter(x.shape), iter(x.strides)
    pairs = [(1, 0) if axis in which else (next(shape), next(strides)) for axis in range(rank)]
    return replace(x, shape=tuple(size for size, _ in pairs), strides=tuple(stride for _, stride in pairs))


@lowers("Transpose", accepts=lambda seen: True)
def _transpose(call: NodeCall) -> Array:
    x = call.array(0)
    return x.transposed(call.get("perm", None) or range(len(x.shape))[::-1])


@lowers("Expand", accepts=lambda seen: seen.is_known(1))
def _expand(call: NodeCall) -> Array:
    x, wanted = call.array(0), call.whole_numbers(1, "shape") or []
    return x.expanded(_broadcast(x.shape, tuple(wanted)))


@lowers("Concat", accepts=lambda seen: seen.are(frozenset(SCALARS)) and seen.version >= 4)
def _concat(call: NodeCall) -> Array:
    return call.to.concatenated([call.array(index) for index in range(len(call.given))], int(call.attributes["axis"]))


@lowers("Slice", accepts=lambda seen: seen.is_known(1, 2, 3, 4))
def _slice(call: NodeCall) -> Array:
    x = call.array(0)
    starts, ends, axes = (call.whole_numbers(i, name) for i, name in ((1, "starts"), (2, "ends"), (3, "axes")))
    steps = call.whole_numbers(4, "steps") or [1] * len(starts or ())
    for start, end, axis, step in zip(starts or (), ends or (), axes or range(len(starts or ())), steps, strict=True):
        if step == 0:
            raise ArrayError("a step cannot be 0")
        which = x.axis(axis)
        chosen = range(*slice(start, end, step).indices(x.shape[which]))
        x = x.part(which, chosen.start, step, len(chosen))
    return x


@lowers("Split", accepts=lambda seen: seen.is_known(1))
def _split(call: NodeCall) -> list[Array]:
    x, count = call.array(0), len(call.node.outputs)
    axis = x.axis(int(call.get("axis", 0)))
    sizes = call.whole_numbers(1, "split")
    if sizes is None:
        each = -(-x.shape[axis] // count)
        sizes = [min(each, max(x.shape[axis] - index * each, 0)) for index in range(count)]
        if "num_outputs" not in call.attributes and x.shape[axis] % count:
            raise ArrayError(
                f"axis {axis} of an array of shape {list(x.shape)} cannot be split into {count} equal parts"
            )
    if sum(sizes) != x.shape[axis] or len(sizes) != count:
        raise ArrayError(
            f"axis {axis} of an array of shape {list(x.shape)} cannot be split into parts of the sizes {sizes}"
        )
    return [x.part(axis, sum(sizes[:index]), 1, size) for index, size in enumerate(sizes)]
