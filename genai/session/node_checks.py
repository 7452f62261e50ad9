"""Checks of a model's nodes, before any other step: imported domains, and attributes and inputs against definitions.

Without these checks, faults would surface in kernels, such as a division by zero or text in place of a number. Here, an
error names the node, the attribute and its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx

from ..errors import GraphError, NodeError
from ..onnx.ir import Graph, Node, OnnxModel, canonical_domain
from ..onnx.node import ML, MS, Attribute, canonical_imports, onnx_schema
from ..onnx.types import AttributeType, DataType, TensorType

_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic

# The minimum values of attributes with these names, for all operators.
_LEAST = {
    "blocksize": 1, "dilations": 1, "group": 1, "hidden_size": 1, "kernel_shape": 1, "num_groups": 1, "num_outputs": 1,
    "offset_group": 1, "output_height": 0, "output_padding": 0, "output_shape": 0, "output_width": 0, "pads": 0,
    "pooled_shape": 1, "sample_size": 1, "sampling_ratio": 0, "size": 1, "split": 0, "strides": 1,
}  # fmt: skip
# Exceptions: Pad crops if its pads are negative.
_OTHERWISE = {("Pad", "pads")}
# Attributes that specify an element type; 0 = the type is derived from the inputs.
_ELEMENT_TYPES = frozenset({"to", "dtype", "output_dtype", "output_datatype"})


def check_nodes(model: OnnxModel) -> None:
    """Check that every node's domain is imported, and that its attributes, inputs and types fit its definition.

    Functions are also checked. Operators that ONNX does not define are left to the compiler.
    """
    _check_versions("the model", model.opset_imports)
    versions = canonical_imports(model.opset_imports)
    versions.setdefault("", model.opset_version() or 0)
    for graph in model.graphs():
        _check_graph(model, graph, versions)
    for function in model.functions.values():
        _check_versions(f"function {function.name!r}", function.opset_imports)
        own = {**versions, **canonical_imports(function.opset_imports)}
        for graph in function.body.nested():
            _check_graph(model, graph, own)


def check_result_sizes(graph: Graph, most: int) -> None:
    """Reject a graph with a value that is certain to become too large, before the first run allocates the value.

    Only growth counts: a value no larger than the inputs of its node may be a view of them. Branches and loop bodies
    may never run, so their values are checked when they are computed.

    Raises:
        NodeError: the value's sizes are known, and it would take more than `most` bytes.
    """
    for node in graph.nodes:
        if node.key[0] not in _MEASURED_DOMAINS:
            continue  # a provider computes the node, with separate memory
        given = [_known_bytes(graph, name) for name in node.inputs if name]
        for name in filter(None, node.outputs):
            wanted = _known_bytes(graph, name)
            if wanted is not None and wanted > most and all(size is not None and size < wanted for size in given):
                raise NodeError(
                    f"{node.op_type} {node.name!r}: the result {name!r} takes {wanted} bytes, but the limit is "
                    f"{most} bytes",
                    f"the result has the type {graph.type_of(name)}{_extents(graph, name)}",
                    "use smaller inputs or a smaller model, or raise the limit with the session config entry "
                    "session.max_value_bytes",
                )


_MEASURED_DOMAINS = frozenset({"", ML, MS})


def _known_bytes(graph: Graph, name: str) -> int | None:
    """Return the size of a value in bytes, or None if its dimensions are unknown."""
    known = graph.type_of(name)
    if not isinstance(known, TensorType) or known.dtype is DataType.UNDEFINED or known.num_elements is None:
        return None
    return known.num_elements * (8 if known.dtype is DataType.STRING else known.dtype.numpy_dtype.itemsize)


def _extents(graph: Graph, name: str) -> str:
    known = graph.type_of(name)
    return str(list(known.shape or ())) if isinstance(known, TensorType) else ""


def _check_versions(what: str, imports: Mapping[str, int]) -> None:
    for domain, version in imports.items():
        newest = _newest_version(canonical_domain(domain))
        if newest and not 1 <= version <= newest:
            raise GraphError(
                f"{what} imports version {version} of {domain or 'ai.onnx'}",
                f"the installed onnx {onnx.__version__} defines versions 1 to {newest}",
                "update the onnx package, or export the model for an older operator set",
            )


@cache
def _newest_version(domain: str) -> int:
    """Return the newest operator set of a domain that ONNX defines; 0 for other domains."""
    if domain == "":
        return onnx.defs.onnx_opset_version()
    return onnx.defs.onnx_ml_opset_version() if domain == "ai.onnx.ml" else 0


def _check_graph(model: OnnxModel, graph: Graph, versions: Mapping[str, int]) -> None:
    for node in graph.nodes:
        domain, op_type = node.key
        if model.function(node) is not None:
            continue
        if domain not in versions:
            raise GraphError(
                f"node {node.name!r} uses {domain}::{op_type}, but the model imports no operator set for {domain!r}",
                f"the model imports the operator sets {', '.join(name or 'ai.onnx' for name in versions)}",
                "export the model again, or add the missing opset_import",
            )
        definition = _definition(domain, op_type, versions[domain])
        if definition is not None:
            _check_node(graph, node, definition)
        if node.attributes and (definition is not None or domain == MS):
            _check_values(node)


def _check_node(graph: Graph, node: Node, definition: _Definition) -> None:
    if node.attributes or definition.required:
        _check_attributes(node, definition)
    for what, count, (least, most) in (
        ("inputs", len(node.inputs), definition.inputs),
        ("outputs", len(node.outputs), definition.outputs),
    ):
        if not least <= count <= most:
            raise _wrong(node, f"it has {count} {what}", f"it must have {least} to {most} {what}")
    if len(node.inputs) > 1 and definition.variables:
        _check_types(graph, node, definition.variables)


def _check_attributes(node: Node, definition: _Definition) -> None:
    """Check the names and types of attributes."""
    known = definition.attributes
    unknown = node.attributes.keys() - known.keys()
    if unknown:
        raise _wrong(node, f"it has the attributes {sorted(unknown)}", f"the allowed attributes are {sorted(known)}")
    missing = [name for name in definition.required if name not in node.attributes]
    if missing:
        raise _wrong(node, f"it lacks the attributes {missing}", "these attributes are required")
    for name, attribute in node.attributes.items():
        if attribute.type is not known[name]:
            raise _wrong(
                node,
                f"its attribute {name!r} is {_shown(attribute)}, which is {_article(attribute.type)}",
                f"the attribute must be {_article(known[name])}",
            )


def _check_values(node: Node) -> None:
    """Check for counts and sizes that are too small for any operator, and for invalid element types."""
    for name, attribute in node.attributes.items():
        if attribute.type not in (AttributeType.INT, AttributeType.INTS) or attribute.value is None:
            continue
        numbers = attribute.value if attribute.type is AttributeType.INTS else [attribute.value]
        least = _LEAST.get(name)
        if least is not None and (node.op_type, name) not in _OTHERWISE and any(number < least for number in numbers):
            rule = "the attribute cannot be negative" if least == 0 else f"the attribute must be at least {least}"
            raise _wrong(node, f"its attribute {name!r} is {_shown(attribute)}", rule)
        if name in _ELEMENT_TYPES and any(number not in _NUMBERS_OF_TYPES for number in numbers):
            rule = f"the attribute must be the number of an element type, from 1 to {max(_NUMBERS_OF_TYPES)}"
            raise _wrong(node, f"its attribute {name!r} is {_shown(attribute)}", rule)


_NUMBERS_OF_TYPES = frozenset(int(kind) for kind in DataType)  # includes 0, which leaves the type unspecified


def _shown(attribute: Attribute) -> str:
    return f"{attribute.python_value!r:.80}"


def _article(kind: AttributeType) -> str:
    """Return a type in words: "an INT", "a list of FLOATs"."""
    if kind.name.endswith("S"):
        return f"a list of {kind.element}s"
    return f"{'an' if kind.name[0] in 'AEIOU' else 'a'} {kind.name}"


@dataclass(frozen=True)
class _Definition:
    """What the checks read of an onnx.defs.OpSchema, which converts its contents at every access.

    Attributes:
        inputs, outputs: least and largest count.
        attributes: the types of all attributes.
        required: attributes without a default.
        variables: the type variable of each input; "" for inputs whose type is fixed or independent.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    attributes: Mapping[str, AttributeType]
    required: Sequence[str]
    variables: Sequence[str]


@cache
def _definition(domain: str, op_type: str, version: int) -> _Definition | None:
    """Return ONNX's definition of an operator, or None if ONNX has none."""
    schema = onnx_schema(domain, op_type, version)
    if schema is None:
        return None
    attributes = schema.attributes
    return _Definition(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        {name: AttributeType(item.type.value) for name, item in attributes.items()},
        [name for name, item in attributes.items() if item.required],
        [_type_variable(formal) for formal in schema.inputs],
    )


def _type_variable(formal: Any) -> str:
    is_free = formal.option == _VARIADIC and not formal.is_homogeneous
    return "" if is_free or formal.type_str.startswith("tensor(") else formal.type_str


def _check_types(graph: Graph, node: Node, variables: Sequence[str]) -> None:
    """Check that all inputs with the same type variable have the same element type."""
    bound: dict[str, DataType] = {}
    for index, name in enumerate(node.inputs):
        variable = variables[min(index, len(variables) - 1)]
        known = graph.type_of(name) if name and variable else None
        if not isinstance(known, TensorType) or known.dtype is DataType.UNDEFINED:
            continue
        dtype = bound.setdefault(variable, known.dtype)
        if dtype is not known.dtype:
            raise _wrong(
                node,
                f"its inputs {', '.join(node.inputs)} have the types {dtype.onnx_name} and {known.dtype.onnx_name}",
                f"all inputs of type {variable!r} must have the same element type",
            )


def _wrong(node: Node, what: str, rule: str) -> GraphError:
    domain, op_type = node.key
    operator = f"{domain}::{op_type}" if domain else op_type
    return GraphError(
        f"node {node.name!r} ({operator}): {what}",
        f"by the operator's definition, {rule}",
        "export the model again",
    )
