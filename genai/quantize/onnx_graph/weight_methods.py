"""Methods of quantising weights in blocks, by their names in onnxruntime's configurations.

The methods are round-to-nearest, half-quadratic quantisation, searched scales ("k_quant"), and GPTQ, which uses the
inputs of the weights when the model runs on a reader's data. The methods are implemented in `genai.quant`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from genai.kernels.weights import QuantizedWeight
from genai.quant.grids import UniformGrid
from genai.quant.methods import METHODS as ARRAY_METHODS, InputStatistics

from ...errors import InputError
from .calibrate import Calibrator


@dataclass(frozen=True)
class BlockFormat:
    """The storage format of one weight."""

    bits: int
    block_size: int
    is_symmetric: bool


# A function that quantises a matrix [n, k] in blocks along k. The arguments are the matrix, the format, True to round
# scales to float16, and statistics of the inputs (None for a look-up table, or if the method needs no statistics).
BlockMethod = Callable[[NDArray[Any], BlockFormat, bool, InputStatistics | None], QuantizedWeight]


def _by(name: str) -> BlockMethod:
    """Return a method of `genai.quant`. For a table, which has no inputs, the method falls back to searched scales."""

    def quantize(
        weight: NDArray[Any], block_format: BlockFormat, half_scales: bool, inputs: InputStatistics | None
    ) -> QuantizedWeight:
        method = ARRAY_METHODS[name]
        if inputs is None and method.needs != "nothing":
            method = ARRAY_METHODS["search"]
        grid = UniformGrid(block_format.bits, block_format.block_size, block_format.is_symmetric, half_scales)
        return method.quantize(weight, grid, inputs).packed

    return quantize


METHODS: dict[str, BlockMethod] = {
    "DEFAULT": _by("rtn"), "RTN": _by("rtn"), "HQQ": _by("hqq"), "k_quant": _by("search"), "GPTQ": _by("gptq"),
}  # fmt: skip


class _Products:
    """The sum of outer(x, x) over all observed rows x, and the number of rows."""

    def __init__(self) -> None:
        self.count, self.sums = 0, np.zeros((0, 0))

    def observe(self, values: NDArray[Any]) -> None:
        rows = np.asarray(values, np.float32).reshape(-1, values.shape[-1] if values.ndim else 1)
        if not self.count:
            self.sums = np.zeros((rows.shape[1], rows.shape[1]))
        self.count += len(rows)
        self.sums += rows.T @ rows

    def range(self) -> tuple[float, float]:
        raise NotImplementedError


def input_statistics(
    model: onnx.ModelProto, values: Mapping[str, Collection[str]], reader: Any
) -> dict[str, InputStatistics]:
    """Return statistics of the inputs of weights while a float model runs on the data of a reader.

    Args:
        values: for each weight, the names of the values that are multiplied by the weight.

    Raises:
        OptionError: there is no reader.
        InputError: there is no data, a feed does not fit the model, a value contains NaN or infinity, or a value is
            never computed.
    """
    products: dict[str, _Products] = {}
    calibrator = Calibrator(model, _Products)
    calibrator.only(sorted({name for names in values.values() for name in names}))
    calibrator.collect(reader)
    for name, observer in calibrator.observations.observers.items():
        assert isinstance(observer, _Products)
        products[name] = observer
    statistics = {}
    for weight, names in values.items():
        parts = [products[name] for name in sorted(names)]
        for name, part in zip(sorted(names), parts, strict=True):
            if not part.count:
                raise InputError(
                    f"there is no data for {name!r}, which is multiplied by the weight {weight!r}",
                    "the value is infinite or too large"
                    if name in calibrator.observations.unbounded
                    else "the main graph does not compute the value",
                    "keep the node of the weight float (nodes_to_exclude=[...]), or use another method",
                )
        count = sum(part.count for part in parts)
        gram: NDArray[np.float64] = np.sum([part.sums for part in parts], axis=0) / count
        statistics[weight] = InputStatistics(count, np.diag(gram).copy(), gram)
    return statistics
