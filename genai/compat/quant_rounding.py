"""The former API of `genai.quant.rounding`, implemented with `genai.quant.methods`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import ROW, QuantizedWeight, WeightFormat
from genai.quant.grids import CodebookGrid, CodeGrid, UniformGrid
from genai.quant.methods import METHODS
from genai.quant.two_levels import TwoLevelGrid


def round_to_nearest(
    weight: NDArray[Any], form: WeightFormat, grid: NDArray[np.float32] | None = None, *, half_scales: bool = True
) -> QuantizedWeight:
    """Quantise a matrix [rows, columns] by rounding to nearest.

    Args:
        weight: matrix of any float type.
        form: the format of the result.
        grid: float32 [2 ** bits], the value of each code; None = integers.
        half_scales: True to store scales as float16.

    Raises:
        QuantizationError: weight is not a matrix, contains NaN or infinity, or the grid does not fit the format.
    """
    return METHODS["rtn"].quantize(weight, _grid_of(form, weight.shape[-1], grid, half_scales), None).packed


def _grid_of(format: WeightFormat, columns: int, values: NDArray[np.float32] | None, half_scales: bool) -> CodeGrid:
    by_row = format.block_size == ROW
    size = columns if by_row else format.block_size
    if values is None:
        inner: UniformGrid | CodebookGrid = UniformGrid(
            format.bits, size, not format.offset_bits, half_scales, by_row=by_row
        )
    else:
        inner = CodebookGrid(np.asarray(values, np.float32), size, half_scales=half_scales)
    return TwoLevelGrid(format, inner, half_scales) if format.multiplier_bits else inner
