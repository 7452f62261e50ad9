"""Measure how AMX tile instructions and vector instructions share execution ports, by timing loops of both.

    python -m tools.tile_ports

The times explain the limits of prefill and of batched matrix products (docs/reference/performance.md). Tile products
run in parallel with vector instructions, but during a tile product, vector multiplications can use only one port
instead of two. Tile loads and stores do not overlap with vector instructions.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from genai.common.host_memory import huge_array
from genai.kernels.cpu.jit.amx import (
    TILE_BYTES,
    TILE_CONFIG,
    add_bfloat_product,
    configure_tiles,
    load_tile,
    release_tiles,
    store_tile,
)
from genai.kernels.cpu.jit.arguments import Address, Arguments
from genai.kernels.cpu.jit.emit import FLOAT_VECTOR, INT32_VECTOR, Emitter, constant, micro_kernel
from genai.kernels.cpu.jit.isa import isa
from genai.kernels.cpu.jit.native import NativeOp, native_op
from genai.kernels.cpu.program.calls import Call, Items, program_of
from genai.kernels.cpu.program.thread_pool import Threads

# The counts per iteration: tile products, tile loads, tile stores, vector multiply-adds, integer vector additions.
LOOPS = {
    "8 tile products": (8, 0, 0, 0, 0),
    "8 tile loads": (0, 8, 0, 0, 0),
    "4 tile stores": (0, 0, 4, 0, 0),
    "128 multiply-adds": (0, 0, 0, 128, 0),
    "128 additions": (0, 0, 0, 0, 128),
    "8 products, 8 loads": (8, 8, 0, 0, 0),
    "8 products, 4 stores": (8, 0, 4, 0, 0),
    "8 products, 128 multiply-adds": (8, 0, 0, 128, 0),
    "1 product, 128 multiply-adds": (1, 0, 0, 128, 0),
    "8 products, 128 additions": (8, 0, 0, 0, 128),
    "8 loads, 128 additions": (0, 8, 0, 0, 128),
    "8 products, 8 loads, 64 multiply-adds, 64 additions": (8, 8, 0, 64, 64),
    "8 products, 8 loads, 4 stores, 64 multiply-adds, 64 additions": (8, 8, 4, 64, 64),
}
_TURNS, _REPEAT = 200_000, 7
_REGISTERS = 8
_STORED = 32 * TILE_BYTES  # offset of the stored tiles, which follow the loaded tiles


class TurnArguments(Arguments):
    """The memory of tiles, and the tile configuration."""

    memory: Address
    tiles: Address


def _loop(counts: tuple[int, ...]) -> NativeOp:
    """Return the operator that runs a loop; its items are the iterations."""

    def emit(e: Emitter, memory: Any, turns: Any) -> None:
        numbers = [constant(FLOAT_VECTOR, float(i)) for i in range(_REGISTERS)]
        integers = [constant(INT32_VECTOR, i) for i in range(_REGISTERS)]

        def product(i: int) -> None:
            add_bfloat_product(e, i % 4, 4 + i // 2 % 2, 6 + i % 2)

        def load(i: int) -> None:
            load_tile(e, 4 + i % 4, e.at(memory, i * TILE_BYTES))

        def store(i: int) -> None:
            store_tile(e, i % 4, e.at(memory, _STORED + i * TILE_BYTES))

        def multiply_add(i: int) -> None:
            numbers[i % _REGISTERS] = e.multiply_add(
                numbers[i % _REGISTERS], constant(FLOAT_VECTOR, 0.5), numbers[i % _REGISTERS]
            )

        def add(i: int) -> None:
            integers[i % _REGISTERS] = e.builder.add(integers[i % _REGISTERS], integers[(i + 3) % _REGISTERS])

        kinds: list[Callable[[int], None]] = [product, load, store, multiply_add, add]
        # Each kind of instruction is spread evenly over the iteration.
        order = sorted((i / count, kind, i) for kind, count in enumerate(counts) for i in range(count))
        with e.loop(turns, [*numbers, *integers]) as (_, state):
            numbers[:], integers[:] = state[:_REGISTERS], state[_REGISTERS:]
            for _, kind, i in order:
                kinds[kind](i)
            state[:] = [*numbers, *integers]
        for i, value in enumerate([*numbers, *integers]):
            e.store(value, e.at(memory, 2 * _STORED + 64 * i))

    kernel = micro_kernel(emit)

    @native_op(TurnArguments, name="tile_ports_" + "_".join(map(str, counts)))
    def run_turns(arguments: TurnArguments, context: int, begin: int, end: int, scratch: int) -> int:
        configure_tiles(arguments.tiles)
        kernel((arguments.memory, end - begin))
        release_tiles()
        return 0

    return run_turns


def measure(counts: tuple[int, ...], turns: int = _TURNS) -> float:
    """Return the median nanoseconds per iteration."""
    memory, table = huge_array((3 * _STORED,), np.uint8), huge_array((64,), np.uint8)
    table[:] = TILE_CONFIG
    call = Call(_loop(counts), TurnArguments(memory=memory, tiles=table), Items(factor=turns, grain=turns))
    program, times, alone = program_of([[call]]), [], Threads(1)
    for _ in range(_REPEAT + 1):
        began = time.perf_counter()
        alone.run(program, nanoseconds=0)
        times.append(time.perf_counter() - began)
    return 1e9 * statistics.median(times[1:]) / turns


def main() -> None:
    if isa() != "amx":
        sys.exit("this processor has no AMX")
    for name, counts in LOOPS.items():
        print(f"{name:64s} {measure(counts):6.1f} ns", flush=True)


if __name__ == "__main__":
    main()
