"""Scale distillation: trains scales and codes to minimise the error of the outputs, compared with the float matrix.

The loss of a matrix is the squared error of its outputs, L = tr((V - W) G (V - W).T), where G is the mean of
outer(x, x) over the inputs, damped as in GPTQ. The gradient of L is 2 (V - W) G. With V = s (q - z), dL/ds of a block
is the sum, over the block's columns, of q - z times the gradient. Two steps alternate, and neither can increase L:

- Scales, with fixed codes. L is quadratic in a row's scales. Conjugate gradients (Hestenes & Stiefel 1952) find the
  minimum without a learning rate, for all rows together. (DWQ of mlx-lm and OmniQuant, arXiv 2308.13137, also train
  scales, with Adam.)
- Codes, with fixed scales. Column by column, each code is replaced with the best code given all others (coordinate
  descent; QuantEase, Behdin et al. 2023, arXiv 2309.01885).

Training starts from GPTQ's result. Each row keeps the best solution found, evaluated in the form in which it would be
stored. The result is therefore never worse than GPTQ's in this loss.

If the float model has inputs y that differ from the quantised model's inputs x (because preceding layers are already
quantised), W is replaced with the matrix that best reproduces the float model's outputs from x: W C inv(G), where C is
the mean of outer(y, x).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..grids import CodedBlocks, CodeGrid, Float32, in_blocks, reciprocal
from .base import InputStatistics, Method, MethodResult, by_rows, required, required_gram
from .gptq import DAMPING, Rounding, mean_square
from .search import find_searched

ROUNDS, _GRADIENTS = 4, 12
# The damping of G when G is inverted for the target. It pulls the target towards the float matrix.
_PULL = 0.05
_PANEL = 128


def distill(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None) -> MethodResult:
    """Quantise a matrix as described in the module docstring.

    Raises:
        QuantizationError: the Gram matrix of the inputs is missing.
    """
    columns = weight.shape[1]
    gram = required_gram(inputs, "distill", columns)
    statistics = required(inputs, "distill", columns)
    aim = aim_of(statistics)
    rounding = Rounding(gram, grid.block_size)
    damped = gram.astype(np.float32)
    damped.reshape(-1)[:: columns + 1] += DAMPING * mean_square(gram)
    losses: list[Losses] = []

    def work(part: NDArray[Any], own: CodeGrid) -> CodedBlocks:
        target = aim(np.asarray(part, np.float32))
        training = _Training(target, damped, own, rounding.run(target, own))
        for _ in range(ROUNDS):
            training.fit_scales()
            training.fit_codes()
        losses.append(training.losses)
        return training.best

    blocks = by_rows(weight, grid, work)
    # The parts are sorted so that the order of threads does not change the sums.
    before, after, total = (sum(sorted(parts)) for parts in zip(*losses, strict=True))
    notes = {"loss_before": before / (total or 1.0), "loss_after": after / (total or 1.0)}
    return MethodResult(blocks, grid, {**rounding.notes, **notes})


def aim_of(inputs: InputStatistics) -> Callable[[Float32], Float32]:
    """Return a function that maps a float matrix to the target of the training.

    The target's outputs from the quantised model's inputs best match the float matrix's outputs in the float model.
    """
    if inputs.cross is None or inputs.gram is None:
        return lambda exact: exact
    pull = np.eye(len(inputs.gram)) * _PULL * mean_square(inputs.gram)
    solution = np.linalg.solve((inputs.gram + pull).T, (inputs.cross + pull).T).T  # cross @ inv(gram), damped
    matrix = solution.astype(np.float32)
    return lambda exact: exact @ matrix


class Losses(NamedTuple):
    """Squared errors of some rows' outputs before and after training, and the total square of the outputs."""

    before: float
    after: float
    total: float


class _Training:
    """The training of a matrix.

    Attributes:
        best: the best blocks so far, by row.
    """

    def __init__(self, target: Float32, gram: Float32, grid: CodeGrid, start: CodedBlocks) -> None:
        self._target, self._gram, self._grid, self._columns = target, gram, grid, target.shape[1]
        self._scales, self._zeros, self._codes = start.scales.copy(), start.zeros, start.codes.copy()
        self.best = start
        self._losses = self._loss(self._stored())[0]
        self._total = float(np.einsum("ij,ij->", target @ gram, target))
        self._before = float(self._losses.sum())

    @property
    def losses(self) -> Losses:
        """The losses before training and now, and the total by which they are divided."""
        return Losses(self._before, float(self._losses.sum()), self._total)

    def fit_scales(self) -> None:
        """Find the scales with the smallest loss for the current codes."""
        offsets = self._offsets()
        _, gradient = self._loss(self._flat(offsets * self._scales[..., None]))
        remaining = -self._by_scale(gradient, offsets)
        # Preconditioning: each scale is weighted by the size of its block, so that blocks with large and small weights
        # converge at the same rate.
        weights = np.einsum("rbi,bi->rb", offsets**2, in_blocks(np.diag(self._gram)[None], self._grid.block_size)[0])
        inverse = reciprocal(weights)
        move = np.zeros_like(self._scales)
        prepared = remaining * inverse
        direction, power = prepared.copy(), _dot(remaining, prepared)
        for _ in range(_GRADIENTS):
            curved = self._by_scale(self._flat(offsets * direction[..., None]) @ self._gram, offsets)
            length = _ratio(power, _dot(direction, curved))
            move += length[:, None] * direction
            remaining -= length[:, None] * curved
            prepared = remaining * inverse
            after = _dot(remaining, prepared)
            direction = prepared + _ratio(after, power)[:, None] * direction
            power = after
        self._scales, self._zeros = self._grid.settled(self._scales + move, self._zeros)
        self._keep()

    def fit_codes(self) -> None:
        """Replace each code with the best code, given all other codes and the scales."""
        stored, size = self._stored(), self._grid.block_size
        gradient = np.ascontiguousarray(self._loss(stored)[1].T)  # [columns, rows]
        values, codes = np.ascontiguousarray(stored.T), self._codes.reshape(len(stored), -1)
        inverse, points = reciprocal(self._scales), self._grid.points
        for first in range(0, self._columns, _PANEL):
            last = min(first + _PANEL, self._columns)
            inside, moved = gradient[first:last].copy(), np.empty((last - first, len(stored)), np.float32)
            for j in range(first, last):
                block, column = j // size, j - first
                wanted = values[j] - inside[column] / self._gram[j, j]
                found = self._grid.codes(wanted * inverse[:, block] + self._zeros[:, block])
                new = (points[found] - self._zeros[:, block]) * self._scales[:, block]
                moved[column] = new - values[j]
                codes[:, j] = found
                inside += self._gram[first:last, j, None] * moved[column]
            gradient += self._gram[:, first:last] @ moved
        self._keep()

    def _keep(self) -> None:
        """Save the rows whose loss has decreased."""
        losses, _ = self._loss(self._stored())
        better = losses < self._losses
        self._losses = np.where(better, losses, self._losses)
        rows = better[:, None]
        self.best = CodedBlocks(
            np.where(rows[..., None], self._codes, self.best.codes),
            np.where(rows, self._scales, self.best.scales),
            np.where(rows, self._zeros, self.best.zeros),
            self._columns,
        )

    def _offsets(self) -> Float32:
        """Return points minus zeros, [rows, blocks, block_size], with 0 after the last column."""
        offsets = self._grid.points[self._codes] - self._zeros[..., None]
        offsets.reshape(len(offsets), -1)[:, self._columns :] = 0
        return offsets

    def _stored(self) -> Float32:
        return self._flat(self._offsets() * self._scales[..., None])

    def _flat(self, blocks: Float32) -> Float32:
        return blocks.reshape(len(blocks), -1)[:, : self._columns]

    def _by_scale(self, gradient: Float32, offsets: Float32) -> Float32:
        """Return half the gradient with respect to scales, from half the gradient with respect to weights."""
        result: Float32 = np.einsum("rbi,rbi->rb", in_blocks(gradient, self._grid.block_size), offsets)
        return result

    def _loss(self, stored: Float32) -> tuple[Float32, Float32]:
        """Return the squared error of the outputs per row, and half its gradient with respect to the weights."""
        difference = stored - self._target
        gradient: Float32 = np.matmul(difference, self._gram, dtype=np.float32)
        losses: Float32 = np.einsum("ij,ij->i", gradient, difference)
        return losses, gradient


def _dot(a: Float32, b: Float32) -> Float32:
    result: Float32 = np.einsum("rb,rb->r", a, b)
    return result


def _ratio(above: Float32, below: Float32) -> Float32:
    """Return above / below, or 0 for converged rows."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


METHOD = Method(
    "distill",
    "gram",
    distill,
    find_searched,
    "trains scales and codes on the float matrix's outputs, starting from GPTQ",
)
