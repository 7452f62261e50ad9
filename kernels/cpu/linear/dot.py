"""Dot products of four bytes per lane, for each instruction set. All of them produce the same integers.

`Dot.add` adds, in each of sixteen int32 lanes, the products of four unsigned bytes with four signed bytes. AVX-512 VNNI
does this in one instruction (vpdpbusd). AVX2 multiplies pairs into 16 bits (vpmaddubsw), and portable vectors do the
same with shifts and 16-bit multiplications. In both cases, products with low-bit weights are summed in 16 bits: eight
pairs of products of 4-bit weights, at most 2 * 15 * 127 each, stay below 2 ** 15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..jit.emit import INT16, INT32, INT32_VECTOR, LANES, Emitter, constant

_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_SHORTS = ir.VectorType(INT16, 2 * LANES)
_LARGEST_SHORT, _LARGEST_ACTIVATION = (1 << 15) - 1, 127


# A dot product is a running sum in int32 lanes. `start` returns a new sum, and `total` returns the result. `add` takes
# weights as lanes of four unsigned bytes, and activations as one int32 of four signed bytes.


@dataclass(frozen=True)
class VnniDot:
    """Dot products in one instruction."""

    def start(self, emitter: Emitter, correction: Any) -> Any:
        return correction

    def add(self, emitter: Emitter, running: Any, weights: Any, activations: Any) -> Any:
        spread = emitter.builder.bitcast(emitter.splat(activations), _BYTES)
        operands = [running, emitter.builder.bitcast(weights, _BYTES), spread]
        return emitter.call("llvm.x86.avx512.vpdpbusd.512", INT32_VECTOR, operands)

    def total(self, emitter: Emitter, running: Any) -> Any:
        return running


@dataclass(frozen=True)
class PairsDot:
    """Pairs of products in 16 bits, widened to 32 bits only before they could overflow.

    Attributes:
        chain: number of pairs that a 16-bit lane can add up; 0 if the weights' upper bits are multiplied separately.
        pairs: function (emitter, weights, activations) that returns the sums of pairs of products.
    """

    chain: int
    pairs: Callable[[Emitter, Any, Any], Any]

    def start(self, emitter: Emitter, correction: Any) -> Any:
        return correction, constant(_SHORTS, 0), 0

    def add(self, emitter: Emitter, running: Any, weights: Any, activations: Any) -> Any:
        wide, narrow, added = running
        b = emitter.builder
        if self.chain:
            if added == self.chain:
                wide, narrow, added = b.add(wide, _widened(emitter, narrow)), constant(_SHORTS, 0), 0
            return wide, b.add(narrow, self.pairs(emitter, weights, activations)), added + 1
        # A pair of 8-bit products would overflow, so the upper seven bits and the lowest bit are multiplied separately.
        ones = constant(INT32_VECTOR, 0x01010101)
        upper = b.and_(b.lshr(weights, constant(INT32_VECTOR, 1)), constant(INT32_VECTOR, 0x7F7F7F7F))
        pairs = self.pairs(emitter, upper, activations)
        low = self.pairs(emitter, b.and_(weights, ones), activations)
        twice = b.shl(_widened(emitter, pairs), constant(INT32_VECTOR, 1))
        return b.add(wide, b.add(twice, _widened(emitter, low))), narrow, added

    def total(self, emitter: Emitter, running: Any) -> Any:
        wide, narrow, _ = running
        return emitter.builder.add(wide, _widened(emitter, narrow)) if self.chain else wide


def _avx2_pairs(emitter: Emitter, weights: Any, activations: Any) -> Any:
    return _avx2_halves(emitter, weights, emitter.splat(activations))


def _avx2_halves(e: Emitter, unsigned: Any, signed: Any) -> Any:
    """Apply vpmaddubsw to both halves of two vectors of 64 bytes."""
    halves, both = [], [e.builder.bitcast(vector, _BYTES) for vector in (unsigned, signed)]
    for first in (0, 2 * LANES):
        parts = [e.shuffle(vector, vector, range(first, first + 2 * LANES)) for vector in both]
        halves.append(e.call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(INT16, LANES), parts))
    return e.shuffle(halves[0], halves[1], range(2 * LANES))


def _portable_pairs(emitter: Emitter, weights: Any, activations: Any) -> Any:
    return _portable_halves(emitter, weights, emitter.splat(activations))


def _widened(emitter: Emitter, shorts: Any) -> Any:
    """Add neighbouring 16-bit lanes into 32-bit lanes."""
    b, sixteen = emitter.builder, constant(INT32_VECTOR, 16)
    pairs = b.bitcast(shorts, INT32_VECTOR)
    return b.add(b.ashr(b.shl(pairs, sixteen), sixteen), b.ashr(pairs, sixteen))


def add_signed_lanes(isa: str, e: Emitter, total: Any, unsigned: Any, lanes: Any) -> Any:
    """Add the products of four unsigned bytes (an int32) with the four signed bytes of each lane.

    A pair of products may not fit into 16 bits, but a pair of products of the upper seven bits does.
    """
    b = e.builder
    if isa in ("amx", "vnni"):
        operands = [total, b.bitcast(e.splat(unsigned), _BYTES), b.bitcast(lanes, _BYTES)]
        return e.call("llvm.x86.avx512.vpdpbusd.512", INT32_VECTOR, operands)
    pairs = _avx2_halves if isa == "avx2" else _portable_halves
    upper, low = b.and_(b.lshr(unsigned, INT32(1)), INT32(0x7F7F7F7F)), b.and_(unsigned, INT32(0x01010101))
    twice = b.shl(_widened(e, pairs(e, e.splat(upper), lanes)), constant(INT32_VECTOR, 1))
    return b.add(total, b.add(twice, _widened(e, pairs(e, e.splat(low), lanes))))


def _portable_halves(e: Emitter, unsigned: Any, signed: Any) -> Any:
    """Multiply two vectors of 64 bytes, and add each even product to the next odd product in a 16-bit lane."""
    b, eight = e.builder, constant(_SHORTS, 8)
    unsigned, signed = b.bitcast(unsigned, _SHORTS), b.bitcast(signed, _SHORTS)
    even = b.mul(b.and_(unsigned, constant(_SHORTS, 0xFF)), b.ashr(b.shl(signed, eight), eight))
    return b.add(even, b.mul(b.lshr(unsigned, eight), b.ashr(signed, eight)))


Dot = VnniDot | PairsDot


def dot_for(isa: str, bits: int) -> Dot:
    """Return the dot product of an instruction set, for weights below 2 ** bits."""
    if isa in ("amx", "vnni"):
        return VnniDot()
    chain = _LARGEST_SHORT // (2 * ((1 << bits) - 1) * _LARGEST_ACTIVATION)
    return PairsDot(chain, _avx2_pairs if isa == "avx2" else _portable_pairs)
