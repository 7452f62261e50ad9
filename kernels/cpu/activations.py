"""Activation functions on arrays, alone or gating another projection (SwiGLU, GEGLU: Shazeer 2020)."""

from __future__ import annotations

from .checks import Float32, check, check_rows, output
from .jit import NativeOp
from .rowwise.arrays import elementwise_of
from .rowwise.binary import gate_op
from .rowwise.layout import pieces_of
from .rowwise.unary import unary_op
from .team import Team, run

_NANOSECONDS_PER_ELEMENT = 0.7


def erf(x: Float32, *, team: Team | None = None) -> Float32:
    """The error function, element by element; x is float32 and contiguous, of any shape.

    Raises:
        ValueError: x is of another type, or not contiguous.
    """
    return _alone(unary_op("erf"), x, None, 0.0, team)


def swiglu(gate: Float32, up: Float32, out: Float32 | None = None, *, team: Team | None = None) -> Float32:
    """silu(gate) * up.

    Args:
        gate, up: float32 [T, F]; each row must be contiguous, so halves of one [T, 2 F] array will do.
        out: float32 [T, F] or None.

    Raises:
        ValueError: a shape or type does not fit.
    """
    return _gated(gate_op("silu"), gate, up, out, team)


def geglu(gate: Float32, up: Float32, out: Float32 | None = None, *, team: Team | None = None) -> Float32:
    """gelu(gate) * up with the tanh form of GELU; otherwise as `swiglu`."""
    return _gated(gate_op("gelu_tanh"), gate, up, out, team)


def silu(x: Float32, out: Float32 | None = None, *, team: Team | None = None) -> Float32:
    """x * sigmoid(x), element by element; x is float32 and contiguous, of any shape."""
    return _alone(unary_op("silu"), x, out, 0.0, team)


def quick_gelu(x: Float32, out: Float32 | None = None, *, alpha: float = 1.702, team: Team | None = None) -> Float32:
    """x * sigmoid(alpha * x), as com.microsoft::QuickGelu; x is float32 and contiguous, of any shape."""
    return _alone(unary_op("quick_gelu"), x, out, alpha, team)


def gelu(x: Float32, out: Float32 | None = None, approximate: bool = False, *, team: Team | None = None) -> Float32:
    """GELU (Hendrycks & Gimpel 2016), exact by erf or approximate by tanh; x is float32, contiguous, of any shape."""
    return _alone(unary_op("gelu_tanh" if approximate else "gelu"), x, out, 0.0, team)


def _gated(op: NativeOp, gate: Float32, up: Float32, out: Float32 | None, team: Team | None) -> Float32:
    check_rows("gate", gate, (None, None))
    check_rows("up", up, gate.shape)
    out = output("out", out, gate.shape)
    items = gate.shape[0] * pieces_of(gate.shape[1])
    work = gate.size * _NANOSECONDS_PER_ELEMENT
    run(team, elementwise_of, (op.address, gate, up, out, 0.0, 0.0), items, work=work)
    return out


def _alone(op: NativeOp, x: Float32, out: Float32 | None, parameter: float, team: Team | None) -> Float32:
    check("x", x, x.shape)
    out = output("out", out, x.shape)
    row, out_row = x.reshape(1, -1), out.reshape(1, -1)
    arguments = (op.address, row, row, out_row, parameter, 0.0)
    run(team, elementwise_of, arguments, pieces_of(x.size), work=x.size * _NANOSECONDS_PER_ELEMENT)
    return out
