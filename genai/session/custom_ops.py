"""Custom operators: a Python function, and optionally a rule for the types of its outputs."""

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
    """Return a decorator that makes a function of arrays run an operator.

    The function receives one array per input (None if absent) and the node's attributes as keywords. It returns an
    array, or a tuple with one array per output. It may use NumPy, Numba or CuPy. Sessions created later use the
    function. It takes precedence over a built-in operator with the same name and the same or an older version.

    Args:
        domain: the operator's domain; "" is ONNX's standard domain.
        name: the operator's name.
        since_version: the first version of the domain's operator set that the function implements.
        shape_rule: function from `genai.ops.shape_rules.NodeTypes` to the types of the outputs, for shape inference.

    Raises:
        OptionError: the name is empty, or the version is below 1.
    """
    if not name or since_version < 1:
        raise OptionError(
            f"register_op({domain!r}, {name!r}, {since_version}) has invalid arguments",
            "an operator must have a name and a version of at least 1",
            "correct the arguments of the decorator",
        )
    key = canonical_domain(domain)
    load_operator(key, name)  # load built-in kernels first, because the latest registration wins

    def add(function: F) -> F:
        register(name, domain=key, since_version=since_version, source="custom")(_factory(function))
        if shape_rule is not None:
            SHAPE_RULES[key, name] = shape_rule
        return function

    return add


def _factory(function: Callable[..., Any]) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        attributes = dict(spec.attributes)
        try:  # reports a mismatch at load time, not in the first run
            inspect.signature(function).bind(*spec.inputs, **attributes)
        except TypeError as error:
            raise KernelError(
                f"{spec.op_type}: the registered function does not accept {len(spec.inputs)} inputs and the "
                f"attributes {sorted(attributes)}: {error}"
            ) from error
        except ValueError:
            pass  # a compiled function without a signature

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            results = as_tuple(function(*inputs, **attributes))
            return tuple(np.asarray(x) if np.isscalar(x) else x for x in results)

        return kernel

    return factory
