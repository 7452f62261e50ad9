"""Which nodes are quantised: by operator, by name, and never what is not there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...errors import GraphError, InputError, NotSupportedYetError, OptionError, did_you_mean
from ...onnx.ir import Graph, Node, OnnxModel
from ...onnx.node import MS
from .operator_rules import ELSEWHERE, STATIC_OPERATORS

_QUANTISED = frozenset(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul QLinearConv".split()
)


def require_float_model(model: OnnxModel, opset: int, why: str) -> None:
    """Raise unless a model is still to be quantised, and its operator set knows how.

    Args:
        opset: the oldest version that will do.
        why: what came with that version.

    Raises:
        InputError: it is quantised already.
        GraphError: its operator set is older.
    """
    for graph in model.graphs():
        for node in graph.nodes:
            if node.op_type in _QUANTISED or (node.key[0] == MS and node.op_type.startswith("QLinear")):
                raise InputError(
                    f"the model is quantised already: node {node.name!r} is a {node.op_type}",
                    "quantising what was rounded before rounds it twice",
                    "give the float model that it was made from",
                )
    version = model.opset_version() or 0
    if version < opset:
        raise GraphError(
            f"the model is of operator set {version}, and {opset} is needed",
            why,
            f"convert it first: onnx.version_converter.convert_version(model, {max(opset, 13)})",
        )


def chosen_nodes(
    graph: Graph,
    op_types: Collection[str],
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    *,
    include_option: str = "nodes_to_quantize",
) -> list[Node]:
    """Nodes of these operators; of them those of these names, if any are given, and none of those excluded.

    Args:
        include_option: what the caller calls `include`.

    Raises:
        OptionError: a name that no node has.
    """
    names = {node.name for node in graph.nodes if node.name}
    for option, node_names in ((include_option, include), ("nodes_to_exclude", exclude)):
        _require_names(option, node_names or (), names)
    included, excluded = set(include or ()), set(exclude or ())
    return [
        node
        for node in graph.nodes
        if node.op_type in op_types and (not included or node.name in included) and node.name not in excluded
    ]


def _require_names(option: str, node_names: Sequence[str], names: Collection[str]) -> None:
    if isinstance(node_names, str) or not all(isinstance(name, str) for name in node_names):
        raise OptionError(
            f"{option} is {node_names!r:.100}", "it is a list of names of nodes", f"pass {option}=['...']"
        )
    for name in node_names:
        if name not in names:
            raise OptionError(
                f"{option} names {name!r}",
                f"the model has no node of that name among its {len(names)}",
                did_you_mean(name, names, "look the names up: [node.name for node in model.graph.node]"),
            )


def checked_op_types(
    requested: Sequence[str] | None, default: Sequence[str], graph: Graph, passed_over: Collection[str] = ()
) -> set[str]:
    """The operators to quantise.

    Args:
        default: those that can be, which are also taken if none are given.
        passed_over: names that are accepted and change nothing.

    Raises:
        OptionError: no such operator.
        NotSupportedYetError: one that onnxruntime quantises and we do not, and the model has it.
    """
    if not requested:
        return set(default)
    if isinstance(requested, str):
        raise OptionError(
            f"op_types_to_quantize is {requested!r}", "it is a list of operators", f"pass [{requested!r}]"
        )
    present = {node.op_type for node in graph.nodes}
    known = {*default, *ELSEWHERE, *STATIC_OPERATORS, *passed_over}
    for name in requested:
        if name in default or (name in known and name not in present):
            continue
        if name in passed_over:
            continue
        if name in known or name in present:
            raise NotSupportedYetError(
                f"op_types_to_quantize names {name!r}, and the model has such nodes",
                f"here the quantised operators are {', '.join(default)}",
                "leave it out: these nodes stay float",
            )
        raise OptionError(
            f"op_types_to_quantize names {name!r}",
            f"there is no rule for such an operator, and the model has none; known are {', '.join(sorted(known))}",
            did_you_mean(name, known, "correct the name"),
        )
    return {name for name in requested if name in default}


def excluded_by(nodes_to_exclude: Any, model: Any, nodes: Sequence[Any]) -> list[str] | None:
    """Names to exclude, from a list or from a function of the model and a node that says whether to."""
    if nodes_to_exclude is None:
        return None
    if isinstance(nodes_to_exclude, Callable):  # type: ignore[arg-type]
        return [node.name for node in nodes if nodes_to_exclude(model, node)]
    return list(nodes_to_exclude)
