"""What every method of quantisation takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from genai.common.cores import allowed_processors
from genai.kernels.weights import QuantizationError, QuantizedWeight

from ..grids import (
    CodedBlocks,
    CodeGrid,
    FindScales,
    Float32,
    coded,
    empty_blocks,
    in_blocks,
    in_parallel,
    row_slices,
)

Float64 = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
# Rows whose error is computed at once, and weights that a method works on at once.
_ROWS, _PART_FLOATS = 512, 1 << 24


@dataclass(frozen=True)
class InputStatistics:
    """What a matrix is multiplied with, over the tokens of a calibration text.

    Attributes:
        count: vectors x that were seen.
        squares: float64 [columns], mean of x ** 2.
        gram: float32 or float64 [columns, columns], mean of outer(x, x); None where the method does not need it.
        cross: likewise, mean of outer(y, x), where y is what the float model has in place of x, the
            input in the quantised model; None = the same as gram.
    """

    count: int
    squares: Float64
    gram: Floats | None = None
    cross: Floats | None = None

    def scaled(self, factors: NDArray[Any]) -> InputStatistics:
        """Those of x * factors [columns]."""
        outer = np.multiply.outer(factors, factors)
        return InputStatistics(
            self.count,
            self.squares * factors**2,
            None if self.gram is None else self.gram * outer,
            None if self.cross is None else self.cross * outer,
        )


@dataclass(frozen=True)
class MethodResult:
    """A matrix as a method left it.

    Attributes:
        blocks: what is to be stored. grid: bound to the matrix.
        notes: what a report should say, such as a damping that had to be raised.
    """

    blocks: CodedBlocks
    grid: CodeGrid
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> NDArray[np.float32]:
        """The matrix that is stored, float32 [rows, columns]."""
        return self.blocks.values(self.grid)

    @property
    def packed(self) -> QuantizedWeight:
        """It as a model stores it."""
        return self.grid.packed(self.blocks)


# What a method does with a matrix [rows, columns], the grid that is bound to it, and the statistics of its inputs.
Quantizing = Callable[[NDArray[Any], CodeGrid, InputStatistics | None], MethodResult]


@dataclass(frozen=True)
class Method:
    """A way to choose codes.

    Attributes:
        name: as users say it.
        needs: "nothing", "squares" or "gram": which statistics of the inputs.
        run: what it does. find_scales: by which a grid is bound to a matrix before, given the statistics.
        summary: in one line.
        folds: whether columns may be scaled first, where the graph can undo it (AWQ).
    """

    name: str
    needs: str
    run: Quantizing
    find_scales: Callable[[InputStatistics | None], FindScales]
    summary: str
    folds: bool = False

    def quantize(self, weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None) -> MethodResult:
        """Quantise a matrix [rows, columns].

        Args:
            inputs: statistics of what it is multiplied with; None if the method needs nothing.

        Raises:
            QuantizationError: no matrix of real numbers, or an empty one; NaN or infinity in it; statistics that are
                missing or do not fit.
        """
        check_matrix(weight)
        if self.needs != "nothing":
            required(inputs, self.name, weight.shape[1])
        return self.run(weight, grid.bound(weight, self.find_scales(inputs)), inputs)


def check_matrix(weight: object) -> None:
    """Raises QuantizationError: it is no array [rows, columns] of real numbers, or an empty one."""
    if not isinstance(weight, np.ndarray) or weight.ndim != 2 or not weight.size:
        shape = f"of shape {weight.shape}" if isinstance(weight, np.ndarray) else f"a {type(weight).__name__}"
        raise QuantizationError(f"the weight is {shape}, expected an array [rows, columns] that is not empty")
    if weight.dtype.kind not in "fiu" and weight.dtype != ml_dtypes.bfloat16:
        raise QuantizationError(f"the weight has elements of {weight.dtype}, expected real numbers")


def block_by_block(
    weight: NDArray[Any], grid: CodeGrid, choose: Callable[[Float32, CodeGrid], tuple[Float32, Float32]]
) -> MethodResult:
    """A matrix whose blocks do not depend on each other, on all cores.

    Args:
        choose: given values [rows, blocks, block_size] and the grid of these rows, the scales and zeros [rows, blocks]
            as they are stored.
    """
    rows, columns = weight.shape
    result = empty_blocks(rows, columns, grid.block_size)

    def work(part: slice) -> None:
        values = in_blocks(weight[part], grid.block_size, first_row=part.start)
        scales, zeros = choose(values, grid.part(part, slice(None)))
        result.scales[part], result.zeros[part] = scales, zeros
        result.codes[part] = coded(values, scales, zeros, grid)

    for _ in in_parallel(work, row_slices(rows, columns)):
        pass
    return MethodResult(result, grid)


def by_rows(weight: NDArray[Any], grid: CodeGrid, work: Callable[[NDArray[Any], CodeGrid], CodedBlocks]) -> CodedBlocks:
    """A matrix whose rows do not depend on each other, so many at a time that what they need stays small.

    Args:
        work: given some rows and their grid, what is stored of them.
    """
    rows, columns = weight.shape
    result = empty_blocks(rows, columns, grid.block_size)
    step = max(1, min(_PART_FLOATS // columns, -(-rows // len(allowed_processors()))))

    def fill(first: int) -> None:
        part = slice(first, min(first + step, rows))
        in_blocks(weight[part], grid.block_size, first_row=first)  # finite
        found = work(weight[part], grid.part(part, slice(None)))
        result.scales[part], result.zeros[part], result.codes[part] = found.scales, found.zeros, found.codes

    for _ in in_parallel(fill, list(range(0, rows, step))):
        pass
    return result


def required(inputs: InputStatistics | None, method: str, columns: int) -> InputStatistics:
    """The statistics, if they are there and fit.

    Raises:
        QuantizationError: they are not.
    """
    if inputs is None:
        raise QuantizationError(f"{method} needs statistics of the inputs, and none were given")
    if inputs.squares.shape != (columns,):
        raise QuantizationError(
            f"{method}: statistics are of {inputs.squares.shape[0]} inputs, the matrix has {columns} columns"
        )
    if not np.isfinite(inputs.squares).all():
        raise QuantizationError(f"{method}: the statistics of the inputs hold NaN or infinity")
    return inputs


def required_gram(inputs: InputStatistics | None, method: str, columns: int) -> Floats:
    """The inputs' products with each other [columns, columns]; raises as `required` does."""
    gram = required(inputs, method, columns).gram
    if gram is None or gram.shape != (columns, columns):
        raise QuantizationError(f"{method} needs the inputs' products with each other, float64 [{columns}, {columns}]")
    return gram


def output_error(weight: NDArray[Any], stored: NDArray[Any], inputs: InputStatistics) -> float:
    """Mean squared error of the outputs over that of the float weight's: ||(W - V) X|| ** 2 / ||W X|| ** 2."""
    total = output_square(weight, inputs)
    return output_square(weight - stored, inputs) / total if total else 0.0


def output_square(matrix: NDArray[Any], inputs: InputStatistics) -> float:
    """Mean square of a matrix's outputs, summed over its rows.

    Without the inputs' products with each other, inputs count as independent.
    """
    gram = None if inputs.gram is None else inputs.gram.astype(np.float32, copy=False)
    total = 0.0
    for first in range(0, len(matrix), _ROWS):
        rows = np.asarray(matrix[first : first + _ROWS], np.float32)
        if gram is None:
            total += float((rows.astype(np.float64) ** 2 @ inputs.squares).sum())
        else:
            total += float(np.einsum("ij,ij->i", rows @ gram, rows).sum(dtype=np.float64))
    return total
