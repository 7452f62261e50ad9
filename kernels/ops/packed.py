"""Products with a constant float32 matrix, packed once: the common core of MatMul, Gemm and Linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import KernelError, NodeSpec
from .support import optional

# Smaller matrices are left to BLAS, which costs less per call.
_MIN_ELEMENTS = 1 << 13
# Larger ones as well: tables of int32 would not reach their end.
MAX_BYTES = 1 << 31


class PackedLinear:
    """The kernel of a node: x [..., K] to [..., N].

    Attributes:
        packed: inputs that it no longer reads, since it keeps them in its own form.
    """

    def __init__(self, linear: Any, shape: tuple[int, int], addend: int, packed: tuple[int, ...]) -> None:
        self._linear, self._shape, self._addend, self.packed = linear, shape, addend, packed

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, addend = inputs[0], optional(inputs, self._addend) if self._addend else None
        words, columns = self._shape
        if not x.ndim or x.shape[-1] != words or x.dtype != np.float32:
            raise KernelError(f"a product of {x.dtype}{list(x.shape)} with float32{list(self._shape)} is not possible")
        shape = (*x.shape[:-1], columns)
        if addend is not None and addend.shape == shape:
            return (self._linear(x.reshape(-1, words), addend.reshape(-1, columns)).reshape(shape),)
        result = self._linear(x.reshape(-1, words)).reshape(shape)
        return (result if addend is None else result + addend,)


def packed_linear(spec: NodeSpec, *, bias: int = 0, addend: int = 0, transposed: bool = False) -> PackedLinear | None:
    """function(x @ w + bias) + addend of inputs 0, 1, `bias` and `addend` (0 = the operator has none).

    None where the matrix or the bias is no constant, or of another type, or too small to be worth it: BLAS does those.

    Args:
        transposed: w is [N, K] instead of [K, N].
    """
    crew = spec.options.get("crew")
    weight = spec.constants[1] if len(spec.constants) > 1 else None
    function = str(spec.attributes.get("function", ""))
    if function and addend and spec.has(addend):
        raise KernelError(f"{spec.op_type}: an addend and the function {function!r} at once are not supported")
    if crew is None or weight is None or weight.ndim != 2 or weight.dtype != np.float32 or weight.nbytes >= MAX_BYTES:
        return None
    if weight.size < (1 if function or (addend and spec.has(addend)) else _MIN_ELEMENTS):
        return None
    columns = weight.shape[0 if transposed else 1]
    terms = None
    if bias and spec.has(bias):
        terms = spec.constants[bias]
        if terms is None or terms.dtype != np.float32 or terms.shape not in ((columns,), (1, columns)):
            return None
        terms = terms.reshape(-1)
    from ..cpu.gemm.linear import Linear, pack_weight

    matrix = weight.T if transposed else weight
    arena, form = spec.options.get("arena"), f"float32 panels{'T' * transposed}"
    packed = spec.pack((1,), form, lambda: pack_weight(crew, matrix, arena))
    parameters = tuple(float(value) for value in spec.attributes.get("parameters") or ())
    linear = Linear(crew, packed, terms, function or "copy", parameters)
    return PackedLinear(linear, matrix.shape, addend, (1, bias) if terms is not None else (1,))
