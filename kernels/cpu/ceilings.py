"""Peak rates of this machine, measured by kernels that only read memory or only multiply.

The speed of other kernels is reported as a share of these rates. The kernels in this module are compiled at their first
call, because the machine may lack the instructions that they use. Callers must check for those instructions first.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numpy.typing import NDArray

from .jit.amx import TILE_CONFIG as TILE_CONFIG
from .jit.arguments import Address, Arguments
from .jit.dsl import intrinsic
from .jit.emit import FLOAT_VECTOR, INT64, Emitter, constant, micro_kernel
from .jit.isa import stream_prefetch
from .jit.memory import load_int32, store_int32
from .jit.native import NativeFunction, kernel, native_op
from .jit.vector import LANES, splat_int32
from .program.calls import Call, Items

# The buffer is read in this number of streams at a time, because a single stream keeps too few requests in flight.
STREAMS = 4
# The size of an item, the unit in which a buffer is divided.
ITEM_BYTES = 4096
_LINE = 64  # bytes in a cache line
_ROUNDS = 16


class ReadArguments(Arguments):
    """The address of a buffer."""

    buffer: Address


@intrinsic(None, "int64")
def _ask_ahead(e: Emitter, address: Any) -> None:
    level, distance = stream_prefetch()
    e.prefetch(e.at(address, distance), level)


@native_op(ReadArguments)
def read_memory(arguments: ReadArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Read items [begin, end) of a buffer. The sum goes to scratch, so the compiler cannot remove the reads."""
    size = (end - begin) // STREAMS * ITEM_BYTES
    first = arguments.buffer + begin * ITEM_BYTES
    second, third, fourth = first + size, first + 2 * size, first + 3 * size
    a = splat_int32(0)
    b = splat_int32(0)
    c = splat_int32(0)
    d = splat_int32(0)
    for i in range(0, size, _LINE):
        _ask_ahead(first + i)
        _ask_ahead(second + i)
        _ask_ahead(third + i)
        _ask_ahead(fourth + i)
        a = a + load_int32(first + i)
        b = b + load_int32(second + i)
        c = c + load_int32(third + i)
        d = d + load_int32(fourth + i)
    for i in range(begin * ITEM_BYTES + STREAMS * size, end * ITEM_BYTES, _LINE):
        a = a + load_int32(arguments.buffer + i)
    store_int32(scratch, a + b + (c + d))
    return 0


def read_call(buffer: NDArray[Any], items: int, grain: int) -> Call:
    """Return the call that reads `items` items of a buffer, at least `grain` at a time."""
    pieces = Items(factor=items, grain=grain)
    return Call(read_memory, ReadArguments(buffer=buffer), pieces, scratch=_LINE)


_CHAINS = 12


def _emit_chains(e: Emitter, rounds: Any, total: Any) -> None:
    x = e.load(total, FLOAT_VECTOR)
    begins = [e.builder.fadd(x, constant(FLOAT_VECTOR, float(chain))) for chain in range(_CHAINS)]
    with e.loop(rounds, begins) as (_, sums):
        sums[:] = [e.fast_multiply_add(value, x, x) for value in sums]
    all_sums, *others = sums
    for value in others:
        all_sums = e.builder.fadd(all_sums, value)
    e.store(all_sums, total)


_chains = micro_kernel(_emit_chains)


@kernel
def multiply_float32(rounds: int, total: int) -> int:
    """Run `rounds` rounds of 12 independent multiply-adds on the LANES float32 numbers at the address `total`.

    FLOAT32_OPERATIONS is the number of operations per round.
    """
    _chains((rounds, total))
    return 0


FLOAT32_OPERATIONS = 2 * _CHAINS * LANES


def _assembly(instructions: list[str], before: str = "", after: str = "") -> Any:
    """Return an intrinsic (rounds, address) that runs `instructions`, in x86-64 assembly, `rounds` times.

    `before` runs once and may use the address as $2; `after` runs once.
    """
    registers = [f"~{{zmm{number}}}" for number in range(32)]
    text = "\n".join([before, "1:", *instructions, "dec $0", "jnz 1b", after])
    constraints = ",".join(["=&r", "0", "r", *registers, "~{memory}", "~{cc}"])

    @intrinsic(None, "int64", "int64")
    def loop(e: Emitter, rounds: Any, address: Any) -> None:
        binding.initialize_native_asmparser()
        block = ir.InlineAsm(ir.FunctionType(INT64, [INT64, INT64]), text, constraints, side_effect=True)
        e.builder.call(block, [rounds, address])

    return loop


# Operations per round of each loop. A multiplication and an addition count as two.
VNNI_OPERATIONS = 2 * _ROUNDS * 64
AMX_INT8_OPERATIONS = 2 * 4 * 16 * 16 * 64
AMX_BF16_OPERATIONS = AMX_INT8_OPERATIONS // 2


def _tiles(instruction: str) -> Any:
    """Return a loop that adds the products of tiles 4 and 5 with tiles 6 and 7 to tiles 0 to 3.

    The address must be that of TILE_CONFIG.
    """
    zeros = "\n".join(["ldtilecfg ($2)", *(f"tilezero %tmm{tile}" for tile in range(8))])
    pairs = [(0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)]
    return _assembly([f"{instruction} %tmm{b}, %tmm{a}, %tmm{c}" for c, a, b in pairs], zeros, "tilerelease")


def _multiplying(name: str, loop: Any) -> NativeFunction:
    def multiply(rounds: int, address: int) -> int:
        loop(rounds, address)
        return 0

    multiply.__name__ = name
    return kernel(multiply)


# Functions of (rounds, address). A VNNI round multiplies 16 pairs of 64-byte vectors and ignores the address. An AMX
# round multiplies four pairs of tiles; its address must be that of TILE_CONFIG.
_vnni = [f"vpdpbusd %zmm30, %zmm31, %zmm{number}" for number in range(_ROUNDS)]
multiply_vnni = _multiplying("multiply_vnni", _assembly(_vnni))
multiply_amx_int8 = _multiplying("multiply_amx_int8", _tiles("tdpbssd"))
multiply_amx_bf16 = _multiplying("multiply_amx_bf16", _tiles("tdpbf16ps"))
