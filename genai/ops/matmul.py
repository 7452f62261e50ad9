"""Dense matmuls: constant float32 matrices are packed once; other matrices are multiplied by BLAS through NumPy.

Types that BLAS does not support are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.blas import matmul as blas_matmul, matmul_apart
from genai.kernels.cpu.arrays.gemm.linear import DenseLinear
from genai.kernels.cpu.arrays.gemm.packing import pack_weight
from genai.kernels.cpu.arrays.linear_models import product as small_product
from genai.kernels.cpu.program.thread_pool import Threads, fixed_address

from ..onnx.node import EQUATION, OURS
from ..onnx.types import TensorType, Type
from .registry import Kernel, KernelError, NodeSpec, operator, register
from .shape_rules import NodeTypes, shape_rule
from .support import checked_shape, optional, session_threads, widened

# Matrices with fewer elements than this are multiplied by BLAS, because packing does not pay off.
_MIN_ELEMENTS = 1 << 8
# Matrices of this size or more are also multiplied by BLAS, because int32 offsets cannot address them.
MAX_BYTES = 1 << 31
# Option of a plan: no result of a row or of a matrix depends on the number of rows and matrices.
APART = "apart"
Multiply = Callable[[Any, Any, Threads | None], Any]


class PackedLinear:
    """The kernel for a node that maps x [..., K] to [..., N].

    Attributes:
        packed: inputs that the kernel does not read, because it holds a packed copy.
        calls_blas: False.
    """

    calls_blas = False

    def __init__(self, linear: Any, shape: tuple[int, int], addend: int, packed: tuple[int, ...]) -> None:
        self._linear, self._shape, self._addend, self.packed = linear, shape, addend, packed

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, addend = inputs[0], optional(inputs, self._addend) if self._addend else None
        words, columns = self._shape
        if not x.ndim or x.shape[-1] != words or x.dtype != np.float32:
            raise KernelError(f"cannot multiply {x.dtype}{list(x.shape)} by float32{list(self._shape)}")
        shape = (*x.shape[:-1], columns)
        if addend is not None and addend.shape == shape:
            return (self._linear(x.reshape(-1, words), addend.reshape(-1, columns)).reshape(shape),)
        result = self._linear(x.reshape(-1, words)).reshape(shape)
        return (result if addend is None else result + addend,)


def packed_linear(spec: NodeSpec, *, bias: int = 0, addend: int = 0, transposed: bool = False) -> PackedLinear | None:
    """Return a kernel for function(x @ w + bias) + addend; x is input 0 and w is input 1.

    Returns None, so that BLAS is used, if the matrix or the bias is not constant, has another type or is too small.

    Args:
        bias, addend: indices of these inputs; 0 = the operator does not have the input.
        transposed: True if w is [N, K] instead of [K, N].
    """
    threads = session_threads(spec)
    weight = spec.constants[1] if len(spec.constants) > 1 else None
    function = str(spec.attributes.get("function", ""))
    if function and addend and spec.has(addend):
        raise KernelError(f"{spec.op_type}: an addend and the function {function!r} cannot be combined")
    if threads is None or weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return None
    needs_packing = function or spec.options.get(APART) or (addend and spec.has(addend))
    if weight.nbytes >= MAX_BYTES or weight.size < (1 if needs_packing else _MIN_ELEMENTS):
        return None
    columns = weight.shape[0 if transposed else 1]
    terms = None
    if bias and spec.has(bias):
        terms = spec.constants[bias]
        if terms is None or terms.dtype != np.float32 or terms.shape not in ((columns,), (1, columns)):
            return None
        terms = terms.reshape(-1)
    matrix = weight.T if transposed else weight
    arena, layout = spec.options.get("arena"), f"float32 panels{'T' * transposed}"
    packed = spec.pack((1,), layout, lambda: pack_weight(threads, matrix, arena))
    parameters = tuple(float(value) for value in spec.attributes.get("parameters") or ())
    linear = DenseLinear(threads, packed, terms, function or "copy", parameters)
    return PackedLinear(linear, matrix.shape, addend, (1, bias) if terms is not None else (1,))


class SmallLinear:
    """The kernel for a node that maps x [..., K] to [..., N] by a constant matrix that is too small to be packed.

    Attributes:
        is_native: True, because the kernel only runs compiled programs, unless x is not contiguous float32.
    """

    calls_blas = False
    is_native = True

    def __init__(self, matrix: Any, threads: Threads, addend: int = 0, alpha: float = 1.0) -> None:
        """`addend`: index of the input that is added; 0 = nothing is added."""
        self._matrix, self._threads = np.ascontiguousarray(matrix), threads
        self._addend, self._alpha = addend, alpha

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, addend = inputs[0], optional(inputs, self._addend) if self._addend else None
        words, columns = self._matrix.shape
        if not x.ndim or x.shape[-1] != words or x.dtype != np.float32:
            raise KernelError(f"cannot multiply {x.dtype}{list(x.shape)} by float32{list(self._matrix.shape)}")
        rows = np.ascontiguousarray(x).reshape(-1, words)
        if addend is not None:
            _check_addend(addend.shape, (len(rows), columns))
            addend = np.ascontiguousarray(addend)
        found = small_product(rows, fixed_address(self._matrix), addend, self._alpha, threads=self._threads)
        return (found.reshape(*x.shape[:-1], columns),)


def _small_linear(
    spec: NodeSpec, addend: int = 0, *, alpha: float = 1.0, transposed: bool = False
) -> SmallLinear | None:
    """Return a kernel for alpha * x @ w + addend; None unless the matrix is small, constant and float32."""
    threads = session_threads(spec)
    weight = spec.constants[1] if len(spec.constants) > 1 else None
    if threads is None or weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return None
    if not 0 < weight.size <= _MIN_ELEMENTS or spec.options.get(APART):
        return None
    return SmallLinear(weight.T if transposed else weight, threads, addend if spec.has(addend) else 0, alpha)


def product(a: Any, b: Any, threads: Threads | None = None, multiply: Multiply = blas_matmul) -> Any:
    """Return a @ b in a's type."""
    if a.dtype.itemsize < 4:
        return multiply(widened(a), widened(b), threads).astype(a.dtype, copy=False)
    return multiply(a, b, threads)


def _multiply_of(spec: NodeSpec) -> Multiply:
    return matmul_apart if spec.options.get(APART) else blas_matmul


@register("MatMul")
def matmul(spec: NodeSpec) -> Kernel:
    """Multiply with NumPy's matmul, which has ONNX's broadcasting rules."""
    threads, multiply = spec.options.get("threads"), _multiply_of(spec)
    compiled = packed_linear(spec) or _small_linear(spec)
    if compiled is not None:
        return compiled

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (product(inputs[0], inputs[1], threads, multiply),)

    return kernel


@register("Linear", domain=OURS)
def linear(spec: NodeSpec) -> Kernel:
    """function(x @ weight + bias) + addend (domain genai): x [..., K], weight [K, N], bias [N], all float32.

    A node has a function or an addend, not both; the addend broadcasts as in Add.
    Attributes: function, one of `cpu.functions`, and its parameters; if it is absent, no function is applied.
    """
    has_more = bool(spec.attributes.get("function") or spec.has(3))
    compiled = packed_linear(spec, bias=2, addend=3) or (None if has_more else _small_linear(spec, 2))
    threads, multiply = spec.options.get("threads"), _multiply_of(spec)
    if compiled is not None:
        return compiled

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        result = multiply(inputs[0], inputs[1], threads)
        result += inputs[2]
        return (result,)

    if has_more:
        raise KernelError("Linear: a function or an addend is supported only with a constant float32 weight")
    return kernel


@register("Gemm")
def gemm(spec: NodeSpec) -> Kernel:
    """alpha * A' @ B' + beta * C. With beta = 0, C is not read, as in BLAS: NaN and infinities in C have no effect."""
    alpha, beta = float(spec.attributes.get("alpha", 1.0)), float(spec.attributes.get("beta", 1.0))
    trans_a, trans_b = bool(spec.attributes.get("transA", 0)), bool(spec.attributes.get("transB", 0))
    threads, multiply = spec.options.get("threads"), _multiply_of(spec)
    if alpha == beta == 1.0 and not trans_a:
        packed = packed_linear(spec, bias=2, transposed=trans_b)
        if packed is not None:
            return packed
    if beta == 1.0 and not trans_a:
        small = _small_linear(spec, 2, alpha=alpha, transposed=trans_b)
        if small is not None:
            return small

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a = inputs[0].T if trans_a else inputs[0]
        b = inputs[1].T if trans_b else inputs[1]
        addend = optional(inputs, 2)
        result = multiply(widened(a), widened(b), threads)
        if addend is not None:
            _check_addend(addend.shape, result.shape)
        if alpha != 1.0:
            result *= result.dtype.type(alpha)
        if addend is not None and beta != 0.0:
            addend = widened(addend)
            result = result + (addend if beta == 1.0 else addend * result.dtype.type(beta))
        return (result.astype(a.dtype, copy=False),)

    return kernel


def _check_addend(shape: tuple[int, ...], product: tuple[int, ...]) -> None:
    """Raise KernelError if C does not broadcast to the product, so that the sum would have another shape."""
    aligned = zip(shape[::-1], product[::-1], strict=False)
    if len(shape) > len(product) or any(extent not in (1, whole) for extent, whole in aligned):
        raise KernelError(f"Gemm: C of shape {list(shape)} does not broadcast to the product, {list(product)}")


@operator("Einsum", since_version=12)
def einsum(*values: Any, equation: str = "", spec: NodeSpec) -> Any:
    """Sum products with NumPy's einsum, which has the same notation as ONNX."""
    equation = equation.replace(" ", "")
    if not EQUATION.fullmatch(equation):
        raise KernelError(f"Einsum: the equation {equation!r:.80} is malformed")
    _check_einsum_size(spec, equation, values)
    result = np.einsum(equation, *(widened(x) for x in values), optimize="greedy" if len(values) > 1 else False)
    return np.asarray(result).astype(values[0].dtype, copy=False)


def _check_einsum_size(spec: NodeSpec, equation: str, values: Sequence[Any]) -> None:
    """Check the result's size before it is allocated, because repeated letters multiply extents."""
    terms, _, outputs = equation.partition("->")
    extents: dict[str, int] = {}
    for term, x in zip(terms.split(","), values, strict=False):
        if "..." not in term:
            extents.update(zip(term, x.shape, strict=False))
    shape = [extents.get(letter, 1) for letter in outputs.replace(".", "")]
    checked_shape(spec, [*shape, max((math.prod(x.shape) for x in values), default=1) if "..." in equation else 1], 4)


@shape_rule("Linear", "DenseAttention", domain=OURS)
def product_types(types: NodeTypes) -> list[Type | None]:
    """Matmul: [..., K] times [K, N] is [..., N]. Attention: [B, H, T, size], values [B, H, S, N]: [B, H, T, N]."""
    source, last = types.tensor(0), types.tensor(2 if types.node.op_type == "DenseAttention" else 1)
    if source is None or last is None or not source.shape or not last.shape:
        return []
    return [TensorType(source.dtype, (*source.shape[:-1], last.shape[-1]))]
