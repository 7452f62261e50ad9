"""Operators that `onnx.reference` runs: rare operators for which speed does not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from ..onnx.node import onnx_schema
from .registry import Kernel, KernelError, NodeSpec
from .support import limited

# The subpackage of onnx.reference that contains the operators of each domain.
_PACKAGES = {
    "": "ops",
    "ai.onnx.ml": "ops.aionnxml",
    "ai.onnx.preview": "ops.aionnx_preview",
    "ai.onnx.preview.training": "ops.aionnx_preview_training",
}


# onnx.reference loops over counts in attributes in Python, or allocates memory in proportion to them.
_MAX_COUNT = 1 << 16
_NOT_COUNTS = frozenset({"ignore_index", "dtype", "to"})


@cache
def available(domain: str, op_type: str, version: int) -> bool:
    """Return True if onnx.reference can run an operator, directly or through its function body."""
    schema = onnx_schema(domain, op_type, version)
    if schema is None:
        return False
    has_body = schema.has_function or schema.has_context_dependent_function
    return bool(has_body) or _implementation(domain, op_type, version) is not None


def implemented(domain: str, op_type: str, version: int) -> bool:
    """Return True if onnx.reference implements an operator directly, not only through its function body."""
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
    """Return a kernel that runs one node through onnx.reference."""
    from onnx.reference import ReferenceEvaluator

    for name, value in spec.attributes.items():
        numbers = value if isinstance(value, list) else [value]
        if name not in _NOT_COUNTS and any(isinstance(number, int) and abs(number) > _MAX_COUNT for number in numbers):
            raise KernelError(
                f"{spec.op_type}: {name} is {value!s:.80}, but attributes of operators that onnx.reference runs "
                f"cannot exceed {_MAX_COUNT}"
            )
    evaluator = ReferenceEvaluator(_node_model(spec))
    names = [name for name in spec.inputs if name]
    output_names = [name for name in spec.outputs if name]

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        feeds = {name: value for name, value in zip(spec.inputs, inputs, strict=False) if name}
        if len(feeds) != len(set(names)):
            raise KernelError(f"{spec.op_type}: the node has the inputs {names}, but only {list(feeds)} have values")
        results = dict(zip(output_names, evaluator.run(None, feeds), strict=True))
        return tuple(_value(results[name]) if name else None for name in spec.outputs)

    return limited(spec, kernel)


def definition(spec: NodeSpec) -> Callable[..., tuple[Any, ...]]:
    """Return `make`'s kernel as a function of the inputs; the kernel is created at the first call."""
    kernel = cache(partial(make, spec))
    return lambda *inputs: kernel()(None, inputs)


def _value(result: Any) -> Any:
    """Convert a result to an array (dtype object for strings), as plans expect; return lists, dicts and None as is."""
    if isinstance(result, list | dict) or result is None:
        return result
    array = np.asarray(result)
    return array.astype(object) if array.dtype.kind in "US" else array


def _node_model(spec: NodeSpec) -> Any:
    """A model that consists of one node. Types are unspecified because onnx.reference does not check them."""
    import onnx
    from onnx import helper

    if spec.proto is None:
        raise KernelError(f"{spec.op_type}: onnx.reference cannot run the node without its NodeProto")
    node = spec.proto()
    unknown = onnx.TypeProto()
    inputs = [helper.make_value_info(name, unknown) for name in dict.fromkeys(n for n in spec.inputs if n)]
    outputs = [helper.make_value_info(name, unknown) for name in spec.outputs if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(spec.domain, spec.version)])
