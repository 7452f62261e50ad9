"""The array kernels that common models need, for compilation without a model."""

from __future__ import annotations

from ..sources import CudaKernel
from .launches import ANY_FUNCTIONS, ANY_PAIRS, COMPARISONS, FLOAT_FUNCTIONS, FLOAT_PAIRS, map_kernel
from .linear import channel_kernel, pool_kernel, product_kernel
from .rows import (
    REDUCTIONS,
    gather_kernel,
    gather_tuples_kernel,
    norm_rows_kernel,
    pad_kernel,
    reduce_kernel,
    softmax_kernel,
)

# C++ types of floats, and the number of floats in 16 bytes.
_FLOATS = {"float": 4, "half_bits": 8}
_LAYOUTS = ("ALONG_K", "ALONG_LINES")


def array_kernels() -> list[CudaKernel]:
    """Return the kernels for all elementwise functions, once each, and for all layouts of matmuls, rows and windows."""
    found = [kernel for scalar, width in _FLOATS.items() for kernel in _of_floats(scalar, width)]
    for scalar, width in (("int", 4), ("long long", 2)):
        found += [map_kernel(1, function, scalar, scalar, width) for function in ANY_FUNCTIONS.values()]
        found += [map_kernel(2, function, scalar, scalar, width) for function in ANY_PAIRS.values()]
        found += [map_kernel(2, function, scalar, "unsigned char", width) for function in COMPARISONS.values()]
        found += [reduce_kernel(scalar, kind, False) for kind in REDUCTIONS.values()]
        found.append(map_kernel(1, "whole::copy", scalar, "float", width))
    found += [map_kernel(1, "whole::copy", scalar, scalar, 8) for scalar in ("unsigned char", "unsigned short")]
    found += [
        gather_kernel(nbytes, width, index) for nbytes, width in ((4, 4), (2, 8)) for index in ("int", "long long")
    ]
    found += [gather_tuples_kernel(4, 4, "long long"), *(pad_kernel(nbytes) for nbytes in (2, 4, 8))]
    return found


def _of_floats(scalar: str, width: int) -> list[CudaKernel]:
    found = [map_kernel(1, function, scalar, scalar, width) for function in FLOAT_FUNCTIONS.values()]
    found += [map_kernel(2, function, scalar, scalar, width) for function in FLOAT_PAIRS.values()]
    found += [map_kernel(3, "choose", "unsigned char", scalar, width), map_kernel(3, "scale_shift", scalar, scalar, 1)]
    for tile in (64, 128):
        for function in ("copy", "relu", "gelu"):
            found += [product_kernel(scalar, function, tile, a, b) for a in _LAYOUTS for b in _LAYOUTS]
            found.append(product_kernel(scalar, function, tile, "ALONG_K", "WINDOWS"))
    found += [channel_kernel(scalar, function) for function in ("copy", "relu", "clip")]
    found += [pool_kernel(scalar, kind) for kind in ("Largest", "Mean")]
    for block in (True, False):
        found += [softmax_kernel(scalar, block, logarithm) for logarithm in (True, False)]
        found += [norm_rows_kernel(scalar, block, centred) for centred in (True, False)]
        found += [reduce_kernel(scalar, kind, block) for kind in REDUCTIONS.values()]
    return found
