"""Named weight formats and grids, and functions that create further formats.

`kernels.weights` defines formats and the formula that they share. The families are:

- uniform: `uniform_format(bits, block_size)` with `uniform_grid`; symmetric, or with zero points.
- two levels: `Q2_K` to `Q6_K` (and `IQ4_XS`): groups of 256 columns have floats, and blocks of 16 or 32 columns have
  integers.
- non-uniform grid: `IQ4_NL`, `MXFP4`, NF4 and others (`GRIDS`), or `row_scaled_format(bits, block_size)`: one float per
  row, 8 bits per block, and any grid of 2 to 4 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import ROW, WeightFormat, uniform_format as uniform_format, uniform_grid as uniform_grid

# llama.cpp's k-quants (ggml-common.h): codes, and a multiplier and a minimum per block.
Q2_K = WeightFormat(2, 16, 256, multiplier_bits=4, offset_bits=4)
Q3_K = WeightFormat(3, 16, 256, multiplier_bits=6, signed=True)
Q4_K = WeightFormat(4, 32, 256, multiplier_bits=6, offset_bits=6)
Q5_K = WeightFormat(5, 32, 256, multiplier_bits=6, offset_bits=6)
Q6_K = WeightFormat(6, 16, 256, multiplier_bits=8, signed=True)
IQ4_XS = WeightFormat(4, 32, 256, multiplier_bits=6, signed=True)
IQ4_NL = WeightFormat(4, 32, 32)
MXFP4 = WeightFormat(4, 32, 32)

# ik_llama.cpp's grids with 3 and 2 bits (iqk_quantize.cpp, iq3nl_values and iq2nl_values).
_IQ3 = (-63, -40, -23, -10, 1, 13, 28, 47)
_IQ2 = (-31, -13, 1, 17)
_NF4 = (  # Dettmers et al. 2023, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' 4-bit floats in the order of its decoder: a sign and a magnitude.
_FP4_HALF = (0.0, 5.208333333e-03, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_MXFP4_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1: OCP Microscaling Formats 1.0
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml-common.h, kvalues_iq4nl

GRIDS: dict[str, NDArray[np.float32]] = {
    "nf4": np.array(_NF4, np.float32),
    "fp4": np.array([*_FP4_HALF, *(-value for value in _FP4_HALF)], np.float32),
    "mxfp4": np.array([*_MXFP4_HALF, *(-value for value in _MXFP4_HALF)], np.float32),
    "iq4": np.array(_IQ4, np.float32),
    "iq3": np.array(_IQ3, np.float32),
    "iq2": np.array(_IQ2, np.float32),
}


def row_scaled_format(bits: int, block_size: int, multiplier_bits: int = 8) -> WeightFormat:
    """Return a format with one float per row and a signed integer per block of 16 or 32 (larger blocks also work)."""
    return WeightFormat(bits, block_size, ROW, multiplier_bits=multiplier_bits, signed=True)
