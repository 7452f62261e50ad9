"""Ways to round weights in blocks, by the names that onnxruntime's configurations have for them.

Rounding to nearest, half-quadratic quantisation, searched scales ("k_quant"), and GPTQ, whose inputs are those that the
model has for the data of a reader. What they do is in `genai.quant`.
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
    """How one weight is stored."""

    bits: int
    block_size: int
    is_symmetric: bool


# From a matrix [n, k], a format, whether scales are those of float16, and statistics of its inputs (None = it is looked
# up, or the method needs none), to blocks along k.
BlockMethod = Callable[[NDArray[Any], BlockFormat, bool, InputStatistics | None], QuantizedWeight]


def _by(name: str) -> BlockMethod:
    """A method of `genai.quant`; a table, which has no inputs, has its scales searched."""

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
    """The sum of outer(x, x) over the rows x that it is shown, and their number."""

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
    """What weights are multiplied with while a float model runs on the data of a reader.

    Args:
        values: by weight the values that it is multiplied with.

    Raises:
        OptionError: no reader. InputError: no data, feeds that do not fit the model, NaN or infinity, or a value that
            the data never reaches.
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
                    f"there is no data for {name!r}, with which the weight {weight!r} is multiplied",
                    "it is infinite or too large"
                    if name in calibrator.observations.unbounded
                    else "the main graph does not make it",
                    "keep its node float: nodes_to_exclude=[...], or use another method",
                )
        count = sum(part.count for part in parts)
        gram: NDArray[np.float64] = np.sum([part.sums for part in parts], axis=0) / count
        statistics[weight] = InputStatistics(count, np.diag(gram).copy(), gram)
    return statistics
