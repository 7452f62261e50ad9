"""The interface of quantisation methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from genai.common.blas import one_blas_thread
from genai.common.cores import allowed_processors
from genai.kernels.cpu.arrays.rounding import prepare
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
# The number of rows whose error is computed at a time, and the number of weights that a method processes at a time.
_ROWS, _PART_FLOATS = 512, 1 << 24
# The number of columns from which factorising columns x columns matrices gains from several threads of BLAS. With fewer
# columns, BLAS's threads spin after each short product, and occupy the processors that divided work needs.
_BLAS_COLUMNS = 2048


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of a matrix's inputs over the tokens of a calibration text.

    Attributes:
        count: number of input vectors x.
        squares: float64 [columns], the mean of x ** 2.
        gram: float32 or float64 [columns, columns], the mean of outer(x, x); None if the method does not need it.
        cross: like gram, but the mean of outer(y, x), where x is an input in the quantised model and y the same input
            in the float model; None = the same as gram.
    """

    count: int
    squares: Float64
    gram: Floats | None = None
    cross: Floats | None = None

    def scaled(self, factors: NDArray[Any]) -> InputStatistics:
        """Return the statistics of x * factors [columns]."""
        outer = np.multiply.outer(factors, factors)
        return InputStatistics(
            self.count,
            self.squares * factors**2,
            None if self.gram is None else self.gram * outer,
            None if self.cross is None else self.cross * outer,
        )


@dataclass(frozen=True)
class MethodResult:
    """A quantised matrix.

    Attributes:
        blocks: the coded blocks.
        grid: the grid, bound to the matrix.
        notes: remarks for the report, such as increased damping.
    """

    blocks: CodedBlocks
    grid: CodeGrid
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> NDArray[np.float32]:
        """The quantised matrix as float32 [rows, columns]."""
        return self.blocks.values(self.grid)

    @property
    def packed(self) -> QuantizedWeight:
        """The quantised matrix in the stored format."""
        return self.grid.packed(self.blocks)


# A function that quantises a matrix [rows, columns], given the grid bound to it and the statistics of its inputs.
Quantizing = Callable[[NDArray[Any], CodeGrid, InputStatistics | None], MethodResult]


@dataclass(frozen=True)
class Method:
    """A quantisation method.

    Attributes:
        name: name in options.
        needs: required statistics of the inputs: "nothing", "squares" or "gram".
        run: the function that quantises.
        find_scales: returns, given the statistics, the scale search that is used to bind a grid to a matrix.
        summary: one-line description.
        folds: True if columns may be scaled first, where the graph can undo the scaling (AWQ).
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
            weight: the matrix.
            grid: the grid, not yet bound to a matrix.
            inputs: statistics of the matrix's inputs; None if the method needs none.

        Raises:
            QuantizationError: the weight is not a matrix of real numbers, is empty, or contains NaN or infinity; or
                statistics are missing or do not match the matrix.
        """
        check_matrix(weight)
        if self.needs != "nothing":
            required(inputs, self.name, weight.shape[1])
        with one_blas_thread() if weight.shape[1] < _BLAS_COLUMNS else nullcontext():
            return self.run(weight, grid.bound(weight, self.find_scales(inputs)), inputs)


def check_matrix(weight: object) -> None:
    """Raise QuantizationError unless the weight is a non-empty array [rows, columns] of real numbers."""
    if not isinstance(weight, np.ndarray) or weight.ndim != 2 or not weight.size:
        shape = f"of shape {weight.shape}" if isinstance(weight, np.ndarray) else f"a {type(weight).__name__}"
        raise QuantizationError(f"the weight is {shape}, but must be a non-empty array of shape [rows, columns]")
    if weight.dtype.kind not in "fiu" and weight.dtype != ml_dtypes.bfloat16:
        raise QuantizationError(f"the weight has elements of {weight.dtype}, but must contain real numbers")


def block_by_block(
    weight: NDArray[Any], grid: CodeGrid, choose: Callable[[Float32, CodeGrid], tuple[Float32, Float32]]
) -> MethodResult:
    """Quantise a matrix whose blocks are independent, using all cores.

    Args:
        weight: the matrix.
        grid: the grid, bound to the matrix.
        choose: returns the scales and zeros [rows, blocks] to store, given values [rows, blocks, block_size] and the
            grid of these rows.
    """
    rows, columns = weight.shape
    result = empty_blocks(rows, columns, grid.block_size)
    prepare(grid.rounding)

    def work(part: slice) -> None:
        values = in_blocks(weight[part], grid.block_size, first_row=part.start)
        scales, zeros = choose(values, grid.part(part, slice(None)))
        result.scales[part], result.zeros[part] = scales, zeros
        result.codes[part] = coded(values, scales, zeros, grid)

    for _ in in_parallel(work, row_slices(rows, columns)):
        pass
    return MethodResult(result, grid)


def by_rows(weight: NDArray[Any], grid: CodeGrid, work: Callable[[NDArray[Any], CodeGrid], CodedBlocks]) -> CodedBlocks:
    """Quantise a matrix whose rows are independent, a limited number at a time to limit memory use.

    Args:
        weight: the matrix.
        grid: the grid, bound to the matrix.
        work: returns the blocks of some rows, given these rows and their grid.
    """
    rows, columns = weight.shape
    result = empty_blocks(rows, columns, grid.block_size)
    prepare(grid.rounding)
    step = max(1, min(_PART_FLOATS // columns, -(-rows // len(allowed_processors()))))

    def fill(first: int) -> None:
        part = slice(first, min(first + step, rows))
        in_blocks(weight[part], grid.block_size, first_row=first)  # checks that values are finite
        found = work(weight[part], grid.part(part, slice(None)))
        result.scales[part], result.zeros[part], result.codes[part] = found.scales, found.zeros, found.codes

    for _ in in_parallel(fill, list(range(0, rows, step))):
        pass
    return result


def required(inputs: InputStatistics | None, method: str, columns: int) -> InputStatistics:
    """Return the statistics if they match the matrix.

    Raises:
        QuantizationError: the statistics are missing or do not match.
    """
    if inputs is None:
        raise QuantizationError(f"{method} needs statistics of the inputs, but none were given")
    if inputs.squares.shape != (columns,):
        raise QuantizationError(
            f"{method}: the statistics are for {inputs.squares.shape[0]} inputs, but the matrix has {columns} columns"
        )
    if not np.isfinite(inputs.squares).all():
        raise QuantizationError(f"{method}: the statistics of the inputs contain NaN or infinity")
    return inputs


def required_gram(inputs: InputStatistics | None, method: str, columns: int) -> Floats:
    """Return the Gram matrix of the inputs [columns, columns]; same errors as `required`."""
    gram = required(inputs, method, columns).gram
    if gram is None or gram.shape != (columns, columns):
        raise QuantizationError(f"{method} needs the Gram matrix of the inputs as float64 [{columns}, {columns}]")
    return gram


def output_error(weight: NDArray[Any], stored: NDArray[Any], inputs: InputStatistics) -> float:
    """Return the relative squared error of the outputs: ||(W - V) X|| ** 2 / ||W X|| ** 2."""
    total = output_square(weight, inputs)
    return output_square(weight - stored, inputs) / total if total else 0.0


def output_square(matrix: NDArray[Any], inputs: InputStatistics) -> float:
    """Return the mean square of a matrix's outputs, summed over its rows.

    Without a Gram matrix, inputs are assumed to be independent.
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
