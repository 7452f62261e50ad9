"""Sums of four products of bytes per lane: what the instruction sets do differently, to the same integers.

`Dot.add(total, unsigned, signed)` adds, in each of sixteen int32 lanes, the products of four unsigned bytes with four
signed ones. AVX-512 VNNI has it as one instruction (vpdpbusd). AVX2 multiplies pairs into 16 bits (vpmaddubsw), and
plain vectors do as much with shifts and 16-bit products; there, 4-bit weights are summed in 16 bits: eight pairs of
products, 2 * 15 * 127 each, stay below 2 ** 15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..emit import INT16, INT32, INT32_VECTOR, LANES, Emitter, constant

_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_SHORTS = ir.VectorType(INT16, 2 * LANES)


# A running sum of products, int32 lanes: `start` makes one, `total` ends it, with at most eight `add`s between them
# if weights have 4 bits. `add` takes weights as lanes of four unsigned bytes, activations as one int32 of signed ones.


@dataclass(frozen=True)
class VnniDot:
    """One instruction for it all."""

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
    """Pairs of products in 16 bits, widened to 32 bits once per chain (4-bit weights) or every time (8-bit ones).

    Attributes:
        pairs: pairs(emitter, weights, activations) gives them.
    """

    bits: int
    pairs: Callable[[Emitter, Any, Any], Any]

    def start(self, emitter: Emitter, correction: Any) -> Any:
        return correction, constant(_SHORTS, 0)

    def add(self, emitter: Emitter, running: Any, weights: Any, activations: Any) -> Any:
        wide, narrow = running
        b = emitter.builder
        if self.bits == 4:
            return wide, b.add(narrow, self.pairs(emitter, weights, activations))
        # Eight bits would overflow: their upper seven are multiplied first, the lowest one apart.
        ones = constant(INT32_VECTOR, 0x01010101)
        upper = b.and_(b.lshr(weights, constant(INT32_VECTOR, 1)), constant(INT32_VECTOR, 0x7F7F7F7F))
        pairs = self.pairs(emitter, upper, activations)
        low = self.pairs(emitter, b.and_(weights, ones), activations)
        twice = b.shl(_widened(emitter, pairs), constant(INT32_VECTOR, 1))
        return b.add(wide, b.add(twice, _widened(emitter, low))), narrow

    def total(self, emitter: Emitter, running: Any) -> Any:
        wide, narrow = running
        return emitter.builder.add(wide, _widened(emitter, narrow)) if self.bits == 4 else wide


def _avx2_pairs(emitter: Emitter, weights: Any, activations: Any) -> Any:
    """vpmaddubsw on both halves of a vector."""
    b = emitter.builder
    half_bytes, half_shorts = ir.VectorType(ir.IntType(8), 2 * LANES), ir.VectorType(INT16, LANES)
    signed = b.bitcast(emitter.splat(activations, LANES // 2), half_bytes)
    unsigned = b.bitcast(weights, _BYTES)
    halves = []
    for first in (0, 2 * LANES):
        mask = ir.Constant(ir.VectorType(INT32, 2 * LANES), list(range(first, first + 2 * LANES)))
        part = b.shuffle_vector(unsigned, unsigned, mask)
        halves.append(emitter.call("llvm.x86.avx2.pmadd.ub.sw", half_shorts, [part, signed]))
    both = ir.Constant(ir.VectorType(INT32, 2 * LANES), list(range(2 * LANES)))
    return b.shuffle_vector(*halves, both)


def _portable_pairs(emitter: Emitter, weights: Any, activations: Any) -> Any:
    """Even and odd bytes as 16-bit numbers."""
    b, eight = emitter.builder, constant(_SHORTS, 8)
    unsigned, signed = b.bitcast(weights, _SHORTS), b.bitcast(emitter.splat(activations), _SHORTS)
    even = b.mul(b.and_(unsigned, constant(_SHORTS, 0xFF)), b.ashr(b.shl(signed, eight), eight))
    return b.add(even, b.mul(b.lshr(unsigned, eight), b.ashr(signed, eight)))


def _widened(emitter: Emitter, shorts: Any) -> Any:
    """Neighbouring 16-bit lanes added into 32-bit ones."""
    b, sixteen = emitter.builder, constant(INT32_VECTOR, 16)
    pairs = b.bitcast(shorts, INT32_VECTOR)
    return b.add(b.ashr(b.shl(pairs, sixteen), sixteen), b.ashr(pairs, sixteen))


Dot = VnniDot | PairsDot


def dot_for(isa: str, bits: int) -> Dot:
    """The way of an instruction set."""
    if isa in ("amx", "vnni"):
        return VnniDot()
    return PairsDot(bits, _avx2_pairs if isa == "avx2" else _portable_pairs)
