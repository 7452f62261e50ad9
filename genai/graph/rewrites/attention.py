"""Attention that exporters write out in products and a softmax becomes one node."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Graph, Model, Node, make_node
from ..types import TensorType
from .base import Level, fuse_nodes
from .patterns import is_float32, is_number, made_by, number, only_user

DOMAIN, OP_TYPE = "genai", "DenseAttention"


@dataclass(frozen=True)
class _Scores:
    """scale * query @ keys + bias: what goes into the softmax. keys: [..., size, S]; bias "" = none."""

    query: str
    keys: str
    bias: str
    scale: float


class FuseAttention:
    """softmax(scale * query @ keys + bias) @ values -> genai::DenseAttention(query, keys, values, bias).

    Factors may stand at the queries, the keys or their product. A softmax whose NaN become 0 (rows that a mask hides
    whole, as torch writes them) is recognised, too.
    """

    name = "fuse_attention"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        # Before version 13 a Softmax without an axis went over all axes from the second on.
        default_axis = -1 if (model.opset_version() or 0) >= 13 else 1
        return fuse_nodes(model, lambda graph, node: _fuse(graph, node, default_axis), DOMAIN)


def _fuse(graph: Graph, product: Node, default_axis: int) -> bool:
    if product.key != ("", "MatMul"):
        return False
    softmax, nan_is_zero = _softmax(graph, product.input(0), default_axis)
    if softmax is None or not _is_4d_float(graph, softmax.output(0)):
        return False
    scores = _scores(graph, softmax.input(0))
    if scores is None or not all(_is_4d_float(graph, name) for name in (scores.query, scores.keys, product.input(1))):
        return False
    fused = make_node(
        OP_TYPE,
        [scores.query, scores.keys, product.input(1), *([scores.bias] if scores.bias else [])],
        list(product.outputs),
        domain=DOMAIN,
        name=product.name,
        scale=scores.scale,
        nan_is_zero=int(nan_is_zero),
    )
    graph.replace_node(product, fused)
    return True


def _softmax(graph: Graph, name: str, default_axis: int) -> tuple[Node | None, bool]:
    """The Softmax over the last axis behind a value that nothing else uses; and whether its NaN were made 0."""
    where = made_by(graph, name, "Where")
    if where is not None:
        softmax, test = made_by(graph, where.input(2), "Softmax"), made_by(graph, where.input(0), "IsNaN")
        fits = (
            softmax is not None
            and test is not None
            and test.input(0) == softmax.output(0)
            and is_number(graph, where.input(1), 0.0)
            and _users(graph, softmax.output(0)) == {test, where}
            and only_user(graph, test.output(0)) is where
        )
    else:
        softmax, fits = made_by(graph, name, "Softmax"), True
    if softmax is None or not fits or only_user(graph, name) is None:
        return None, False
    return (softmax if softmax.attribute("axis", default_axis) in (-1, 3) else None), where is not None


def _users(graph: Graph, name: str) -> set[Node]:
    return set() if graph.is_output(name) else set(graph.consumers(name))


def _scores(graph: Graph, name: str) -> _Scores | None:
    if only_user(graph, name) is None:
        return None
    addition = made_by(graph, name, "Add")
    if addition is None:
        return _product(graph, name, "")
    for inner, bias in (tuple(addition.inputs), tuple(reversed(addition.inputs))):
        found = _product(graph, inner, bias) if is_float32(graph, bias) else None
        if found is not None:
            return found
    return None


def _product(graph: Graph, name: str, bias: str) -> _Scores | None:
    inner, scale = _without_factor(graph, name)
    product = made_by(graph, inner, "MatMul")
    if product is None or only_user(graph, inner) is None or only_user(graph, name) is None:
        return None
    (query, first), (keys, second) = (_without_factor(graph, source) for source in product.inputs)
    return _Scores(query, keys, bias, scale * first * second)


def _without_factor(graph: Graph, name: str) -> tuple[str, float]:
    """What a value is a constant multiple of, and the factor; (name, 1) where it is none."""
    node = made_by(graph, name, "Mul") or made_by(graph, name, "Div")
    if node is None:
        return name, 1.0
    factor = number(graph, node.input(1))
    if node.op_type == "Div":
        return (node.input(0), 1.0 / factor) if factor else (name, 1.0)
    if factor is not None:
        return node.input(0), factor
    factor = number(graph, node.input(0))
    return (name, 1.0) if factor is None else (node.input(1), factor)


def _is_4d_float(graph: Graph, name: str) -> bool:
    known = graph.type_of(name)
    rank = len(known.shape) if isinstance(known, TensorType) and known.shape is not None else None
    return rank == 4 and is_float32(graph, name)
