"""Convolution of blocked images (see `layout`): dense, grouped, depthwise, and of plain images to blocked results.

A tile of results is some neighbouring columns of a row times some blocks of channels, and stays in registers while its
terms are added. A table holds the location of each term's input relative to the tile, so that kernels of any size and
dilation use the same code. Every sum is a chain over its terms in order, so results do not depend on tiles and threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....checks import Float32, check
from ...jit.arguments import Address, Arguments, Binding
from ...jit.emit import FLOAT, FLOAT_VECTOR, INT64, Emitter, constant, micro_kernel
from ...jit.isa import isa
from ...jit.memory import keep_first, load_float32, read_int64, store_float32
from ...jit.native import NativeOp, native_op
from ...jit.variants import once
from ...jit.vector_math import UNARY
from ...program.bound_program import NodeProgram
from ...program.calls import Call, Items
from ...program.driver import call_operator
from ...program.thread_pool import Threads, own_memory
from ...rowwise.elementwise import check_function
from ..copying import operand
from ..gemm.micro import TILINGS
from ..gemm.windows import Windows
from .layout import (
    BLOCK,
    BLOCK_BYTES,
    BorderArguments,
    PadArguments,
    aligned,
    blocks_of,
    clear_borders,
    new_image,
    packed_blocks,
    pad_planes,
)

_FLOPS_PER_NANOSECOND, _NANOSECONDS_PER_PADDED_FLOAT = 80.0, 0.1
# Maximum number of columns of a tile, and target number of items per thread.
_MOST_COLUMNS, _ITEMS_PER_THREAD = 14, 6
# The number of sums that are added to at the same time if additions do not wait for each other.
_PARALLEL_SUMS = 8
# Prefetch distance in the weights, which do not fit in the first-level cache.
_PREFETCH_BYTES = 2048
# Tiles have own tables if they use at most this part of the terms.
_MOST_USED = 0.98
# Terms of a block of channels that are unrolled.
_UNROLLED = 4

Form = Literal["blocked", "plain", "depthwise"]
"""The input's layout: blocked, one channel after the other, or blocked with separate kernels for small groups."""
# Sizes of groups that do not cross the borders of blocks. Groups of one channel are depthwise convolutions.
MIXED = (1, 2, 4, 8)
FORMS: tuple[Form, ...] = ("blocked", "plain", "depthwise")


def step_of(form: Form, stride: int) -> int:
    """Return the bytes between the inputs of two columns of results."""
    return stride * (4 if form == "plain" else BLOCK_BYTES)


@dataclass(frozen=True)
class Tile:
    """The code of a tile: columns times blocks of channels, with the bytes between the inputs of two columns.

    The results are written to every `gap`-th pixel. If `clips`, the tile's results are finished in registers: they are
    clipped to limits. Otherwise, an operator finishes them (see `finish_blocks`). In the form "depthwise", groups have
    `mixed` channels.
    """

    form: Form
    columns: int
    blocks: int
    step: int
    clips: bool = True
    gap: int = 1
    mixed: int = 1

    @property
    def name(self) -> str:
        finish = "clip" if self.clips else "call"
        return f"blocked_{self.form}_{self.columns}_{self.blocks}_{self.step}_{finish}_{self.gap}_{self.mixed}"

    @property
    def term_vectors(self) -> int:
        """The number of weight vectors per entry of the table and block of results."""
        return BLOCK if self.form == "blocked" else self.mixed


def _cost(columns: int, blocks: int, form: Form, width: int) -> float:
    """Return the approximate time of tiles of a row, in additions per column and block."""
    sums = columns * blocks
    loads = sums + 1 if form == "depthwise" else columns + blocks
    return -(-width // columns) * max(sums, loads, _PARALLEL_SUMS) / (width * blocks)


@lru_cache(maxsize=1024)
def tile_for(form: Form, step: int, width: int, blocks: int) -> Tile:
    """Return the fastest tile for rows of `width` columns and this number of blocks of results."""
    tiling = TILINGS[isa()]
    registers, best = tiling.rows * tiling.vectors, (math.inf, 0, 0, 1, 1)
    for several in (1,) if form == "depthwise" else (1, 2, 4):
        most = min(_MOST_COLUMNS, registers // several, width)
        if most < 1 or several > blocks:
            continue
        columns = -(-width // -(-width // most))
        rest = blocks % several
        cost = _cost(columns, several, form, width) * (blocks - rest) + _cost(columns, 1, form, width) * rest
        best = min(best, (cost, -columns * several, abs(several - 2), columns, several))
    return Tile(form, best[3], best[4], step)


@once
def _micro(tile: Tile) -> Any:
    """Return the micro-kernel of a tile.

    Its arguments are the addresses of the tile's first input and of the table, the number of entries (at least 1), the
    address of the weights, and the bytes of weights of a block. Each entry of the table has four int64: the offsets of
    an input and of its weights, the number of its channels (a multiple of _UNROLLED), and 0. If the tile clips, these
    arguments follow: the addresses of the biases and of the limits [2][16], the address of the results and their bytes
    per block, and the same for the addend (or 0). Otherwise, the address of the sums [blocks][columns] follows.
    """
    columns, blocks = tile.columns, tile.blocks

    def emit(e: Emitter, x: Any, table: Any, entries: Any, weights: Any, block_bytes: Any, *rest: Any) -> None:
        b = e.builder
        block_at = [weights]
        for _ in range(1, blocks):
            block_at.append(b.add(block_at[-1], block_bytes))

        def multiply(sums: list[Any], at: Any, skipped: Any) -> None:
            for first in block_at:
                e.prefetch(e.at(e.at(first, skipped), _PREFETCH_BYTES))
            factors = [e.load(e.at(first, skipped), FLOAT_VECTOR, align=BLOCK_BYTES) for first in block_at]
            for m in range(columns):
                value = e.splat(e.load(e.at(at, m * tile.step), FLOAT))
                for v, factor in enumerate(factors):
                    sums[v * columns + m] = e.fast_multiply_add(value, factor, sums[v * columns + m])

        def multiply_groups(sums: list[Any], at: Any, skipped: Any) -> None:
            """Add the products with every channel of a result's group."""
            values = [e.load(e.at(at, m * tile.step), FLOAT_VECTOR, align=4) for m in range(columns)]
            for number in range(tile.mixed):
                place = e.at(e.at(weights, skipped), number * BLOCK_BYTES)
                factor = e.load(place, FLOAT_VECTOR, align=BLOCK_BYTES)
                lanes = [lane - lane % tile.mixed + number for lane in range(BLOCK)]
                for m, value in enumerate(values):
                    chosen = value if tile.mixed == 1 else e.shuffle(value, value, lanes)
                    sums[m] = e.fast_multiply_add(chosen, factor, sums[m])

        def entry(index: Any, number: int) -> Any:
            return e.load(e.at(e.at(table, 8 * number), b.shl(index, INT64(5))), INT64)

        sums = [constant(FLOAT_VECTOR, 0)] * (columns * blocks)
        with e.loop(entries, sums) as (index, sums):
            at, skipped = e.at(x, entry(index, 0)), entry(index, 1)
            if tile.form == "blocked":
                following = e.at(x, entry(b.add(index, INT64(1)), 0))
                for m in range(columns):
                    e.prefetch(e.at(following, m * tile.step))
                with e.loop(entry(index, 2), sums, step=_UNROLLED) as (channel, inner):
                    here, there = e.at(at, b.shl(channel, INT64(2))), b.add(skipped, b.mul(channel, INT64(BLOCK_BYTES)))
                    for unrolled in range(_UNROLLED):
                        multiply(inner, e.at(here, 4 * unrolled), e.at(there, unrolled * BLOCK_BYTES))
                sums[:] = inner
            elif tile.form == "plain":
                multiply(sums, at, skipped)
            else:
                multiply_groups(sums, at, skipped)
        if tile.clips:
            _emit_clipped(e, [sums[v * columns : (v + 1) * columns] for v in range(blocks)], tile.gap, *rest)
        else:
            for number, value in enumerate(sums):
                e.store(value, e.at(rest[0], number * BLOCK_BYTES), align=BLOCK_BYTES)

    return micro_kernel(emit)


def _emit_clipped(
    e: Emitter, sums: list[list[Any]], gap: int, bias: Any, limits: Any, out: Any, out_block: Any, addend: Any,
    addend_block: Any,
) -> None:  # fmt: skip
    """Write the sums of each block plus bias and addend, clipped as `maximum` and `minimum` of vectors do."""
    b, at, added = e.builder, out, addend
    low, high = (e.load(e.at(limits, i * BLOCK_BYTES), FLOAT_VECTOR, align=4) for i in range(2))
    has_addend = b.icmp_signed("!=", addend, INT64(0))
    for v, block in enumerate(sums):
        shift = e.load(e.at(bias, v * BLOCK_BYTES), FLOAT_VECTOR, align=4)
        values = [b.fadd(value, shift) for value in block]

        def write(values: list[Any], at: Any = at) -> None:
            for m, value in enumerate(values):
                value = b.select(b.fcmp_ordered("<", value, low), low, value)
                value = b.select(b.fcmp_ordered(">", value, high), high, value)
                e.store(value, e.at(at, m * gap * BLOCK_BYTES), align=4)

        with b.if_else(has_addend) as (adding, copying):
            with adding:
                terms = (e.load(e.at(added, m * BLOCK_BYTES), FLOAT_VECTOR, align=4) for m in range(len(block)))
                write([b.fadd(value, term) for value, term in zip(values, terms, strict=True)])
            with copying:
                write(values)
        at, added = b.add(at, out_block), b.add(added, addend_block)


class BlockedFinishArguments(Arguments):
    """The size of tiles, the channels and strides of results, the biases, and two parameters for any function.

    `p` is the address of the first parameter for each channel. Scaled results are scale * function(...) + shift.
    """

    columns: int
    blocks: int
    gap: int
    outputs: int
    out_block: int
    addend_block: int
    bias: Address
    limits: Address
    p: Address
    q: float
    scale: float
    shift: float


@once
def finish_blocks(function: str, *, is_scaled: bool = False) -> NativeOp:
    """Return the operator (arguments, sums, block, out, addend) that writes function(sums + bias + addend)."""
    apply = UNARY[function].function

    def finish(arguments: BlockedFinishArguments, sums: int, block: int, out: int, addend: int) -> int:
        columns, step, q = arguments.columns, BLOCK_BYTES * arguments.gap, arguments.q
        for v in range(arguments.blocks):
            bias = load_float32(arguments.bias + BLOCK_BYTES * (block + v))
            p = load_float32(arguments.p + BLOCK_BYTES * (block + v))
            there, added = out + v * arguments.out_block, addend + v * arguments.addend_block
            channels = arguments.outputs - BLOCK * (block + v)
            for m in range(columns):
                value = load_float32(sums + BLOCK_BYTES * (v * columns + m)) + bias
                if addend != 0:
                    value = value + load_float32(added + BLOCK_BYTES * m)
                value = apply(value, p, q)
                if is_scaled:
                    value = value * arguments.scale + arguments.shift
                if channels < BLOCK:  # padding channels stay 0, even if an input is infinite
                    value = keep_first(value, channels, 0.0)
                store_float32(there + step * m, value)
        return 0

    return native_op(BlockedFinishArguments, name=f"finish_blocks_{function}{'_scaled' if is_scaled else ''}")(finish)


class BlockedArguments(Arguments):
    """Images, the table of terms, packed weights and results. Strides are in bytes.

    `first_block` is the first block of results; `groups` is the number of tiles of blocks. `shared` blocks of results
    read the same inputs, and the next blocks read inputs that are `x_group` bytes further. `tiles` is the address of
    the offset of a table in `table` and its number of entries for each tile of an image's block, int64 [tiles, 2], or 0
    if all tiles have the table of `entries` entries. The results of an image's block are `slices` planes of `rows`.
    """

    x: Address
    x_image: int
    x_slice: int
    x_row: int
    x_group: int
    shared: int
    table: Address
    entries: int
    tiles: Address
    weights: Address
    block_bytes: int
    first_block: int
    groups: int
    slices: int
    rows: int
    columns: int
    bands: int
    out: Address
    out_image: int
    out_slice: int
    out_row: int
    addend: Address
    addend_image: int
    addend_row: int
    finish: Address
    finishing: BlockedFinishArguments


@once
def blocked_op(tile: Tile) -> NativeOp:
    """Return the operator. Items are images times tiles of blocks times bands of the tiles of an image's block."""
    multiply, width, blocks, step, clips = _micro(tile), tile.columns, tile.blocks, tile.step, tile.clips
    out_step = BLOCK_BYTES * tile.gap

    def convolve(arguments: BlockedArguments, context: int, begin: int, end: int, scratch: int) -> int:
        groups, bands, rows, columns = arguments.groups, arguments.bands, arguments.rows, arguments.columns
        per_row = -(-columns // width)
        tiles, block_bytes, addend = arguments.slices * rows * per_row, arguments.block_bytes, arguments.addend
        for item in range(begin, end):
            image, rest = item // (groups * bands), item % (groups * bands)
            group, band = rest // bands, rest % bands
            block = arguments.first_block + group * blocks
            x = arguments.x + image * arguments.x_image + block // arguments.shared * arguments.x_group
            out = arguments.out + image * arguments.out_image + block * arguments.finishing.out_block
            added = addend + image * arguments.addend_image + block * arguments.finishing.addend_block
            weights = arguments.weights + block * block_bytes
            first, last = tiles * band // bands, tiles * (band + 1) // bands
            line, place = first // per_row, first % per_row
            plane, row = line // rows, line % rows
            for number in range(first, last):
                column = min(place * width, columns - width)
                here = x + plane * arguments.x_slice + row * arguments.x_row + column * step
                target = out + plane * arguments.out_slice + row * arguments.out_row + out_step * column
                there = 0
                if addend != 0:
                    there = added + (plane * rows + row) * arguments.addend_row + BLOCK_BYTES * column
                table, entries = arguments.table, arguments.entries
                if arguments.tiles != 0:
                    own = arguments.tiles + 16 * number
                    table, entries = table + read_int64(own), read_int64(own + 8)
                if clips:
                    bias = arguments.finishing.bias + BLOCK_BYTES * block
                    multiply((
                        here, table, entries, weights, block_bytes, bias, arguments.finishing.limits, target,
                        arguments.finishing.out_block, there, arguments.finishing.addend_block,
                    ))  # fmt: skip
                else:
                    multiply((here, table, entries, weights, block_bytes, scratch))
                    call_operator(arguments.finish, arguments.finishing, scratch, block, target, there)
                place += 1
                if place == per_row:
                    place, row = 0, row + 1
                    if row == rows:
                        plane, row = plane + 1, 0
        return 0

    return native_op(BlockedArguments, name=tile.name)(convolve)


@dataclass(frozen=True)
class BlockedKernels:
    """Packed kernels of a convolution.

    Attributes:
        form: layout of the input.
        data: see `packed_blocks`; for depthwise kernels [blocks, 1, taps, channels of a group, 16].
        outputs: number of results' channels.
        channels: number of the input's channels.
        groups: number of groups.
    """

    form: Form
    data: Float32
    outputs: int
    channels: int
    groups: int


def pack_blocked(weight: NDArray[np.float32], groups: int = 1, *, is_plain: bool = False) -> BlockedKernels:
    """Pack kernels [M, C / groups, kernel ...].

    Args:
        is_plain: True for inputs that are not blocked, which must be in one group.

    Raises:
        ValueError: the groups are neither depthwise, nor of equal sizes in MIXED, nor whole blocks.
    """
    outputs, channels = len(weight), weight.shape[1] * groups
    if groups == 1:
        form: Form = "plain" if is_plain else "blocked"
        return BlockedKernels(form, packed_blocks(weight, 1 if is_plain else BLOCK), outputs, channels, 1)
    if weight.shape[1] in MIXED and outputs == channels and not is_plain:
        return BlockedKernels("depthwise", packed_blocks(weight, weight.shape[1]), outputs, channels, groups)
    if is_plain or weight.shape[1] % BLOCK or outputs // groups % BLOCK:
        raise ValueError(f"{outputs} kernels of {weight.shape[1]} channels in {groups} groups are not whole blocks")
    return BlockedKernels("blocked", packed_blocks(weight, BLOCK), outputs, channels, groups)


@dataclass(frozen=True)
class Place:
    """Windows in an image: the windows, pads before each axis, and the input's and the results' zero borders.

    Attributes:
        pads: number of zeros before each axis, in addition to the input's border.
        crop: per axis, the width of the input's border before and after the image.
        border: per axis, the width of the border that is added to the results before and after the image.
    """

    windows: Windows
    pads: tuple[int, ...]
    crop: tuple[tuple[int, int], ...]
    border: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """The results of one set of kernels, with three spatial axes: every `gaps`-th result from number `first`.

    The other attributes have the meanings of the attributes of `Windows` and `Place`.
    """

    kernels: BlockedKernels
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    counts: tuple[int, ...]
    pads: tuple[int, ...]
    first: tuple[int, ...]
    gaps: tuple[int, ...]

    def starts(self, crop: Sequence[tuple[int, int]]) -> list[int]:
        """Return the first input of the first result on each axis; it is negative in the pads."""
        return [before - pad for (before, _), pad in zip(crop, self.pads, strict=True)]

    def ends(self, crop: Sequence[tuple[int, int]]) -> list[int]:
        """Return the position after the last input of the last result on each axis."""
        sizes = zip(self.starts(crop), self.counts, self.strides, self.dilations, self.kernel, strict=True)
        return [start + (count - 1) * stride + gap * (taps - 1) + 1 for start, count, stride, gap, taps in sizes]

    def with_axes(self, order: Sequence[int]) -> Part:
        """Return the part with its axes in another order. Only axes of size 1 may change their place among others."""

        def ordered(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[axis] for axis in order)

        return replace(
            self, kernel=ordered(self.kernel), strides=ordered(self.strides), dilations=ordered(self.dilations),
            counts=ordered(self.counts), pads=ordered(self.pads), first=ordered(self.first), gaps=ordered(self.gaps),
        )  # fmt: skip


@dataclass(frozen=True)
class PlacedConvolution:
    """A convolution of images of one shape, without further checks of the shapes.

    Attributes:
        program: None if there are no results.
        padded_bytes: bytes of the padded image.
        shape, result, addend: shapes of the image, of the results with their border, and of the addend.
    """

    threads: Threads
    program: NodeProgram | None
    padded_bytes: int
    shape: tuple[int, ...]
    result: tuple[int, ...]
    addend: tuple[int, ...] | None

    def __call__(self, x: Float32, addend: Float32 | None = None) -> Float32:
        """Return the results for float32 x and addend. Raises ValueError if they have other shapes."""
        out = new_image(self.result)
        if x.shape != self.shape or (None if addend is None else addend.shape) != self.addend:
            shape = None if addend is None else list(addend.shape)
            raise ValueError(f"x is {list(x.shape)} and addend is {shape}, expected {self.shape} and {self.addend}")
        if self.program is None:
            out[...] = 0
            return out
        x, addend = operand(x), None if addend is None else operand(addend)
        padded = own_memory("padded", self.padded_bytes) if self.padded_bytes else None
        self.program.run(self.threads, x=x, out=out, addend=addend, padded=padded)
        return out


class BlockedConvolution:
    """The convolution scale * function(conv(x, kernels) + bias + addend) + shift with blocked results.

    Args:
        bias: float32 [M].
        function, parameters: key of UNARY, and the function's parameters.
        slopes: float32 [M], the first parameter for each channel, instead of the one in `parameters`.
        scale, shift: see above.
    """

    def __init__(
        self, threads: Threads, kernels: BlockedKernels, bias: Float32 | None = None, function: str = "copy",
        parameters: tuple[float, ...] = (), slopes: Float32 | None = None, scale: float = 1.0, shift: float = 0.0,
    ) -> None:  # fmt: skip
        self._threads, self._kernels = threads, kernels
        self._scale, self._shift = scale, shift
        first, self._second = check_function(function, parameters)
        self._bias = self._per_channel("bias", 0.0, bias)
        self._first = self._per_channel("slopes", first, slopes)
        self._function = function
        self._is_finite = bool(np.isfinite(kernels.data).all())
        limits = {"copy": (-np.inf, np.inf), "relu": (0.0, np.inf), "clip": (first, self._second)}.get(function)
        if kernels.outputs % BLOCK or self._is_scaled:
            limits = None  # the operator that finishes tiles also clears padding channels
        self._limits = None if limits is None else np.repeat(np.array(limits, np.float32), BLOCK)

    @property
    def _is_scaled(self) -> bool:
        return (self._scale, self._shift) != (1.0, 0.0)

    def _per_channel(self, name: str, number: float, values: Float32 | None) -> Float32:
        """Return values for the channels of results, or a number for all of them, in whole blocks."""
        outputs = self._kernels.outputs
        wide = aligned((blocks_of(outputs) * BLOCK,))
        wide[:] = number
        if values is not None:
            check(name, values, (outputs,))
            wide[:outputs] = values
        return wide

    def __call__(self, x: Float32, place: Place, addend: Float32 | None = None) -> Float32:
        """Convolve x to [N, blocks, counts + border ..., 16]; see `placed`."""
        return self.placed(x.shape, place, addend is not None)(x, addend)

    def placed(self, shape: tuple[int, ...], place: Place, has_addend: bool) -> PlacedConvolution:
        """Return the convolution of images of one shape.

        Args:
            shape: [N, blocks, extents ..., 16], or [N, C, extents ...] for plain kernels; at most three spatial axes.

        Raises:
            ValueError: the shape does not match.
        """
        kernels, counts, images = self._kernels, place.windows.counts, shape[0]
        is_plain, blocks = kernels.form == "plain", blocks_of(kernels.outputs)
        leading = kernels.channels if is_plain else blocks_of(kernels.channels)
        if len(shape) != len(counts) + (2 if is_plain else 3) or shape[1] != leading:
            raise ValueError(f"x is {list(shape)}, which does not match kernels of {kernels.channels} channels")
        extents = [count + sum(border) for count, border in zip(counts, place.border, strict=True)]
        program, size = self._made(shape, place, has_addend) if images and math.prod(counts) else (None, 0)
        addend = (images, blocks, *counts, BLOCK) if has_addend else None
        return PlacedConvolution(self._threads, program, size, shape, (images, blocks, *extents, BLOCK), addend)

    def _made(self, shape: tuple[int, ...], place: Place, has_addend: bool) -> tuple[NodeProgram, int]:
        """Return the program, and the number of bytes of the padded image."""
        kernels, counts, rank = self._kernels, place.windows.counts, len(place.pads)
        inner = 1 if kernels.form == "plain" else BLOCK
        flat = 3 - rank  # missing axes have one slice, and one row
        extents = (1,) * flat + shape[2 : 2 + rank]
        crop, border = (((0, 0),) * flat + sides for sides in (place.crop, place.border))
        whole = [count + sum(sides) for count, sides in zip((1,) * flat + counts, border, strict=True)]
        parts = self._parts(place)
        phases: list[list[Call]] = []
        source: Binding = Binding("x")
        planes, size = shape[0] * shape[1], 0
        starts = [min(axis) for axis in zip((0, 0, 0), *(part.starts(crop) for part in parts), strict=True)]
        ends = [max(axis) for axis in zip(extents, *(part.ends(crop) for part in parts), strict=True)]
        befores = [-start for start in starts]
        wide = tuple(map(add, befores, ends))
        if wide != extents:
            padding = PadArguments(
                x=source, out=Binding("padded"), x_slices=extents[0], x_rows=extents[1], x_width=extents[2] * inner,
                slices=wide[0], rows=wide[1], width=wide[2] * inner, front=befores[0], top=befores[1],
                left=befores[2] * inner,
            )  # fmt: skip
            phases.append([Call(pad_planes, padding, Items(factor=planes * wide[0] * wide[1]))])
            source, size = Binding("padded"), 4 * planes * math.prod(wide) * inner
        steps = (4 * inner * wide[2] * wide[1], 4 * inner * wide[2], 4 * inner)
        images = [size - sum(sides) for size, sides in zip(extents, crop, strict=True)]
        calls, flops = [], 0.0
        for part in parts:
            corner = map(add, part.starts(crop), befores)
            here = source + sum(start * step for start, step in zip(corner, steps, strict=True))
            first = [number + before for number, (before, _) in zip(part.first, border, strict=True)]
            calls += self._calls(part, here, shape[0], inner, wide, whole, first, has_addend, images)
            terms = math.prod(part.kernel) * kernels.channels // kernels.groups
            flops += 2.0 * shape[0] * kernels.outputs * terms * math.prod(part.counts)
        if any(map(any, border)):
            clearing = BorderArguments(
                out=Binding("out"), slices=whole[0], rows=whole[1], columns=whole[2], front=border[0][0],
                back=border[0][1], top=border[1][0], bottom=border[1][1], left=border[2][0], right=border[2][1],
            )  # fmt: skip
            calls.append(Call(clear_borders, clearing, Items(factor=shape[0] * blocks_of(kernels.outputs) * whole[0])))
        padding_time = size / 4 * _NANOSECONDS_PER_PADDED_FLOAT
        return NodeProgram([*phases, calls], flops / _FLOPS_PER_NANOSECOND + padding_time), size

    def _parts(self, place: Place) -> list[Part]:
        """Return the parts of the results, each of which has at least one result."""
        windows, flat = place.windows, (1,) * (3 - len(place.pads))
        part = Part(
            kernels=self._kernels, kernel=flat + windows.kernel, strides=flat + windows.strides,
            dilations=flat + windows.dilations, counts=flat + windows.counts, pads=(0,) * len(flat) + place.pads,
            first=(0, 0, 0), gaps=(1, 1, 1),
        )  # fmt: skip
        return [part]

    def _calls(
        self, part: Part, source: Binding, images: int, inner: int, wide: Sequence[int], whole: Sequence[int],
        first: Sequence[int], has_addend: bool, extents: Sequence[int],
    ) -> list[Call]:  # fmt: skip
        """Return the calls for tiles of several blocks, and for the remaining blocks.

        Args:
            source: the first input of the first result.
            wide, whole: extents of the padded input, and of the results with their border.
            first: position of the first result in `whole`.
            extents: extents of the image without pads.
        """
        # Axes of size 1 come first, so that the results of a row are adjacent.
        order = sorted(range(3), key=lambda axis: (wide[axis], whole[axis], part.kernel[axis]) != (1, 1, 1))
        part = part.with_axes(order)
        wide, whole, first, extents = ([sizes[axis] for axis in order] for sizes in (wide, whole, first, extents))
        kernels, kernel, strides, dilations = part.kernels, part.kernel, part.strides, part.dilations
        counts, gaps = part.counts, part.gaps
        sizes = zip(extents, counts, strides, part.pads, kernel, dilations, strict=True)
        inside = [_inside(*axis) for axis in sizes]
        pixel, row_bytes, slice_bytes = 4 * inner, 4 * inner * wide[2], 4 * inner * wide[2] * wide[1]
        plane_bytes = slice_bytes * wide[0]
        in_planes = 1 if kernels.form == "depthwise" else kernels.data.shape[1]
        steps = (slice_bytes, row_bytes, pixel)
        taps = [(size, gap * step) for size, gap, step in zip(kernel, dilations, steps, strict=True)]
        offsets = _sums([(in_planes, plane_bytes), *taps]).reshape(in_planes, *kernel)
        slices, rows, columns = counts
        if strides == (1, 1, 1) and counts[1:] == tuple(wide[1:]) and counts == tuple(whole):
            slices, rows, columns = 1, 1, math.prod(counts)  # every row begins where the previous row ends
            inside = [np.ones((1, size), bool) for size in kernel]
        blocks = blocks_of(kernels.outputs)
        shared = 1 if kernels.form == "depthwise" else blocks // kernels.groups
        # Tiles of a grouped convolution do not cross the groups' borders.
        together = blocks if kernels.groups in (1, kernels.outputs) else math.gcd(shared, 4)
        tile = tile_for(kernels.form, step_of(kernels.form, strides[2]), columns, together)
        tile = replace(tile, mixed=kernels.data.shape[3] if kernels.form == "depthwise" else 1)
        channels = np.full(in_planes, tile.term_vectors)
        if kernels.form == "blocked":  # the weights of the last channels are zeros
            rest = kernels.channels // kernels.groups - BLOCK * (in_planes - 1)
            channels[-1] = -(-rest // _UNROLLED) * _UNROLLED
        table, entries, tiles_of = _tables(offsets, channels, tile, columns, inside, skips=self._is_finite)
        out_plane, addend_plane = (BLOCK_BYTES * math.prod(sizes) for sizes in (whole, counts))
        out_row, out_slice = BLOCK_BYTES * whole[2], BLOCK_BYTES * whole[2] * whole[1]
        skipped = out_slice * first[0] + out_row * first[1] + BLOCK_BYTES * first[2]
        all_planes = blocks_of(kernels.channels) if inner > 1 else kernels.channels
        calls, block = [], 0
        for several in (tile.blocks, 1):
            groups = (blocks - block) // several
            if not groups:
                continue
            code = replace(tile, blocks=several, clips=self._limits is not None, gap=gaps[2])
            tiles = slices * rows * -(-columns // tile.columns)
            wanted = 1 if self._threads.count == 1 else -(-self._threads.count * _ITEMS_PER_THREAD // (images * groups))
            bands = max(1, min(tiles, wanted))
            finishing = BlockedFinishArguments(
                columns=tile.columns, blocks=several, gap=gaps[2], outputs=kernels.outputs, out_block=out_plane,
                addend_block=addend_plane, bias=self._bias, limits=self._limits, p=self._first, q=self._second,
                scale=self._scale, shift=self._shift,
            )  # fmt: skip
            arguments = BlockedArguments(
                x=source, x_image=all_planes * plane_bytes, x_slice=strides[0] * slice_bytes,
                x_row=strides[1] * row_bytes, x_group=in_planes * plane_bytes, shared=shared, table=table,
                entries=entries, tiles=tiles_of, weights=kernels.data, block_bytes=kernels.data[0].nbytes,
                first_block=block, groups=groups, slices=slices, rows=rows, columns=columns, bands=bands,
                out=Binding("out") + skipped, out_image=blocks * out_plane, out_slice=gaps[0] * out_slice,
                out_row=gaps[1] * out_row,
                addend=Binding("addend") if has_addend else None, addend_image=blocks * addend_plane,
                addend_row=BLOCK_BYTES * counts[2], finishing=finishing,
                finish=None if code.clips else finish_blocks(self._function, is_scaled=self._is_scaled),
            )  # fmt: skip
            scratch = BLOCK_BYTES * tile.columns * several
            calls.append(Call(blocked_op(code), arguments, Items(factor=images * groups * bands), scratch))
            block += groups * several
        return calls


def _inside(extent: int, count: int, stride: int, pad: int, taps: int, dilation: int) -> NDArray[np.bool_]:
    """Return True for each result and tap along an axis if the tap's input is inside the image: [count, taps]."""
    place = np.arange(count)[:, None] * stride - pad + np.arange(taps) * dilation
    return (place >= 0) & (place < extent)


def _tables(
    offsets: NDArray[np.int64], channels: NDArray[np.int64], tile: Tile, columns: int,
    inside: Sequence[NDArray[np.bool_]], *, skips: bool,
) -> tuple[NDArray[np.int64], int, NDArray[np.int64] | None]:  # fmt: skip
    """Return the table of all terms and its number of entries, and the tables of tiles (see `BlockedArguments`).

    Tiles have own tables if these omit a part of the terms: those of taps that are outside the image for all results of
    the tile. These terms are zeros, so the sums are the same.

    Args:
        offsets: offsets of inputs [planes, kernel slices, kernel rows, kernel columns].
        channels: number of channels of each plane of inputs.
        columns: number of results per row.
        skips: False if terms cannot be omitted, because a weight is not finite.
    """
    numbers = np.arange(offsets.size).reshape(offsets.shape)
    counts = np.broadcast_to(channels.reshape(-1, 1, 1, 1), offsets.shape)
    terms = np.stack([offsets, numbers * (tile.term_vectors * BLOCK_BYTES), counts, 0 * counts], axis=-1)
    whole = _closed(terms.reshape(-1, terms.shape[-1]))
    by_slice, by_line, by_column = inside
    starts = [min(first, columns - tile.columns) for first in range(0, columns, tile.columns)]
    if not skips or len(by_column) != columns:
        return whole, offsets.size, None
    by_tile = np.array([by_column[start : start + tile.columns].any(axis=0) for start in starts])
    by_row = (by_slice[:, None, :, None] & by_line[:, None]).reshape(-1, *offsets.shape[1:3])
    used = by_row.sum(axis=(1, 2)).mean() * by_tile.sum(axis=1).mean() / offsets[0].size
    if used > _MOST_USED:
        return whole, offsets.size, None
    tables, place, known = [whole], whole.nbytes, {}
    found = np.empty((len(by_row), len(by_tile), 2), np.int64)
    for row, column in np.ndindex(found.shape[:2]):
        key = by_row[row].tobytes(), by_tile[column].tobytes()
        if key not in known:
            taps = by_row[row][..., None] & by_tile[column]
            if not taps.any():
                taps[0, 0, 0] = True  # a table has at least one entry
            tables.append(_closed(terms[:, taps].reshape(-1, terms.shape[-1])))
            known[key] = place, len(tables[-1]) - 1
            place += tables[-1].nbytes
        found[row, column] = known[key]
    return np.concatenate(tables), offsets.size, found.reshape(-1, 2)


def _closed(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a table with its last entry repeated, because the inputs of the next entry are prefetched."""
    return np.concatenate([table, table[-1:]])


def _sums(axes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the offsets of a grid of (count, step) axes, in order."""
    total = np.zeros(1, np.int64)
    for count, step in axes:
        total = (total[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return total
