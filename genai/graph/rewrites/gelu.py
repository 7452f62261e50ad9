"""GELU, spelled out by exporters in its exact form or by tanh, becomes one node."""

from __future__ import annotations

import math

from ..ir import Graph, Model, Node
from .base import Level, fuse_nodes
from .patterns import is_float32, is_number, made_by, only_user, other_input

MS = "com.microsoft"


class FuseGelu:
    """x * 0.5 * (1 + Erf(x / sqrt 2)), in any order of the products -> com.microsoft::Gelu(x), for float32.

    With Tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)) in place of Erf -> com.microsoft::FastGelu(x).
    """

    name = "fuse_gelu"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse, MS)


_FORMS = {("", "Erf"): "Gelu", ("", "Tanh"): "FastGelu"}


def _fuse(graph: Graph, curve: Node) -> bool:
    """Follow the chain down from an Erf or Tanh node; replace its end."""
    if curve.key not in _FORMS or not is_float32(graph, curve.input(0)):
        return False
    argument = curve.input(0)
    x = _divided_by_sqrt_2(graph, argument) if curve.op_type == "Erf" else _under_tanh(graph, argument)
    plus = only_user(graph, curve.output(0))
    if x is None or plus is None or plus.key != ("", "Add"):
        return False
    one = other_input(plus, curve.output(0))
    if one is None or not is_number(graph, one, 1.0):
        return False
    end = _product_with(graph, plus.output(0), x)
    if end is None:
        return False
    graph.replace_node(end, Node(_FORMS[curve.key], [x], list(end.outputs), MS, end.name))
    return True


def _divided_by_sqrt_2(graph: Graph, name: str) -> str | None:
    """The x of a value that is x / sqrt 2."""
    division = made_by(graph, name, "Div")
    if division is not None and is_number(graph, division.input(1), math.sqrt(2)):
        return division.input(0)
    return _scaled_by(graph, name, math.sqrt(0.5))


def _under_tanh(graph: Graph, name: str) -> str | None:
    """The x of a value that is sqrt(2 / pi) * (x + 0.044715 * x ** 3)."""
    total = made_by(graph, _scaled_by(graph, name, math.sqrt(2 / math.pi)) or "", "Add")
    if total is None:
        return None
    for x, cubic in (tuple(total.inputs), tuple(reversed(total.inputs))):
        power = made_by(graph, _scaled_by(graph, cubic, 0.044715) or "", "Pow")
        if power is not None and power.input(0) == x and is_number(graph, power.input(1), 3.0):
            return x
    return None


def _scaled_by(graph: Graph, name: str, factor: float) -> str | None:
    """What is multiplied by this number to give a value, or None."""
    product = made_by(graph, name, "Mul")
    if product is not None:
        for value, number in (tuple(product.inputs), tuple(reversed(product.inputs))):
            if is_number(graph, number, factor):
                return value
    return None


def _product_with(graph: Graph, name: str, x: str) -> Node | None:
    """The node whose result is 0.5 * x * name, or None."""
    first = only_user(graph, name)
    other = None if first is None or first.key != ("", "Mul") else other_input(first, name)
    if first is None or other is None:
        return None
    if _is_half_of(graph, other, x):
        return first
    second = only_user(graph, first.output(0))
    rest = None if second is None or second.key != ("", "Mul") else other_input(second, first.output(0))
    if rest is None:
        return None
    if other == x and is_number(graph, rest, 0.5):
        return second
    return second if rest == x and is_number(graph, other, 0.5) else None


def _is_half_of(graph: Graph, name: str, x: str) -> bool:
    product = made_by(graph, name, "Mul")
    factor = None if product is None else other_input(product, x)
    return factor is not None and is_number(graph, factor, 0.5)
