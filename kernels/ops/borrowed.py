"""Operators borrowed at run time from `onnx.reference`: the long tail that nobody needs fast."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, as_tuple

# Where onnx.reference keeps the operators of each domain.
_PACKAGES = {
    "": "ops",
    "ai.onnx.ml": "ops.aionnxml",
    "ai.onnx.preview": "ops.aionnx_preview",
    "ai.onnx.preview.training": "ops.aionnx_preview_training",
}


@cache
def available(domain: str, op_type: str, version: int) -> bool:
    """Whether onnx.reference can run an operator, directly or through its function body."""
    import onnx.defs

    try:
        schema: Any = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return False
    return _implementation(domain, op_type, version) is not None or bool(
        schema.has_function or schema.has_context_dependent_function
    )


def implemented(domain: str, op_type: str, version: int) -> bool:
    """Whether onnx.reference has code for an operator (and not only its function body)."""
    return available(domain, op_type, version) and _implementation(domain, op_type, version) is not None


@cache
def _implementation(domain: str, op_type: str, version: int) -> Any:
    package = _PACKAGES.get(domain)
    if package is None:
        return None
    try:
        return import_module(f"onnx.reference.{package}").load_op(domain, op_type, version)
    except Exception:
        return None


def make(spec: NodeSpec) -> Kernel:
    """A kernel that runs one node through onnx.reference."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(_node_model(spec))
    names = [name for name in spec.inputs if name]
    wanted = [name for name in spec.outputs if name]

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        feeds = {name: value for name, value in zip(spec.inputs, inputs, strict=False) if name}
        if len(feeds) != len(set(names)):
            raise KernelError(f"{spec.op_type}: expected inputs {names}, got {list(feeds)}")
        results = dict(zip(wanted, as_tuple(tuple(evaluator.run(None, feeds))), strict=True))
        return tuple(_value(results[name]) if name else None for name in spec.outputs)

    return kernel


def _value(result: Any) -> Any:
    """As plans hold it: arrays, of objects for text; lists, dictionaries and None stay what they are."""
    if isinstance(result, list | dict) or result is None:
        return result
    array = np.asarray(result)
    return array.astype(object) if array.dtype.kind in "US" else array


def _node_model(spec: NodeSpec) -> Any:
    """A model that holds the node alone; types are left open, as onnx.reference does not look at them."""
    import onnx
    from onnx import helper

    if spec.proto is None:
        raise KernelError(f"{spec.op_type} cannot be borrowed without its definition")
    node = spec.proto()
    unknown = onnx.TypeProto()
    inputs = [helper.make_value_info(name, unknown) for name in dict.fromkeys(n for n in spec.inputs if n)]
    outputs = [helper.make_value_info(name, unknown) for name in spec.outputs if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(spec.domain, spec.version)])
