"""Dense products: handed to BLAS through NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, NodeSpec, register


@register("MatMul")
def matmul(spec: NodeSpec) -> Kernel:
    """NumPy's matmul has the rules of ONNX."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.matmul(inputs[0], inputs[1]),)

    return kernel


@register("Gemm", since_version=7)
def gemm(spec: NodeSpec) -> Kernel:
    """alpha * A' @ B' + beta * C."""
    alpha, beta = float(spec.attributes.get("alpha", 1.0)), float(spec.attributes.get("beta", 1.0))
    trans_a, trans_b = bool(spec.attributes.get("transA", 0)), bool(spec.attributes.get("transB", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a = inputs[0].T if trans_a else inputs[0]
        b = inputs[1].T if trans_b else inputs[1]
        result = a @ b
        if alpha != 1.0:
            result = result * a.dtype.type(alpha)
        if len(inputs) > 2 and inputs[2] is not None:
            result = result + (inputs[2] if beta == 1.0 else inputs[2] * a.dtype.type(beta))
        return (result,)

    return kernel
