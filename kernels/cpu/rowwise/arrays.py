"""The same operators called from Python, on arrays, once: for graphs that run node by node.

These kernels write an operator's arguments on the stack and call its machine code: a small call costs no more than a
kernel of its own would, and there is one arithmetic. Nothing is checked here.
"""

from __future__ import annotations

from typing import Any

from ..jit import LIBRARY, kernel
from ..lazy import inline
from ..memory import stack_words, write_float64, write_int64
from ..tape.driver import call_operator
from . import elementwise, norm
from .binary import gate_op
from .layout import PIECE

NO_CONTEXT = NO_SCRATCH = 0

# What most decoders use; the other operators are compiled when they are first called.
for _op in (norm.norm_op(False, False), norm.norm_op(False, True), gate_op("silu")):
    LIBRARY.include(_op)


@inline
def _put(arguments: int, index: int, value: int) -> None:
    write_int64(arguments + 8 * index, value)


@inline
def _put_array(arguments: int, index: int, array: Any) -> None:
    """The address of an array, or 0 if it has no entries, and (of more than one axis) its first stride."""
    _put(arguments, index, array.ctypes.data if array.shape[0] > 0 else 0)
    if array.ndim > 1:
        _put(arguments, index + 1, array.strides[0])


@kernel(
    "void(int64, float32[:,:,:], float32[:,::1], float32[::1], float32[::1], float32[::1], float64, "
    "float32[:,:,:], float32[:,::1], int64, int64)"
)
def normalize(
    op: int, x: Any, skip: Any, input_bias: Any, weight: Any, shift: Any, epsilon: float, out: Any, total: Any,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Rows [begin, end) of x [T, groups, F], each group alone; see `norm`. Absent arrays have no entries."""
    groups = x.shape[1]
    arguments = stack_words()
    _put_array(arguments, norm.X, x)
    _put_array(arguments, norm.SKIP, skip)
    _put_array(arguments, norm.INPUT_BIAS, input_bias)
    _put_array(arguments, norm.TOTAL, total)
    _put_array(arguments, norm.OUT, out)
    _put_array(arguments, norm.WEIGHT, weight)
    _put_array(arguments, norm.SHIFT, shift)
    _put(arguments, norm.VECTOR_STEP, 0)
    _put(arguments, norm.GROUPS, groups)
    _put(arguments, norm.SIZE, x.shape[2])
    write_float64(arguments + 8 * norm.EPSILON, epsilon)
    call_operator(op, arguments, NO_CONTEXT, begin * groups, end * groups, NO_SCRATCH)


@kernel("void(int64, float32[:,:], float32[:,:], float32[:,:], float64, float64, int64, int64)")
def elementwise_of(op: int, a: Any, b: Any, out: Any, p: float, q: float, begin: int, end: int) -> None:
    """Items [begin, end) of an element by element operator of one or two arrays; see `elementwise`."""
    arguments = stack_words()
    _put_array(arguments, elementwise.A, a)
    _put(arguments, elementwise.A_STEP, 4)
    _put_array(arguments, elementwise.B, b)
    _put(arguments, elementwise.B_STEP, 4)
    _put_array(arguments, elementwise.OUT, out)
    _put(arguments, elementwise.WIDTH, out.shape[1])
    _put(arguments, elementwise.PIECES, max(1, -(-out.shape[1] // PIECE)))
    write_float64(arguments + 8 * elementwise.P, p)
    write_float64(arguments + 8 * elementwise.Q, q)
    call_operator(op, arguments, NO_CONTEXT, begin, end, NO_SCRATCH)
