"""Fuses attention, GELU and layer normalisation that exporters decompose into many nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..onnx.ir import Graph, Node, OnnxModel
from ..onnx.node import MS, OURS
from ..onnx.types import TensorType
from . import base
from .convolutions import clip_limits


@dataclass(frozen=True)
class _Scores:
    """The input of the softmax, scale * query @ keys + bias. keys: [..., size, S]; bias: "" = none."""

    query: str
    keys: str
    bias: str
    scale: float


@base.graph_rule(base.Level.EXTENDED, domain=OURS)
def fuse_attention(model: OnnxModel, graph: Graph) -> int:
    """softmax(scale * query @ keys + bias) @ values -> genai::DenseAttention(query, keys, values, bias).

    The queries, the keys or their product may be scaled. A softmax whose NaN are replaced by 0 also matches: torch
    exports it for rows that a mask hides completely.
    """
    # Before version 13, a Softmax without an axis normalised over axis 1 and all axes after it.
    default_axis = -1 if (model.opset_version() or 0) >= 13 else 1
    return sum(_fuse(graph, node, default_axis) for node in list(graph.nodes))


def _fuse(graph: Graph, product: Node, default_axis: int) -> bool:
    if product.key != ("", "MatMul"):
        return False
    softmax, nan_is_zero = _softmax(graph, product.input(0), default_axis)
    if softmax is None or not _is_4d_float(graph, softmax.output(0)):
        return False
    scores = _scores(graph, softmax.input(0))
    if scores is None or not all(_is_4d_float(graph, name) for name in (scores.query, scores.keys, product.input(1))):
        return False
    if _is_one_row(graph, scores.query):
        return False
    inputs = [scores.query, scores.keys, product.input(1), *([scores.bias] if scores.bias else [])]
    attributes: dict[str, Any] = {"scale": scores.scale, "nan_is_zero": int(nan_is_zero)}
    return base.replaced(graph, product, "DenseAttention", inputs, domain=OURS, **attributes)


def _is_one_row(graph: Graph, query: str) -> bool:
    """Return True if a query always has one row: the kernel packs keys, which takes longer than two small products."""
    known = graph.type_of(query)
    return isinstance(known, TensorType) and known.shape is not None and known.shape[-2] == 1


_NAN_TO_ZERO = base.Pattern("Where", base.Pattern("IsNaN", "weights", once=True, name="test"), 0.0, "weights")


def _softmax(graph: Graph, name: str, default_axis: int) -> tuple[Node | None, bool]:
    """Return the Softmax over the last axis that computes a single-use value, and True if its NaN are replaced by 0."""
    where = base.made_by(graph, name, "Where")
    guarded = base.find(graph, where, _NAN_TO_ZERO) if where is not None else {}
    softmax = base.made_by(graph, guarded["weights"] if guarded else name, "Softmax")
    fits = where is None or (
        bool(guarded)
        and not graph.is_output(guarded["weights"])
        and {*graph.consumers(guarded["weights"])} == {where, graph.producer(guarded["test"])}
    )
    if softmax is None or not fits or base.only_user(graph, name) is None:
        return None, False
    return (softmax if softmax.attribute("axis", default_axis) in (-1, 3) else None), where is not None


def _scores(graph: Graph, name: str) -> _Scores | None:
    if base.only_user(graph, name) is None:
        return None
    addition = base.made_by(graph, name, "Add")
    if addition is None:
        return _product(graph, name, "")
    for inner, bias in base.both_orders(addition):
        scores = _product(graph, inner, bias) if base.is_float32(graph, bias) else None
        if scores is not None:
            return scores
    return None


def _product(graph: Graph, name: str, bias: str) -> _Scores | None:
    inner, scale = base.without_factors(graph, name)
    product = base.made_by(graph, inner, "MatMul")
    if product is None or base.only_user(graph, inner) is None or base.only_user(graph, name) is None:
        return None
    (query, first), (keys, second) = (base.without_factors(graph, source) for source in product.inputs)
    return _Scores(query, keys, bias, scale * first * second)


def _is_4d_float(graph: Graph, name: str) -> bool:
    known = graph.type_of(name)
    rank = len(known.shape) if isinstance(known, TensorType) and known.shape is not None else None
    return rank == 4 and base.is_float32(graph, name)


def _halved(curve: base.Pattern) -> tuple[base.Pattern, ...]:
    """Return patterns of x * 0.5 * (1 + curve) for all orders of the factors."""
    shifted = base.Pattern("Add", curve, 1.0, once=True)
    return (
        base.Pattern("Mul", base.Pattern("Mul", "x", 0.5), shifted),
        base.Pattern("Mul", base.Pattern("Mul", "x", shifted, once=True), 0.5),
        base.Pattern("Mul", base.Pattern("Mul", shifted, 0.5, once=True), "x"),
    )


_OVER_ROOT = (base.Pattern("Div", "x", math.sqrt(2)), base.Pattern("Mul", "x", math.sqrt(0.5)))
_CUBIC = base.Pattern("Add", "x", base.Pattern("Mul", base.Pattern("Pow", "x", 3.0), 0.044715))
_GELUS = {
    "Gelu": _halved(base.Pattern("Erf", _OVER_ROOT, once=True)),
    "FastGelu": _halved(base.Pattern("Tanh", base.Pattern("Mul", _CUBIC, math.sqrt(2 / math.pi)), once=True)),
}


@base.node_rule(base.Level.EXTENDED, ("", "Mul"), domain=MS)
def fuse_gelu(graph: Graph, end: Node) -> bool:
    """x * 0.5 * (1 + Erf(x / sqrt 2)), with the factors in any order -> com.microsoft::Gelu(x), for float32.

    With Tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)) instead of Erf -> com.microsoft::FastGelu(x).
    """
    for op_type, patterns in _GELUS.items():
        for pattern in patterns:
            match = base.find(graph, end, pattern)
            if match and base.is_float32(graph, match["x"]):
                return base.replaced(graph, end, op_type, [match["x"]], domain=MS)
    return False


_SIGMOIDS = (
    base.Pattern("Mul", "x", base.Pattern("Sigmoid", "x", once=True)),
    base.Pattern("Mul", "x", base.Pattern("Sigmoid", base.Pattern("Mul", "x", "alpha", once=True), once=True)),
)


@base.node_rule(base.Level.EXTENDED, ("", "Mul"), domain=MS)
def fuse_silu(graph: Graph, end: Node) -> bool:
    """x * Sigmoid(alpha * x) with a constant alpha, or without it -> com.microsoft::QuickGelu(x), for float32."""
    for pattern in _SIGMOIDS:
        match = base.find(graph, end, pattern)
        alpha = base.number(graph, match["alpha"]) if "alpha" in match else 1.0
        if match and alpha is not None and base.is_float32(graph, match["x"]):
            return base.replaced(graph, end, "QuickGelu", [match["x"]], domain=MS, alpha=alpha)
    return False


@base.node_rule(base.Level.EXTENDED, ("", "Mul"), ("", "Div"), domain=OURS)
def fuse_hard_swish(graph: Graph, end: Node) -> bool:
    """x * Clip(x + 3, 0, 6) / 6, or x * HardSigmoid(x) with alpha = 1/6 -> genai::HardSwish(x), for float32."""
    if len(end.inputs) != 2:
        return False
    whole = _sixth_of(graph, end)
    inner = base.made_by(graph, whole, "Mul") if whole and base.only_user(graph, whole) is not None else None
    product, factor = (end, _hard_sigmoid_of) if inner is None else (inner, _clipped_of)
    if product.op_type != "Mul":
        return False
    for x, other in base.both_orders(product):
        if factor(graph, other) == x and base.is_float32(graph, x):
            return base.replaced(graph, end, "HardSwish", [x], domain=OURS)
    return False


def _sixth_of(graph: Graph, node: Node) -> str | None:
    """Return y if a node computes y / 6, else None."""
    if node.op_type == "Div":
        return node.inputs[0] if base.is_number(graph, node.inputs[1], 6.0) else None
    return next((y for y, factor in base.both_orders(node) if base.is_number(graph, factor, 1 / 6)), None)


def _hard_sigmoid_of(graph: Graph, name: str) -> str | None:
    """Return x if a value that one node uses is Clip(x + 3, 0, 6) / 6, else None."""
    node = graph.producer(name)
    if node is None or node.domain or base.only_user(graph, name) is None:
        return None
    if node.op_type == "HardSigmoid":
        alpha, beta = float(node.attribute("alpha", 0.2)), float(node.attribute("beta", 0.5))
        return node.inputs[0] if abs(alpha - 1 / 6) < 1e-4 and beta == 0.5 else None
    sixth = _sixth_of(graph, node) if node.op_type in ("Mul", "Div") else None
    return None if sixth is None else _clipped_of(graph, sixth)


def _clipped_of(graph: Graph, name: str) -> str | None:
    """Return x if a value that one node uses is Clip(x + 3, 0, 6), else None."""
    clip = base.made_by(graph, name, "Clip")
    if clip is None or base.only_user(graph, name) is None or clip_limits(graph, clip) != [0.0, 6.0]:
        return None
    sum_ = base.made_by(graph, clip.inputs[0], "Add")
    if sum_ is None or base.only_user(graph, clip.inputs[0]) is None:
        return None
    return next((x for x, three in base.both_orders(sum_) if base.is_number(graph, three, 3.0)), None)


_CENTRED = base.Pattern("Sub", "x", base.Pattern("ReduceMean", "x", name="mean"), name="centred")
_SQUARE = (base.Pattern("Pow", "centred", 2.0), base.Pattern("Mul", "centred", "centred"))
_DEVIATION = base.Pattern("Sqrt", base.Pattern("Add", base.Pattern("ReduceMean", _SQUARE, name="variance"), "epsilon"))
_SCALED = base.Pattern("Mul", base.Pattern("Div", _CENTRED, _DEVIATION, once=True), "scale", once=True)


@base.node_rule(base.Level.EXTENDED, ("", "Add"), since=17)
def fuse_layer_norm(graph: Graph, end: Node) -> bool:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ^ 2) + epsilon) * scale + bias over the last axis -> LayerNormalization.

    Scale and bias must be constant vectors. LayerNormalization requires operator set 17.
    """
    match = base.find(graph, end, base.Pattern("Add", _SCALED, "bias"))
    if not match or not base.is_float32(graph, match["x"]):
        return False
    epsilon = base.number(graph, match["epsilon"])
    tensors = [graph.constant_tensor(match[name]) for name in ("scale", "bias")]
    if epsilon is None or any(tensor is None or len(tensor.shape) != 1 for tensor in tensors):
        return False
    if not all(is_along_last_axis(graph, match[name]) for name in ("mean", "variance")):
        return False
    inputs = [match[name] for name in ("x", "scale", "bias")]
    return base.replaced(graph, end, "LayerNormalization", inputs, axis=-1, epsilon=epsilon)


def is_along_last_axis(graph: Graph, name: str) -> bool:
    """Return True if a mean reduces only its last axis, with keepdims."""
    mean = graph.producer(name)
    if mean is None or not int(mean.attribute("keepdims", 1)):
        return False
    axes = mean.attribute("axes")
    if axes is None and mean.input(1):
        constant = graph.constant(mean.input(1))
        axes = None if constant is None else constant.reshape(-1).tolist()
    return axes is not None and [int(axis) for axis in axes] == [-1]
