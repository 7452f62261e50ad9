"""Log-probabilities: the normalizer of a row in float64, and its largest logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import Float32, check
from .jit import kernel
from .lazy import contracted, helper
from .memory import stack_array
from .sampling_steps.batch import SLOT_ARRAYS, Workspace
from .sampling_steps.passes import close, scan
from .sampling_steps.row import COUNT, FINE, MAXIMUM, OPEN, ORDER, STATUS, TOKENS, VALUES, Row, reset
from .sampling_steps.selection import sort
from .sampling_steps.truncation import top_k
from .team import Team, run

_NANOSECONDS_PER_LOGIT = 2.0
_CHUNK = 256
_chunk = stack_array("float64", _CHUNK)
_LOWEST_EXPONENT = -700.0
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_BIAS, _MANTISSA_BITS = np.int64(1023), np.int64(52)


@contracted
def _exp(x: float) -> Any:
    """e ** x within 3e-16 of it, for -700 <= x <= 0; simple enough for the compiler to do several at a time."""
    k = math.floor(x * _LOG2_E + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    # The exponential series up to r ** 13 / 13!: with |r| <= ln 2 / 2 the rest is below 1e-17.
    p = r * (1 / 6227020800) + 1 / 479001600
    p = (p * r + 1 / 39916800) * r + 1 / 3628800
    p = (p * r + 1 / 362880) * r + 1 / 40320
    p = (p * r + 1 / 5040) * r + 1 / 720
    p = (p * r + 1 / 120) * r + 1 / 24
    p = (p * r + 1 / 6) * r + 0.5
    power = np.int64((np.int64(k) + _BIAS) << _MANTISSA_BITS).view(np.float64)
    return (1.0 + (r + r * r * p)) * power


@helper
def _log_normalizer(row: Row, weights: Any) -> Any:
    """log(sum(exp(logits))) of an open row; weights: float64 [_CHUNK], room to work."""
    size, highest = row.given.shape[0], row.state[MAXIMUM]
    total = 0.0
    for first in range(0, size, _CHUNK):
        count = min(_CHUNK, size - first)
        for j in range(count):
            weights[j] = _exp(max(row.given[first + j] - highest, _LOWEST_EXPONENT))
        a = b = c = d = 0.0
        for j in range(0, count - 3, 4):
            a += weights[j]
            b += weights[j + 1]
            c += weights[j + 2]
            d += weights[j + 3]
        for j in range(count // 4 * 4, count):
            a += weights[j]
        total += (a + b) + (c + d)
    return highest + math.log(total)


@helper
def _write_largest(row: Row, out: Any) -> None:
    """Ids of the largest logits, as many as `out` holds."""
    top_k(row, out.shape[0])
    if row.flags[OPEN]:
        close(row, -math.inf)
    count, order = row.flags[COUNT], row.ids[ORDER]
    for i in range(count):
        order[i] = i
    sort(row.numbers[VALUES], order, 0, count)
    for rank in range(count):
        out[rank] = row.ids[TOKENS, order[rank]]


@kernel(f"void(float32[:,::1], int64[::1], {SLOT_ARRAYS}, float64[::1], int64[:,::1], int64, int64)")
def normalize_slots(
    logits: Any, rows: Any, own: Any, blocks: Any, numbers: Any, ids: Any, state: Any, flags: Any, normalizers: Any,
    tokens: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Slots [begin, end): the normalizers of their rows (NaN if the row has none), and their likeliest tokens."""
    weights = _chunk()
    count, slots = rows.shape[0], own.shape[0]
    for slot in range(begin, end):
        for i in range(slot * count // slots, (slot + 1) * count // slots):
            row = Row(logits[rows[i]], own[slot], blocks[slot], numbers[slot], ids[slot], state[slot], flags[slot])
            reset(row)
            scan(row)
            for rank in range(tokens.shape[1]):
                tokens[i, rank] = -1
            if row.flags[STATUS] == FINE:
                normalizers[i] = _log_normalizer(row, weights)
                if tokens.shape[1] > 0:
                    _write_largest(row, tokens[i])
            else:
                normalizers[i] = math.nan


def log_normalizers(
    logits: Float32, rows: NDArray[np.int64], top: int, workspace: Workspace, *, team: Team | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What turns logits into log-probabilities, and the most likely tokens, of some rows.

    Args:
        logits: float32 [B, V]. rows: int64 [A], 0 to B - 1.
        top: how many tokens are wanted, 0 to V.
        workspace: memory for rows of V logits; only one call at a time may use it.

    Returns:
        float64 [A], log(sum(exp(row))): a token's log-probability is its logit less this. NaN for a row with NaN, with
        infinity, or with nothing but -inf.
        int64 [A, top], ids of the largest logits, the largest first, among equals the lowest id. Masked tokens (-inf)
        do not count: a row with fewer others ends in -1.

    Raises:
        ValueError: a shape or type does not fit, or a number is out of range.
    """
    check("logits", logits, (None, workspace.vocab_size))
    check("rows", rows, (None,), np.dtype(np.int64))
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(logits):
        raise ValueError(f"rows reach from {rows.min()} to {rows.max()}, expected 0 to {len(logits) - 1}")
    if not 0 <= top <= workspace.vocab_size:
        raise ValueError(f"top is {top}, expected 0 to {workspace.vocab_size}")
    normalizers, tokens = np.empty(len(rows), np.float64), np.empty((len(rows), top), np.int64)
    work = len(rows) * logits.shape[1] * _NANOSECONDS_PER_LOGIT
    arguments = (logits, rows, *workspace.arrays, normalizers, tokens)
    run(team, normalize_slots, arguments, workspace.slots, work=work)
    return normalizers, tokens
