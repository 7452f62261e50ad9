"""Dense products: handed to BLAS through NumPy. What BLAS does not know is computed in float32 and rounded once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cpu.blas import matmul as blas_matmul
from ..registry import Kernel, KernelError, NodeSpec, register
from .packed import packed_linear
from .support import checked_shape, optional, widened

_TERM = r"[A-Za-z]*(\.\.\.[A-Za-z]*)?"
_EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")


def product(a: Any, b: Any, team: Any = None) -> Any:
    """a @ b in a's type."""
    if a.dtype.itemsize < 4:
        return blas_matmul(widened(a), widened(b), team).astype(a.dtype, copy=False)
    return blas_matmul(a, b, team)


@register("MatMul")
def matmul(spec: NodeSpec) -> Kernel:
    """NumPy's matmul has the rules of ONNX."""
    team, packed = spec.options.get("team"), packed_linear(spec)
    if packed is not None:
        return packed

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (product(inputs[0], inputs[1], team),)

    return kernel


@register("Linear", domain="genai")
def linear(spec: NodeSpec) -> Kernel:
    """function(x @ weight + bias) + addend (ours): x [..., K], weight [K, N], bias [N], all float32.

    A function and an addend exclude each other; the addend broadcasts as in Add.
    Attributes: function, parameters: what `cpu.rowwise.unary` knows; none by default.
    """
    team, packed = spec.options.get("team"), packed_linear(spec, bias=2, addend=3)
    if packed is not None:
        return packed

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        result = blas_matmul(inputs[0], inputs[1], team)
        result += inputs[2]
        return (result,)

    if spec.attributes.get("function") or spec.has(3):
        raise KernelError("Linear: a function and an addend need a constant float32 weight")
    return kernel


@register("Gemm")
def gemm(spec: NodeSpec) -> Kernel:
    """alpha * A' @ B' + beta * C."""
    alpha, beta = float(spec.attributes.get("alpha", 1.0)), float(spec.attributes.get("beta", 1.0))
    trans_a, trans_b = bool(spec.attributes.get("transA", 0)), bool(spec.attributes.get("transB", 0))
    team = spec.options.get("team")
    if alpha == beta == 1.0 and not trans_a:
        packed = packed_linear(spec, bias=2, transposed=trans_b)
        if packed is not None:
            return packed

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a = inputs[0].T if trans_a else inputs[0]
        b = inputs[1].T if trans_b else inputs[1]
        addend = optional(inputs, 2)
        result = blas_matmul(widened(a), widened(b), team)
        if alpha != 1.0:
            result *= result.dtype.type(alpha)
        if addend is not None:
            addend = widened(addend)
            result = result + (addend if beta == 1.0 else addend * result.dtype.type(beta))
        return (result.astype(a.dtype, copy=False),)

    return kernel


@register("Einsum", since_version=12)
def einsum(spec: NodeSpec) -> Kernel:
    """Sums of products by NumPy, whose notation is the same."""
    equation = str(spec.attributes.get("equation", "")).replace(" ", "")
    if not _EQUATION.fullmatch(equation):
        raise KernelError(f"Einsum: equation {equation!r:.80} is malformed")
    outputs = equation.split("->")[1] if "->" in equation else None

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        _check_einsum_size(spec, equation, outputs, inputs)
        result = np.einsum(equation, *(widened(x) for x in inputs), optimize="greedy" if len(inputs) > 1 else False)
        return (np.asarray(result).astype(inputs[0].dtype, copy=False),)

    return kernel


def _check_einsum_size(spec: NodeSpec, equation: str, outputs: str | None, inputs: Sequence[Any]) -> None:
    """Repeated letters multiply extents, so the result is measured before it is made."""
    terms = equation.split("->")[0].split(",")
    extents: dict[str, int] = {}
    for term, x in zip(terms, inputs, strict=False):
        letters = term.replace("...", "")
        if "..." not in term:
            extents.update(zip(letters, x.shape, strict=False))
    shape = [extents.get(letter, 1) for letter in outputs.replace(".", "")] if outputs is not None else [1]
    checked_shape(spec, [*shape, max((math.prod(x.shape) for x in inputs), default=1) if "..." in equation else 1], 4)
