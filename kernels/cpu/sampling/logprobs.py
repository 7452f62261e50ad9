"""Log-probabilities: the log-normaliser of a row in float64, and its largest logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...sampling import FINE
from ..jit.arguments import Address, Arguments
from ..jit.dsl import contracted, helper
from ..jit.memory import array_at, stack_array
from ..jit.native import native_op
from .passes import close, scan
from .row import COUNT, MAXIMUM, OPEN, ORDER, STATUS, TOKENS, VALUES, Row, Workspace, reset, row_in_slot
from .selection import sort
from .truncation import top_k

_CHUNK = 256
_chunk = stack_array("float64", _CHUNK)
_integers, _doubles = array_at("int64", 1), array_at("float64", 1)
_LOWEST_EXPONENT = -700.0
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_BIAS, _MANTISSA_BITS = np.int64(1023), np.int64(52)


@contracted
def _exp(x: float) -> Any:
    """Return e ** x within 3e-16 for -700 <= x <= 0, in a form that the compiler can vectorise."""
    k = math.floor(x * _LOG2_E + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    # The exponential series up to r ** 13 / 13!: with |r| <= ln 2 / 2 the remainder is below 1e-17.
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
    """Return log(sum(exp(logits))) of an open row. `weights` is scratch memory, float64 [_CHUNK]."""
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
    """Fill `out` with the ids of the largest logits."""
    top_k(row, out.shape[0])
    if row.flags[OPEN]:
        close(row, -math.inf)
    count, order = row.flags[COUNT], row.ids[ORDER]
    for i in range(count):
        order[i] = i
    sort(row.numbers[VALUES], order, 0, count)
    for rank in range(count):
        out[rank] = row.ids[TOKENS, order[rank]]


class NormalizerArguments(Arguments):
    """`count` row indices of `logits`, working memory, the destination for the results, and `top` tokens per row."""

    logits: Address
    rows: Address
    count: int
    workspace: Workspace
    normalizers: Address
    tokens: Address
    top: int


@native_op(NormalizerArguments)
def normalize_slots(arguments: NormalizerArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute the log-normalisers (NaN if there is none) and likeliest tokens of the rows of slots [begin, end)."""
    weights = _chunk()
    count, slots, top = arguments.count, arguments.workspace.slots, arguments.top
    rows, normalizers = _integers(arguments.rows, count), _doubles(arguments.normalizers, count)
    for slot in range(begin, end):
        for i in range(slot * count // slots, (slot + 1) * count // slots):
            given = arguments.logits + 4 * arguments.workspace.vocab_size * rows[i]
            row = row_in_slot(arguments.workspace, slot, given)
            tokens = _integers(arguments.tokens + 8 * top * i, top)
            reset(row)
            scan(row)
            for rank in range(top):
                tokens[rank] = -1
            if row.flags[STATUS] == FINE:
                normalizers[i] = _log_normalizer(row, weights)
                if top > 0:
                    _write_largest(row, tokens)
            else:
                normalizers[i] = math.nan
    return 0
