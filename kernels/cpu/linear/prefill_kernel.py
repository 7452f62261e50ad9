"""Micro-kernel of prefill numerics: a pair of weight tiles by up to four pairs of row tiles, along a span of columns.

Each step computes two by two tile products, with the four sums in tile registers. The columns are divided into chunks
of one or two steps of 64. While a chunk is multiplied, the pair's next chunk is dequantised into the other of two
panels, a few instructions after each tile product: a tile product takes 16 cycles, in which the vector units would be
idle. The panels and the sums of the pair stay in the first-level cache, and row tiles stream from the second-level
cache.

When a tile register switches to another sum, the old sum is stored and the new sum is loaded just before the new sum's
first product. By then, the register's last product has long finished, so no product waits. Sums are added in the order
of columns, whatever the number of rows.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from ...weight_layout import TILE_ROWS, RecordLayout
from ..jit.amx import TILE_BYTES, TILE_ROW_BYTES, add_bfloat_product, load_tile, store_tile
from ..jit.emit import INT64, Emitter, micro_kernel
from ..jit.variants import once
from .bfloat_tiles import QUARTERS, TILE_COLUMNS, DenseLayout, TileWeights, quarter_bytes, quarter_stride

# A step is two tiles of columns. With blocks of 32, that is one record.
STEP_TILES = 2
STEP_COLUMNS = STEP_TILES * TILE_COLUMNS
_LINES_AHEAD = 2  # lines of the next block's row tiles that are prefetched at a time
# Maximum bytes of a panel.
PANEL_BYTES = 12 * TILE_BYTES
# Sums of a pair of row tiles and a pair of weight tiles: [row tile][weight tile] tiles of float32.
SUMS_BYTES = 4 * TILE_BYTES
ROW_PAIRS = 4
_LINE = 64
_OUT_ROWS = 2  # rows of results prefetched per step
_PAIR_QUARTERS = 2 * QUARTERS


class StepSizes(NamedTuple):
    """Sizes that depend on the numbers of bfloat16 parts of weights and activations.

    Attributes:
        nbytes: bytes of a step of a tile of weights: [STEP_TILES][parts] tiles.
        row_bytes: bytes of a step of a row tile: [STEP_TILES][row_parts] tiles.
        chunk: number of steps of a chunk.
        panel_tile: bytes of one of the two tiles of weights in a panel: [chunk] steps.
        ahead: bytes of the next block's row tiles that are prefetched per step and pair of row tiles.
    """

    nbytes: int
    row_bytes: int
    chunk: int
    panel_tile: int
    ahead: int


def step_sizes(weights: TileWeights) -> StepSizes:
    """Return the sizes for a kind of weights. The two panels and a pair's sums fit in the first-level cache."""
    nbytes, row_bytes = (parts * STEP_TILES * TILE_BYTES for parts in (weights.parts, weights.row_parts))
    chunk = 2 if weights.parts == 1 else 1
    return StepSizes(nbytes, row_bytes, chunk, chunk * nbytes, len(_part_products(weights)) * _LINES_AHEAD * _LINE)


def _part_products(weights: TileWeights) -> Sequence[tuple[int, int]]:
    """Return the parts (of rows, of weights) to multiply, small products first. Consecutive pairs share a part."""
    if weights.parts == 1:
        return [(part, 0) for part in reversed(range(weights.row_parts))]
    return ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0))


@dataclass(frozen=True)
class Steps:
    """Positions of steps of 64 columns in the records of a tile."""

    layout: RecordLayout | DenseLayout

    def at(self, e: Emitter, tile: Any, step: Any) -> tuple[Any, Any, Any]:
        """Return the addresses of a step's integers, and of the scales of its two tiles."""
        b, layout = e.builder, self.layout
        shift = (layout.block_size // 32).bit_length() - 1
        record = e.at(tile, b.mul(b.lshr(step, INT64(shift)), INT64(layout.nbytes)))
        if shift == 0:
            return record, e.at(record, layout.scales), e.at(record, layout.scales + layout.factor_bytes)
        within = b.and_(step, INT64((1 << shift) - 1))
        block = b.mul(b.lshr(within, INT64(shift - 1)), INT64(layout.factor_bytes))
        scales = e.at(e.at(record, block), layout.scales)
        return e.at(record, b.mul(within, INT64(self.nbytes))), scales, scales

    @property
    def nbytes(self) -> int:
        """Bytes of a step's integers."""
        return STEP_COLUMNS * TILE_ROWS * self.layout.bits // 8


@dataclass
class _Source:
    """A step of a tile to dequantise: addresses of its integers, its scales, the target, and the step to prefetch."""

    integers: Any
    scales: tuple[Any, Any]
    target: Any
    ahead: Any = None


def _dequantise(e: Emitter, weights: TileWeights, sources: list[tuple[_Source, list[Any]]]) -> Iterator[None]:
    """Dequantise quarters (selected by number) of both tiles of a step. Yields after every few instructions."""
    layout = weights.layout
    size, stride = INT64(quarter_bytes(layout)), INT64(quarter_stride(layout))
    next_step = layout.nbytes if layout.block_size == TILE_COLUMNS else Steps(layout).nbytes
    to_points = layout.points - layout.scales
    for source, quarters in sources:
        if source.ahead is not None:
            e.prefetch(e.at(source.ahead, layout.scales), 2)
        for half in range(STEP_TILES):
            factors = weights.factors(e, source.scales[half], e.at(source.scales[half], to_points))
            yield
            for quarter in quarters:
                offset = e.at(e.builder.mul(quarter, size), half * QUARTERS * quarter_bytes(layout))
                integers = e.at(source.integers, offset)
                if source.ahead is not None:
                    for line in range(0, quarter_bytes(layout), _LINE):
                        e.prefetch(e.at(e.at(source.ahead, offset), line), 2)
                        e.prefetch(e.at(integers, line + next_step), 1)
                target = e.at(e.at(source.target, e.builder.mul(quarter, stride)), half * weights.parts * TILE_BYTES)
                yield from weights.quarter(e, integers, factors, target)


@once
def dequantise_kernel(weights: TileWeights) -> Any:
    """Return a micro-kernel that dequantises steps of a pair of tiles, without products.

    Arguments: the addresses of the tiles; the first step; the panel; steps [begin, end) of the panel, not empty.
    """

    sizes = step_sizes(weights)

    def emit(e: Emitter, first: Any, second: Any, step: Any, panel: Any, begin: Any, end: Any) -> None:
        b = e.builder
        with e.loop(b.sub(end, begin)) as (index, _):
            number = b.add(index, begin)
            moved = b.mul(number, INT64(sizes.nbytes))
            for tile, address in enumerate((first, second)):
                integers, *scales = Steps(weights.layout).at(e, address, b.add(step, number))
                target = e.at(e.at(panel, moved), tile * sizes.panel_tile)
                source = _Source(integers, (scales[0], scales[1]), target)
                for _ in _dequantise(e, weights, [(source, [INT64(quarter) for quarter in range(QUARTERS)])]):
                    pass

    return micro_kernel(emit)


# Arguments of the micro-kernel.
# rows: address of the first row tile of the span. row_tile: bytes from a row tile to the row tile below it.
# steps: number of steps in the span. pairs: number of pairs of row tiles.
# panel: panel that holds the span's first chunk. other: the other panel.
# first, second: addresses of the pair's tiles. step: first step of the span. next_*: the same for the following span.
# last_step: last step of the matrix. sums: sums of the pair, [row pair] SUMS_BYTES. fresh: 1 if sums start at zero.
# zeros: address of 64 zeros. previous: address for the sums that the tile registers hold.
# out, out_stride, out_end: rows to prefetch. ahead, ahead_end: memory to prefetch.
_Span = namedtuple(
    "_Span",
    "rows row_tile steps pairs panel other first second step next_first next_second next_step last_step sums fresh "
    "zeros previous out out_stride out_end ahead ahead_end",
)
# Values of a chunk of the span.
# panel: panel to multiply. other: panel for the next chunk. count: number of steps. is_first: true in the first chunk.
# rows: address of the chunk's first row tile. first, second, step: the tiles and step to dequantise, one chunk ahead.
# asked_*: the tiles and step to prefetch, two chunks ahead.
# sums, sums_tile, sums_stride: address of the initial sums (zeros, or the pair's sums), bytes between tiles, and bytes
# between rows.
_Chunk = namedtuple(
    "_Chunk",
    "panel other count is_first rows first second step asked_first asked_second asked_step sums sums_tile sums_stride",
)


@once
def span_kernel(weights: TileWeights, pairs: int, *, single: bool = False) -> Any:
    """Return the micro-kernel for a span of columns and `pairs` pairs of row tiles: 1, 2 (also for 3) or 4.

    Its arguments are the fields of _Span. The quarters of a chunk are divided evenly among the pairs. With three pairs,
    the last pair repeats the quarters of the second pair. With `single`, only the first row tile is multiplied.
    """
    sizes = step_sizes(weights)
    return micro_kernel(lambda e, *values: _SpanWriter(e, weights, pairs, _Span(*values), sizes, single).emit())


@dataclass
class _SpanWriter:
    """Emitter of the code of `span_kernel`."""

    e: Emitter
    weights: TileWeights
    pairs: int
    span: _Span
    sizes: StepSizes
    single: bool

    def emit(self) -> None:
        e, b, span, chunk_steps = self.e, self.e.builder, self.span, self.sizes.chunk
        chunks = b.lshr(b.add(span.steps, INT64(chunk_steps - 1)), INT64(chunk_steps.bit_length() - 1))
        with e.loop(chunks, [span.panel, span.other, span.previous, span.out, span.ahead]) as (number, state):
            panel, other, *moving = state
            chunk = self._chunk(number, panel, other)
            with e.loop(span.pairs, moving) as (pair, moving):
                moving[:] = self._pair(chunk, pair, *moving)
            state[:] = other, panel, *moving

    def _chunk(self, number: Any, panel: Any, other: Any) -> _Chunk:
        e, b, span, choose = self.e, self.e.builder, self.span, self.e.builder.select
        chunk_steps = self.sizes.chunk
        done = b.mul(number, INT64(chunk_steps))
        left = b.sub(span.steps, done)
        last = b.icmp_signed("<=", left, INT64(chunk_steps))
        last_but_one = b.icmp_signed("<=", left, INT64(2 * chunk_steps))
        count = choose(last, left, INT64(chunk_steps))
        here = b.add(span.step, done)
        first, second = choose(last, span.next_first, span.first), choose(last, span.next_second, span.second)
        step = choose(last, span.next_step, e.at(here, chunk_steps))
        asked_first = choose(last_but_one, span.next_first, span.first)
        asked_second = choose(last_but_one, span.next_second, span.second)
        asked_step = choose(last_but_one, span.next_step, e.at(here, 2 * chunk_steps))
        asked_step = choose(last, e.at(span.next_step, chunk_steps), asked_step)
        is_first = b.icmp_signed("==", number, INT64(0))
        zero = b.and_(is_first, b.icmp_signed("!=", span.fresh, INT64(0)))
        sums = choose(zero, span.zeros, span.sums)
        tile, stride = (choose(zero, INT64(0), INT64(size)) for size in (TILE_BYTES, TILE_ROW_BYTES))
        rows = e.at(span.rows, b.mul(done, INT64(self.sizes.row_bytes)))
        asked = asked_first, asked_second, asked_step
        return _Chunk(panel, other, count, is_first, rows, first, second, step, *asked, sums, tile, stride)

    def _pair(self, chunk: _Chunk, pair: Any, previous: Any, out: Any, ahead: Any) -> tuple[Any, ...]:
        """Multiply a pair of row tiles with a chunk. Returns the address for its sums, and the next prefetches."""
        e, b, span = self.e, self.e.builder, self.span
        row_a = e.at(chunk.rows, b.mul(span.row_tile, b.shl(pair, INT64(1))))
        rows = row_a, e.at(row_a, span.row_tile)
        sums = e.at(chunk.sums, b.mul(chunk.sums_tile, b.shl(pair, INT64(2))))
        new = e.at(span.sums, b.mul(pair, INT64(SUMS_BYTES)))

        def switch(total: int) -> None:
            """Store an accumulator's old sum, and load its new one."""
            with b.if_then(chunk.is_first) if self.pairs == 1 else nullcontext():  # a single pair never switches
                store_tile(e, total, e.at(previous, total * TILE_BYTES))
                load_tile(e, total, e.at(sums, b.mul(chunk.sums_tile, INT64(total))), chunk.sums_stride)

        one = self._step(chunk, pair, rows, INT64(0), out, ahead, switch)
        before = b.block
        with b.if_then(b.icmp_signed(">", chunk.count, INT64(1))):
            with e.loop(b.sub(chunk.count, INT64(1)), one) as (index, more):
                more[:] = self._step(chunk, pair, rows, e.at(index, 1), *more)
            rest = b.block
        merged = []
        for value_one, value_more in zip(one, more, strict=True):
            phi = b.phi(value_one.type)
            phi.add_incoming(value_one, before)
            phi.add_incoming(value_more, rest)
            merged.append(phi)
        return new, *merged

    def _step(
        self, chunk: _Chunk, pair: Any, rows: tuple[Any, Any], index: Any, out: Any, ahead: Any,
        switch: Callable[[int], None] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Emit a step: four or eight tile products for each product of parts, with all other work in between."""
        e, span, parts = self.e, self.span, self.weights.parts
        quarters, products = _PAIR_QUARTERS // self.pairs, _part_products(self.weights)
        total = STEP_TILES * ((2 if self.pairs == 1 else 1) + QUARTERS * quarters * parts)
        slots = (2 if self.single else 4) * STEP_TILES * len(products)
        fill = _spread(self._dequantised(chunk, pair, index), total, slots)
        loaded: tuple[Any, Any] = None, None
        for half, (row_part, part) in product(range(STEP_TILES), products):
            row_a = row_b = one = two = None
            if loaded[0] != (half, row_part):
                moved = e.builder.mul(index, INT64(self.sizes.row_bytes))
                offset = (half * self.weights.row_parts + row_part) * TILE_BYTES
                row_a, row_b = (e.at(e.at(row, moved), offset) for row in rows)
            if loaded[1] != (half, part):
                moved = e.builder.mul(index, INT64(self.sizes.nbytes))
                one = e.at(e.at(chunk.panel, moved), (half * parts + part) * TILE_BYTES)
                two = e.at(one, self.sizes.panel_tile)
            change = switch if loaded == (None, None) else None
            loaded = (half, row_part), (half, part)
            _product(e, 0, (4, row_a), (6, one), change)
            fill()
            _product(e, 1, (4, None), (7, two), change)
            fill()
            if not self.single:
                _product(e, 3, (5, row_b), (7, None), change)
                fill()
            if half == 0:
                out = _ask_rows(e, span, out)
            else:
                ahead = _ask_memory(e, span, ahead)
            if not self.single:
                _product(e, 2, (5, None), (6, None), change)
                fill()
        return out, ahead

    def _dequantised(self, chunk: _Chunk, pair: Any, index: Any) -> Iterator[None]:
        """Return the pair's share of a step's dequantisation."""
        e, b, span, steps = self.e, self.e.builder, self.span, Steps(self.weights.layout)
        beyond = b.icmp_signed(">", b.add(chunk.step, index), span.last_step)
        number = b.select(beyond, span.last_step, b.add(chunk.step, index))
        target = e.at(chunk.other, b.mul(index, INT64(self.sizes.nbytes)))

        def source(tile: Any, asked: Any, moved: Any) -> _Source:
            integers, *scales = steps.at(e, tile, number)
            wanted, *_ = steps.at(e, asked, b.add(chunk.asked_step, index))
            return _Source(integers, (scales[0], scales[1]), e.at(target, moved), wanted)

        numbers = [INT64(quarter) for quarter in range(QUARTERS)]
        if self.pairs == 1:
            moved = self.sizes.panel_tile
            both = source(chunk.first, chunk.asked_first, 0), source(chunk.second, chunk.asked_second, moved)
            return _dequantise(e, self.weights, [(tile, numbers) for tile in both])
        from_second = b.icmp_signed(">=", pair, INT64(self.pairs // 2))
        moved = b.select(from_second, INT64(self.sizes.panel_tile), INT64(0))
        tile = b.select(from_second, chunk.second, chunk.first)
        asked = b.select(from_second, chunk.asked_second, chunk.asked_first)
        if self.pairs == 4:
            quarters = _PAIR_QUARTERS // self.pairs
            begin = b.mul(b.and_(pair, INT64(1)), INT64(quarters))
            numbers = [e.at(begin, quarter) for quarter in range(quarters)]
        return _dequantise(e, self.weights, [(source(tile, asked, moved), numbers)])


def _product(
    e: Emitter, total: int, rows: tuple[int, Any], weights: tuple[int, Any], switch: Callable[[int], None] | None
) -> None:
    """Add a tile product to an accumulator. Tiles that are given with an address are loaded first."""
    if weights[1] is not None:
        load_tile(e, *weights)
    if rows[1] is not None:
        load_tile(e, *rows, streamed=True)
    if switch is not None:
        switch(total)
    add_bfloat_product(e, total, rows[0], weights[0])


def _spread(work: Iterator[None], total: int, slots: int) -> Callable[[], None]:
    """Return a function that does one of `slots` shares of the work at each call."""
    calls = done = 0

    def fill() -> None:
        nonlocal calls, done
        calls += 1
        while done < total * calls // slots:
            next(work, None)
            done += 1
        if calls == slots:
            for _ in work:
                pass

    return fill


def _ask_rows(e: Emitter, span: _Span, out: Any) -> Any:
    """Prefetch lines of the next rows of results, so that stores do not wait for memory."""
    b = e.builder
    for _ in range(_OUT_ROWS):
        for line in range(2):
            e.prefetch(e.at(out, _LINE * line), 2)
        moved = e.at(out, span.out_stride)
        out = b.select(b.icmp_signed("<", moved, span.out_end), moved, span.out_end)
    return out


def _ask_memory(e: Emitter, span: _Span, ahead: Any) -> Any:
    """Prefetch the next lines of the row tiles of the next block."""
    b = e.builder
    for line in range(_LINES_AHEAD):
        e.prefetch(e.at(ahead, _LINE * line), 2)
    moved = e.at(ahead, _LINES_AHEAD * _LINE)
    return b.select(b.icmp_signed("<", moved, span.ahead_end), moved, span.ahead_end)


@once
def store_sums_kernel() -> Any:
    """Return a micro-kernel that stores the four sums of the tile registers. Its argument is the target's address."""

    def emit(e: Emitter, sums: Any) -> None:
        for accumulator in range(4):
            store_tile(e, accumulator, e.at(sums, accumulator * TILE_BYTES))

    return micro_kernel(emit)
