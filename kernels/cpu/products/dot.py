"""Sums of four products of bytes per lane: what the instruction sets do differently, to the same integers.

`Dot.add(total, unsigned, signed)` adds, in each of sixteen int32 lanes, the products of four unsigned bytes with four
signed ones. AVX-512 VNNI has it as one instruction (vpdpbusd). AVX2 multiplies pairs into 16 bits (vpmaddubsw), and
plain vectors do as much with shifts and 16-bit products; there, 4-bit weights are summed in 16 bits: eight pairs of
products, 2 * 15 * 127 each, stay below 2 ** 15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from llvmlite import ir

from ..emit import INT16, INT32, INT32_VECTOR, LANES, Emitter, constant

_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_SHORTS = ir.VectorType(INT16, 2 * LANES)


class Dot(Protocol):
    """A running sum of products; `start` and `total` enclose at most eight `add`s if weights have 4 bits."""

    def start(self, emitter: Emitter, correction: Any) -> Any:
        """A sum that begins with int32 lanes."""

    def add(self, emitter: Emitter, running: Any, weights: Any, activations: Any) -> Any:
        """Add products: weights as int32 lanes of four unsigned bytes, activations as one int32 of four signed ones."""

    def total(self, emitter: Emitter, running: Any) -> Any:
        """The sum, int32 lanes."""


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
class _PairsDot:
    """Pairs of products in 16 bits, widened to 32 bits once per chain (4-bit weights) or every time (8-bit ones)."""

    bits: int

    @property
    def _narrow(self) -> bool:
        return self.bits == 4

    def start(self, emitter: Emitter, correction: Any) -> Any:
        return correction, constant(_SHORTS, 0)

    def add(self, emitter: Emitter, running: Any, weights: Any, activations: Any) -> Any:
        wide, narrow = running
        b = emitter.builder
        if self._narrow:
            return wide, b.add(narrow, self._pairs(emitter, weights, activations))
        # Eight bits would overflow: their upper seven are multiplied first, the lowest one apart.
        ones = constant(INT32_VECTOR, 0x01010101)
        upper = b.and_(b.lshr(weights, constant(INT32_VECTOR, 1)), constant(INT32_VECTOR, 0x7F7F7F7F))
        pairs = self._pairs(emitter, upper, activations)
        low = self._pairs(emitter, b.and_(weights, ones), activations)
        twice = b.shl(_widened(emitter, pairs), constant(INT32_VECTOR, 1))
        return b.add(wide, b.add(twice, _widened(emitter, low))), narrow

    def total(self, emitter: Emitter, running: Any) -> Any:
        wide, narrow = running
        return emitter.builder.add(wide, _widened(emitter, narrow)) if self._narrow else wide

    def _pairs(self, emitter: Emitter, weights: Any, activations: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Avx2Dot(_PairsDot):
    """vpmaddubsw on both halves of a vector."""

    def _pairs(self, emitter: Emitter, weights: Any, activations: Any) -> Any:
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


@dataclass(frozen=True)
class PortableDot(_PairsDot):
    """Even and odd bytes as 16-bit numbers."""

    def _pairs(self, emitter: Emitter, weights: Any, activations: Any) -> Any:
        b, eight = emitter.builder, constant(_SHORTS, 8)
        unsigned, signed = b.bitcast(weights, _SHORTS), b.bitcast(emitter.splat(activations), _SHORTS)
        even = b.mul(b.and_(unsigned, constant(_SHORTS, 0xFF)), b.ashr(b.shl(signed, eight), eight))
        return b.add(even, b.mul(b.lshr(unsigned, eight), b.ashr(signed, eight)))


def _widened(emitter: Emitter, shorts: Any) -> Any:
    """Neighbouring 16-bit lanes added into 32-bit ones."""
    b, sixteen = emitter.builder, constant(INT32_VECTOR, 16)
    pairs = b.bitcast(shorts, INT32_VECTOR)
    return b.add(b.ashr(b.shl(pairs, sixteen), sixteen), b.ashr(pairs, sixteen))


def dot_for(isa: str, bits: int) -> Dot:
    """The way of an instruction set."""
    if isa in ("amx", "vnni"):
        return VnniDot()
    return Avx2Dot(bits) if isa == "avx2" else PortableDot(bits)
