"""Row nodes put together where one call does the work of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from .base import RowNode
from .nodes import Gate
from .products import Product, fuse_gate


def fuse(nodes: Sequence[RowNode], keep: Collection[str]) -> list[RowNode]:
    """The nodes, with two products behind a gate made one.

    Args:
        keep: values that are read elsewhere, so that they must exist.
    """
    uses = Counter(name for node in nodes for name in node.inputs)
    uses.update(list(keep))
    makers = {name: node for node in nodes for name in node.outputs}
    fused: dict[int, RowNode] = {}
    gone: set[int] = set()
    for node in nodes:
        if isinstance(node, Gate):
            gate, up = makers.get(node.gate), makers.get(node.up)
            private = uses[node.gate] == uses[node.up] == 1
            if private and isinstance(gate, Product) and isinstance(up, Product):
                product = fuse_gate(gate, up, node.out, node.activation)
                if product is not None:
                    fused[id(node)] = product
                    gone |= {id(gate), id(up)}
    return [fused.get(id(node), node) for node in nodes if id(node) not in gone]
