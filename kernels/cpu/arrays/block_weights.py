"""Ops with block-quantised weights as functions of arrays: look-ups, matmuls and experts.

The calls are cached for each shape of the operands.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32, check
from ...ir import Constants, MoE
from ...weight_layout import BlockMatrix
from ..jit.arguments import Binding
from ..linear.activations import input_bytes, input_call, inputs_at
from ..linear.calls import Affine, decode_call
from ..linear.embedding import gather_blocks
from ..moe.mixture import mixture_phases, mixture_size
from ..program.bound_program import BoundPrograms, NodeProgram
from ..program.calls import Rows, program_of
from ..program.lower import mixture_of
from ..program.packed_weights import PackedWeights
from ..program.step_table import StepField
from ..program.thread_pool import Threads, own_memory, rows_context

# Rough costs on one thread, in nanoseconds, used to decide whether to share the work.
_NANOSECONDS_PER_LOOKED_UP = 1.5
_NANOSECONDS_PER_WEIGHT = 0.05
_NANOSECONDS_PER_PRODUCT = 0.01
_NANOSECONDS_PER_EXPERT_BYTE = 0.1
_KEPT = 8


def block_rows(tokens: NDArray[np.int64], table: BlockMatrix, *, threads: Threads | None = None) -> Float32:
    """Return table[tokens] as float32 [T, columns].

    Args:
        tokens: int64 [T].
        table: matrix packed for matmuls, so that a tied head can share it.

    Raises:
        ValueError: tokens have the wrong type or shape.
        IndexError: a token is outside the table.
    """
    check("tokens", tokens, (None,), np.dtype(np.int64))
    if tokens.size and (tokens.min() < 0 or tokens.max() >= table.rows):
        bad = tokens[(tokens < 0) | (tokens >= table.rows)][0]
        raise IndexError(f"token {bad} is outside the embedding table of {table.rows} rows")
    out = np.empty((tokens.size, table.columns), np.float32)
    if tokens.size:
        context = rows_context(tokens.size)
        context.array(StepField.TOKEN_IDS, tokens)
        program = program_of([[gather_blocks(table, Rows.of(out))]])
        (threads or Threads(1)).run(program, context, nanoseconds=out.size * _NANOSECONDS_PER_LOOKED_UP)
    return out


class BlockLinear:
    """The linear layer x @ matrix.T + bias + addend.

    A row of the result depends only on its row of x: it is bit-identical whatever the rest of the batch is.

    Args:
        bias: float32 [rows].
        exact: True to keep activations in float32; otherwise they are quantised to 8 bits per row and block (accuracy
            level 4).
        threads: None = only the calling thread.
    """

    def __init__(
        self, matrix: BlockMatrix, bias: Float32 | None = None, *, exact: bool = False, threads: Threads | None = None
    ) -> None:
        if bias is not None:
            check("bias", bias, (matrix.rows,))
        self._matrix, self._bias, self._exact, self._threads = matrix, bias, exact, threads
        self._programs: BoundPrograms[NodeProgram] = BoundPrograms()

    def __call__(self, x: Float32, addend: Float32 | None = None) -> Float32:
        """Return the result as a new array. An infinity or NaN in a row of x reaches all results of the row.

        Args:
            x: float32 [T, columns].
            addend: float32 [T, rows], such as the term of a low-rank adapter.
        """
        matrix, tokens = self._matrix, x.shape[0]
        check("x", x, (None, matrix.columns))
        if addend is not None:
            check("addend", addend, (tokens, matrix.rows))
        out = np.empty((tokens, matrix.rows), np.float32)
        if tokens:
            inputs = own_memory("inputs", input_bytes(matrix, tokens, exact=self._exact))
            program = self._programs.get(self._made, addend is not None)
            program.run(self._threads, tokens, x=x, inputs=inputs, addend=addend, out=out)
        return out

    def _made(self, has_addend: bool) -> NodeProgram:
        matrix = self._matrix
        x = Rows(Binding("x"), 4 * matrix.columns, matrix.columns)
        out, addend = (Rows(Binding(name), 4 * matrix.rows, matrix.rows) for name in ("out", "addend"))
        projection = Affine(matrix, self._bias, addend if has_addend else None)
        inputs = inputs_at(Binding("inputs"), matrix, StepField.TOKENS, exact=self._exact)
        phases = [[input_call(x, inputs)], [decode_call(inputs, projection, out)]]
        if self._exact and x.width == matrix.padded_columns:
            phases = [[decode_call(x, projection, out)]]
        weights = matrix.rows * matrix.columns
        return NodeProgram(phases, weights * _NANOSECONDS_PER_WEIGHT, weights * _NANOSECONDS_PER_PRODUCT)


class MoEOfArrays:
    """A mixture of experts that maps x float32 [T, H] and scores [T, E] to [T, H]."""

    def __init__(self, op: MoE, weights: PackedWeights, constants: Constants, threads: Threads) -> None:
        self._mixture = mixture_of(op, weights, constants)
        self._threads = threads
        self._programs: BoundPrograms[NodeProgram] = BoundPrograms(_KEPT)

    def __call__(self, x: Float32, scores: Float32) -> Float32:
        """Return the weighted sums of the selected experts' results."""
        mixture, tokens = self._mixture, len(x)
        first, second = mixture.first.matrices, mixture.second.matrices
        check("x", x, (None, first.columns))
        check("scores", scores, (tokens, first.experts))
        out = np.empty((tokens, second.rows), np.float32)
        if not tokens:
            return out
        capacity = 1 << (tokens - 1).bit_length()
        memory = own_memory("experts", mixture_size(mixture, capacity))
        program = self._programs.get(self._program, capacity)
        program.run(self._threads, tokens, x=x, scores=scores, out=out, memory=memory)
        return out

    def _program(self, capacity: int) -> NodeProgram:
        mixture, first, second = self._mixture, self._mixture.first.matrices, self._mixture.second.matrices
        widths = {"x": first.columns, "scores": first.experts, "out": second.rows}
        rows = {name: Rows(Binding(name), 4 * width, width) for name, width in widths.items()}
        phases = mixture_phases(mixture, **rows, memory=Binding("memory"), capacity=capacity)
        return NodeProgram(phases, 0.0, mixture.per_token * first.expert_bytes * _NANOSECONDS_PER_EXPERT_BYTE)
