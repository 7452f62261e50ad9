"""Token masks with one bit per token, for example from grammars. Only tokens whose bit is set stay in play."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from ...sampling import ALL_MASKED, HAS_INFINITY, HAS_NAN
from ..jit.dsl import FLOATS, helper, intrinsic
from ..jit.emit import INT16, Emitter
from ..jit.vector import LANES, load, splat_float32, store
from .row import COUNT, MASKED, MAXIMUM, OPEN, OWNED, SCANNED, STATUS, TOKENS, VALUES, Row, current
from .selection import LONGEST_LIST

# Number of bits in a word. A word covers two vectors.
WORD = 32


@intrinsic("int64", "int64")
def _ones(e: Emitter, word: Any) -> Any:
    """Return the number of bits that are set."""
    return e.call("llvm.ctpop.i64", word.type, [word])


@intrinsic("int64", "int64")
def _first_one(e: Emitter, word: Any) -> Any:
    """Return the index of the lowest bit that is set."""
    return e.call("llvm.cttz.i64", word.type, [word, ir.IntType(1)(0)])


@intrinsic(FLOATS, "int64", FLOATS, FLOATS)
def _where_bits(e: Emitter, bits: Any, value: Any, other: Any) -> Any:
    """Return `value` in the lanes whose bit (of the lowest LANES bits) is set, and `other` in the other lanes."""
    lanes = e.builder.bitcast(e.builder.trunc(bits, INT16), ir.VectorType(ir.IntType(1), LANES))
    return e.builder.select(lanes, value, other)


@helper
def constrain(row: Row, words: Any) -> None:
    """Keep the tokens of an open row whose bit is set. If there are few, they become candidates immediately.

    Args:
        words: uint32 [mask words]; bits after the last token are ignored.
    """
    count = 0
    for i in range(words.shape[0]):
        count += _ones(np.int64(words[i]))
    if count <= LONGEST_LIST:
        _list(row, words)
    else:
        _mask(row, words)


@helper
def _list(row: Row, words: Any) -> None:
    """Make candidates of the tokens whose bit is set, and check whether the row can be sampled."""
    logits, size = current(row), row.given.shape[0]
    count, highest, has_nan = 0, MASKED, False
    for i in range(words.shape[0]):
        word = np.int64(words[i])
        while word != 0:
            token = WORD * i + _first_one(word)
            word &= word - 1
            if token >= size:
                break
            logit = logits[token]
            has_nan = has_nan or math.isnan(logit)
            if logit > MASKED:
                highest = max(highest, logit)
                row.numbers[VALUES, count] = logit
                row.ids[TOKENS, count] = token
                count += 1
    row.flags[COUNT], row.state[MAXIMUM] = count, highest
    row.flags[OPEN] = 0
    if has_nan:
        row.flags[STATUS] = HAS_NAN
    elif highest == math.inf:
        row.flags[STATUS] = HAS_INFINITY
    elif count == 0:
        row.flags[STATUS] = ALL_MASKED


@helper
def _mask(row: Row, words: Any) -> None:
    """Copy the logits, with minus infinity for tokens whose bit is not set."""
    logits, own, size = current(row), row.own, row.given.shape[0]
    masked = splat_float32(MASKED)
    whole = size // WORD
    for i in range(whole):
        bits, first = np.int64(words[i]), i * WORD
        store(own, first, _where_bits(bits, load(logits, first), masked))
        store(own, first + LANES, _where_bits(bits >> LANES, load(logits, first + LANES), masked))
    for token in range(whole * WORD, size):
        own[token] = logits[token] if (np.int64(words[token // WORD]) >> (token % WORD)) & 1 else MASKED
    row.flags[OWNED], row.flags[SCANNED] = 1, 0
