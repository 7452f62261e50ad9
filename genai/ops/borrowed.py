"""Operators borrowed at run time from `onnx.reference`: the long tail that nobody needs fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from ..onnx.node import onnx_schema
from .registry import Kernel, KernelError, NodeSpec
from .support import limited

# Where onnx.reference keeps the operators of each domain.
_PACKAGES = {
    "": "ops",
    "ai.onnx.ml": "ops.aionnxml",
    "ai.onnx.preview": "ops.aionnx_preview",
    "ai.onnx.preview.training": "ops.aionnx_preview_training",
}


# Borrowed code loops over such numbers in Python, or allocates by them.
_MAX_COUNT = 1 << 16
_NOT_COUNTS = frozenset({"ignore_index", "dtype", "to"})


@cache
def available(domain: str, op_type: str, version: int) -> bool:
    """Whether onnx.reference can run an operator, directly or through its function body."""
    schema = onnx_schema(domain, op_type, version)
    if schema is None:
        return False
    has_body = schema.has_function or schema.has_context_dependent_function
    return bool(has_body) or _implementation(domain, op_type, version) is not None


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

    for name, value in spec.attributes.items():
        numbers = value if isinstance(value, list) else [value]
        if name not in _NOT_COUNTS and any(isinstance(number, int) and abs(number) > _MAX_COUNT for number in numbers):
            raise KernelError(f"{spec.op_type}: {name} is {value!s:.80}, borrowed operators take at most {_MAX_COUNT}")
    evaluator = ReferenceEvaluator(_node_model(spec))
    names = [name for name in spec.inputs if name]
    output_names = [name for name in spec.outputs if name]

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        feeds = {name: value for name, value in zip(spec.inputs, inputs, strict=False) if name}
        if len(feeds) != len(set(names)):
            raise KernelError(f"{spec.op_type}: expected inputs {names}, got {list(feeds)}")
        results = dict(zip(output_names, evaluator.run(None, feeds), strict=True))
        return tuple(_value(results[name]) if name else None for name in spec.outputs)

    return limited(spec, kernel)


def definition(spec: NodeSpec) -> Callable[..., tuple[Any, ...]]:
    """The same as a function of the inputs, made when it is first called."""
    kernel = cache(partial(make, spec))
    return lambda *inputs: kernel()(None, inputs)


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
