"""The kernels that usual models need, to compile and to measure without a model."""

from __future__ import annotations

from .attention import SCALAR, heads_together, split_kernels, store_kernel_of
from .experts import SWIGLU, mix_kernel, pairs_gemm_kernel, pairs_gemv_kernel, route_kernels
from .lowering import BINARY, UNARY, apply_kernel, combine_kernel, lookup_kernel, norm_kernel
from .products import ROWS_AT_ONCE, arrange_kernel, gemm_kernel, gemv_kernel
from .sources import CudaKernel
from .weights import DeviceMatrix

# Head size, query heads per KV head: Llama 3, Qwen 2.5 and 3, Phi 3, Gemma 2, and the bundled model.
_HEADS = ((64, 4), (64, 7), (128, 4), (128, 8), (96, 1), (256, 2), (32, 4))


def every_kernel() -> list[CudaKernel]:
    """All of them, each once."""
    found = [apply_kernel(name) for name in UNARY] + [combine_kernel(name) for name in BINARY]
    found += [norm_kernel(centred) for centred in (False, True)]
    matrices = [_matrix(bits, scalar) for bits in (0, 4, 8) for scalar in ("float", "half_bits")]
    matrices.append(_matrix(0, "bfloat_bits"))  # scales of bfloat16 become float32
    found += [lookup_kernel(one.bits, one.scalar) for one in matrices]
    found += [arrange_kernel(form) for form in ("floats", "bfloats", "bytes<4>", "bytes<8>")]
    for matrix in matrices:
        exact = (True, False) if matrix.bits else (True,)
        found += [gemv_kernel(matrix, tokens, exact=one) for tokens in ROWS_AT_ONCE for one in exact]
        found.append(gemm_kernel(matrix))
    found += [*route_kernels(), mix_kernel()]
    of_experts = [matrix for matrix in matrices if not matrix.bits or matrix.scalar == "half_bits"]
    for matrix, activation in ((matrix, name) for matrix in of_experts for name in (SWIGLU, "copy")):
        exact = (True, False) if matrix.bits else (True,)
        found += [pairs_gemv_kernel(matrix, activation, most, exact=one) for most in ROWS_AT_ONCE for one in exact]
        found.append(pairs_gemm_kernel(matrix, activation))
    for kind in SCALAR:
        found.append(store_kernel_of(kind))
        for size, group in _HEADS:
            found += split_kernels(kind, size, size, heads_together(group, 1))
    return sorted(set(found), key=lambda kernel: kernel.name)


def _matrix(bits: int, scalar: str) -> DeviceMatrix:
    return DeviceMatrix(1, 1, {}, bits, scalar, 0, ())
