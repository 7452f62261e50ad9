"""Functions of NumPy arrays that are compiled for the host's processor."""

from __future__ import annotations

from ..cpu import trees
from ..cpu.arrays import BlockLinear, activation, block_rows, gated, norm, norm_of_sum, softmax_rows
from ..cpu.blas import matmul
from ..cpu.byte_functions import QParams, combined_bytes, looked_up
from ..cpu.bytes import dequantized_bytes, quantized_bytes, quantized_to_range
from ..cpu.depthwise import depthwise, finish_channels
from ..cpu.gemm.convolution import Convolution, IntegerConvolution, supported
from ..cpu.gemm.dense_attention import DenseAttention
from ..cpu.gemm.linear import IntegerLinear, IntegerMatMul, Linear
from ..cpu.gemm.packing import pack_integer_kernels, pack_integer_weight, pack_kernels, pack_weight
from ..cpu.gemm.windows import Windows, window_columns
from ..cpu.products.calls import has_bfloat_products
from ..cpu.products.forms import pack_form
from ..cpu.products.packing import pack_matrix
from ..cpu.products.sums import SumOfProducts
from ..cpu.program.pool import Threads

__all__ = [
    "BlockLinear", "Convolution", "DenseAttention", "QParams", "IntegerConvolution", "IntegerLinear", "IntegerMatMul",
    "Linear", "SumOfProducts", "Threads", "Windows", "activation", "block_rows", "combined_bytes", "depthwise",
    "dequantized_bytes", "finish_channels", "gated", "has_bfloat_products", "looked_up", "matmul", "norm",
    "norm_of_sum", "pack_form",
    "pack_integer_kernels", "pack_integer_weight", "pack_kernels", "pack_matrix", "pack_weight", "quantized_bytes",
    "quantized_to_range", "softmax_rows", "supported", "trees", "window_columns",
]  # fmt: skip
