"""Operators of the user's own: a Python function, and optionally a rule for its outputs' types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from genai.ops.registry import Kernel, KernelError, NodeSpec, as_tuple, load_operator, register

from ..errors import OptionError
from ..onnx.ir import canonical_domain
from ..ops.shape_rules import SHAPE_RULES, ShapeRule

F = TypeVar("F", bound=Callable[..., Any])


def register_op(
    domain: str, name: str, since_version: int = 1, *, shape_rule: ShapeRule | None = None
) -> Callable[[F], F]:
    """Decorator: run an operator by a function of arrays.

    The function gets one array per input (None where absent) and the node's attributes as keywords, and returns an
    array, or a tuple of one per output. It may be written with NumPy, Numba or CuPy. Sessions made afterwards use it;
    it takes precedence over an operator of ours of the same name and the same or an older version.

    Args:
        domain: of the operator, "" for ONNX's own.
        since_version: the first version of the domain's operator set that the function implements.
        shape_rule: from `genai.ops.shape_rules.NodeTypes` to the outputs' types, so that shapes are known further on.

    Raises:
        OptionError: no name, or a version below 1.
    """
    if not name or since_version < 1:
        raise OptionError(
            f"register_op({domain!r}, {name!r}, {since_version})",
            "an operator has a name and a version of at least 1",
            "correct the decorator",
        )
    key = canonical_domain(domain)
    load_operator(key, name)  # what is registered later comes first

    def add(function: F) -> F:
        register(name, domain=key, since_version=since_version, source="custom")(_factory(function))
        if shape_rule is not None:
            SHAPE_RULES[key, name] = shape_rule
        return function

    return add


def _factory(function: Callable[..., Any]) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        attributes = dict(spec.attributes)
        try:  # found out when loading, not in the first run
            inspect.signature(function).bind(*spec.inputs, **attributes)
        except TypeError as error:
            raise KernelError(
                f"{spec.op_type}: the registered function does not take {len(spec.inputs)} inputs "
                f"and the attributes {sorted(attributes)}: {error}"
            ) from error
        except ValueError:
            pass  # a compiled function without a signature

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            results = as_tuple(function(*inputs, **attributes))
            return tuple(np.asarray(x) if np.isscalar(x) else x for x in results)

        return kernel

    return factory
