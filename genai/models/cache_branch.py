"""Decoders with two branches in one graph: one for the prompt, and one for tokens with a past.

Older versions of optimum merged the two graphs of a decoder into one graph with an If. A branch that accepts a past of
length 0 serves prompts also, so the graph is reduced to this branch.
"""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedModelError
from ..onnx.ir import Graph, Node, OnnxTensor, make_node

BRANCH_INPUT = "use_cache_branch"
"""The input that selects the branch with a past."""


def has_branches(graph: Graph) -> bool:
    """Return True if the graph has an input that selects one of two branches."""
    return any(value.name == BRANCH_INPUT for value in graph.inputs)


def keep_branch(graph: Graph, *, with_past: bool = True) -> None:
    """Replace each If that the input selects with the nodes of one branch, and remove the input.

    Raises:
        UnsupportedModelError: no If uses the input, or the two branches have different outputs.
    """
    chosen = [node for node in graph.nodes if node.key == ("", "If") and node.input(0) == BRANCH_INPUT]
    if not chosen:
        raise UnsupportedModelError(
            f"the graph's input {BRANCH_INPUT!r} does not select a branch",
            "an If with this input as its condition is expected",
            "export the model again, with a current version of its exporter",
        )
    for node in chosen:
        _check_outputs(node)
        _inline(graph, node, node.attribute("then_branch" if with_past else "else_branch"))
    graph.inputs[:] = [value for value in graph.inputs if value.name != BRANCH_INPUT]
    graph.initializers.pop(BRANCH_INPUT, None)
    graph.invalidate()
    if graph.consumers(BRANCH_INPUT):
        graph.add_initializer(OnnxTensor.from_array(BRANCH_INPUT, np.full((1,), with_past)))


def _check_outputs(node: Node) -> None:
    branches = [node.attribute(name) for name in ("then_branch", "else_branch")]
    if any(len(branch.outputs) != len(node.outputs) for branch in branches):
        counts = " and ".join(str(len(branch.outputs)) for branch in branches)
        raise UnsupportedModelError(
            f"the branches of the If {node.name!r} have {counts} outputs",
            f"both must compute the {len(node.outputs)} outputs of the node",
            "export the model again",
        )


def _inline(graph: Graph, node: Node, branch: Graph) -> None:
    """Insert the nodes of a branch in place of its If."""
    outer = {value.name for value in graph.inputs} | set(graph.initializers) | set(graph.sparse_initializers)
    outer |= {name for other in graph.nodes for name in other.outputs if name}
    defined = [name for inner in branch.nodes for name in inner.outputs if name]
    for name in (*defined, *branch.initializers, *branch.sparse_initializers):
        if name in outer:
            branch.rename(name, graph.fresh_name(name))
    names: dict[str, str] = {}
    copies = []
    computed = {name for inner in branch.nodes for name in inner.outputs if name}
    for value, name in zip([value.name for value in branch.outputs], node.outputs, strict=True):
        if name and value in computed and value not in names:
            branch.rename(value, name)
            names[value] = name
        elif name:  # a captured value, a constant, or a value that is already another output
            copies.append(make_node("Identity", [names.get(value, value)], [name]))
    graph.initializers.update(branch.initializers)
    graph.sparse_initializers.update(branch.sparse_initializers)
    graph.values.update({name: value for name, value in branch.values.items() if name not in graph.values})
    graph.replace_node(node, *branch.nodes, *copies)
