"""Selection of the nodes to quantise, by operator and by name."""

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
    """Raise if a model is already quantised or its opset is too old.

    Args:
        opset: the oldest supported version.
        why: the reason why that version is needed.

    Raises:
        InputError: the model is already quantised.
        GraphError: the model's opset is older.
    """
    for graph in model.graphs():
        for node in graph.nodes:
            if node.op_type in _QUANTISED or (node.key[0] == MS and node.op_type.startswith("QLinear")):
                raise InputError(
                    f"the model is already quantised: node {node.name!r} is a {node.op_type}",
                    "quantising it again would add a second error to the first",
                    "use the original float model",
                )
    version = model.opset_version() or 0
    if version < opset:
        raise GraphError(
            f"the model has opset {version}, but opset {opset} is needed",
            why,
            f"convert the model first: onnx.version_converter.convert_version(model, {max(opset, 13)})",
        )


def chosen_nodes(
    graph: Graph,
    op_types: Collection[str],
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    *,
    include_option: str = "nodes_to_quantize",
) -> list[Node]:
    """Return the nodes of these operators. Keep only included names, if any are set, and omit excluded names.

    Args:
        include_option: the caller's name for `include`, for error messages.

    Raises:
        OptionError: no node has one of the names.
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
            f"{option} is {node_names!r:.100}", "the option must be a list of node names", f"pass {option}=['...']"
        )
    for name in node_names:
        if name not in names:
            raise OptionError(
                f"{option} names {name!r}",
                f"none of the model's {len(names)} named nodes has this name",
                did_you_mean(name, names, "list the names with [node.name for node in model.graph.node]"),
            )


def checked_op_types(
    requested: Sequence[str] | None, default: Sequence[str], graph: Graph, passed_over: Collection[str] = ()
) -> set[str]:
    """Return the operators to quantise.

    Args:
        default: operators that can be quantised, and that are used if none are requested.
        passed_over: names that are ignored.

    Raises:
        OptionError: the operator is unknown.
        NotSupportedYetError: the model has an operator that only onnxruntime can quantise.
    """
    if not requested:
        return set(default)
    if isinstance(requested, str):
        raise OptionError(
            f"op_types_to_quantize is {requested!r}",
            "the option must be a list of operator types",
            f"pass [{requested!r}]",
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
                f"op_types_to_quantize contains {name!r}, which cannot be quantised",
                f"operators that can be quantised are {', '.join(default)}",
                "omit the operator; its nodes stay float",
            )
        raise OptionError(
            f"op_types_to_quantize names {name!r}",
            "the operator has no quantisation rule and is not in the model; known operators are "
            f"{', '.join(sorted(known))}",
            did_you_mean(name, known, "correct the name"),
        )
    return {name for name in requested if name in default}


def excluded_by(nodes_to_exclude: Any, model: Any, nodes: Sequence[Any]) -> list[str] | None:
    """Return the names to exclude, given a list of names or a predicate that receives the model and a node."""
    if nodes_to_exclude is None:
        return None
    if isinstance(nodes_to_exclude, Callable):  # type: ignore[arg-type]
        return [node.name for node in nodes if nodes_to_exclude(model, node)]
    return list(nodes_to_exclude)
