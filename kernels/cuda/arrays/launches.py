"""Functions of arrays as kernel launches, recorded once for given shapes and run any number of times.

A `Recorder` is called for one function after another, and records launches and the lifetimes of values. The recorder
builds a `LaunchList`, which holds launches with slots for addresses, and one layout of the intermediate memory, in
which values with disjoint lifetimes share memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..driver import Driver, Grid
from ..launches import bind
from ..sources import CudaKernel

AXES = 8
SCALARS = {
    "float32": "float", "float16": "half_bits", "int32": "int", "int64": "long long", "bool": "unsigned char",
    "uint8": "unsigned char",
}  # fmt: skip
"""C++ types of elements, by dtype."""
_BITS = {1: "unsigned char", 2: "unsigned short", 4: "int", 8: "long long"}
_THREADS, _PACKS, _ALIGNED, _MOST = 256, 4, 256, 2**31 - 1
BOOL = np.dtype(bool)

# Functions of a float with parameters, of a number of any type, of two floats, and of two numbers of any type; and
# comparisons.
FLOAT_FUNCTIONS = {
    **{
        name: f"unary::{name}"
        for name in (
            "clip cube elu erf exp gelu gelu_tanh hard_sigmoid hard_swish leaky_relu log quick_gelu reciprocal sigmoid "
            "silu softplus sqrt tanh"
        ).split()
    },
    **{name: f"more::{name}" for name in "ceil cos floor mish round selu sin softsign".split()},
}
ANY_FUNCTIONS = {name: f"whole::{name}" for name in "abs neg sign square".split()}
FLOAT_PAIRS = {
    **{name: f"binary::{name}" for name in "add divide maximum minimum multiply power prelu subtract".split()},
    **{name: f"more::{name}" for name in "gelu_of_sum gelu_tanh_of_sum".split()},
}
ANY_PAIRS = {name: f"whole::{name}" for name in "add divide maximum minimum multiply subtract".split()}
COMPARISONS = {name: f"whole::{name}" for name in "equal less less_equal greater greater_equal both either one".split()}


class ArrayError(ValueError):
    """The shapes or types of arrays do not fit a function, or there is no kernel for them."""


@dataclass(eq=False)
class Block:
    """Memory of one or more arrays, whose address is known only when a program runs.

    Attributes:
        nbytes: size in bytes.
        own: True for intermediate memory of the program.
        born: index of the first launch that uses the block; -1 = none.
        dies: index of the last launch that uses the block; -1 = none.
        offset: offset in the program's intermediate memory, in bytes.
    """

    nbytes: int
    own: bool = False
    born: int = -1
    dies: int = -1
    offset: int = 0


@dataclass(frozen=True)
class Array:
    """An array in device memory. `strides` and `first` count elements."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    block: Block
    first: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def scalar(self) -> str:
        """The C++ type of the elements."""
        return SCALARS[self.dtype.name]

    @property
    def is_dense(self) -> bool:
        """True if the elements are contiguous."""
        steps = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return self.size == 0 or all(size == 1 or stride == dense for size, stride, dense in steps)

    def axis(self, axis: int) -> int:
        """Return the non-negative number of an axis."""
        if not -len(self.shape) <= axis < max(len(self.shape), 1):
            raise ArrayError(f"axis {axis} is out of range for an array of shape {list(self.shape)}")
        return axis % max(len(self.shape), 1)

    def transposed(self, order: Sequence[int]) -> Array:
        """Return a view with permuted axes."""
        if sorted(order) != list(range(len(self.shape))):
            raise ArrayError(f"axes {list(order)} do not permute an array of shape {list(self.shape)}")
        shape, strides = (tuple(given[axis] for axis in order) for given in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def expanded(self, shape: Sequence[int]) -> Array:
        """Return a view broadcast to a shape."""
        added = len(shape) - len(self.shape)
        strides = [0] * added
        for size, stride, wanted in zip(self.shape, self.strides, shape[added:], strict=True):
            if size not in (1, wanted):
                raise ArrayError(f"shape {list(self.shape)} cannot be broadcast to {list(shape)}")
            strides.append(stride if size == wanted else 0)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def part(self, axis: int, start: int, step: int, count: int) -> Array:
        """Return a view of `count` elements of an axis: every `step`-th element, starting at `start`."""
        shape, strides = list(self.shape), list(self.strides)
        first = self.first + start * strides[axis] * (count > 0)
        shape[axis], strides[axis] = count, strides[axis] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), first=first)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def joined(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Merge axes into as few axes as possible (at least one); return their sizes and strides, innermost first.

    Raises:
        ArrayError: if more axes remain than kernels support.
    """
    sizes: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        if sizes and all(own[axis] == kept[-1] * sizes[-1] for own, kept in zip(strides, found, strict=True)):
            sizes[-1] *= shape[axis]
            continue
        sizes.append(shape[axis])
        for own, kept in zip(strides, found, strict=True):
            kept.append(own[axis])
    if len(sizes) > AXES:
        raise ArrayError(f"the array has {len(sizes)} axes, but kernels support at most {AXES}")
    return sizes or [1], [kept or [0] for kept in found]


def padded(numbers: Sequence[int], filler: int, count: int = AXES) -> list[int]:
    """Pad a list of numbers to a length."""
    return [*numbers, *[filler] * (count - len(numbers))]


@dataclass(frozen=True)
class _Start:
    kernel: CudaKernel
    grid: Grid
    arguments: NDArray[np.void]
    addresses: tuple[tuple[str, Block, int], ...]


@dataclass(eq=False)
class LaunchList:
    """Recorded launches.

    Attributes:
        starts: the launches.
        own: blocks of intermediate memory.
        own_bytes: size of the intermediate memory.
    """

    starts: list[_Start]
    own: list[Block]
    own_bytes: int
    _addresses: dict[Block, int] = field(default_factory=dict)

    @property
    def kernels(self) -> set[CudaKernel]:
        """The kernels of the launches."""
        return {start.kernel for start in self.starts}

    def run(
        self, driver: Driver, functions: Mapping[CudaKernel, Any], own: int, addresses: Mapping[Block, int]
    ) -> None:
        """Launch all recorded kernels.

        Args:
            driver: the GPU.
            functions: loaded kernels.
            own: address of the intermediate memory.
            addresses: addresses of all other blocks.
        """
        now = {**addresses, **{block: own + block.offset for block in self.own}}
        moved = {block for block, address in now.items() if self._addresses.get(block) != address}
        if moved:
            for start in self.starts:
                for name, block, distance in start.addresses:
                    if block in moved:
                        start.arguments[name] = now[block] + distance
            self._addresses = now
        for start in self.starts:
            driver.launch(functions[start.kernel], start.kernel, start.grid, start.arguments)


class Recorder:
    """Records launches."""

    def __init__(self, constant: Callable[[NDArray[Any]], Block]) -> None:
        """Create a recorder. `constant` copies an array into memory that lives as long as the programs."""
        self._starts: list[_Start] = []
        self._own: list[Block] = []
        self._constant = constant

    def new(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Allocate intermediate memory for a result."""
        block = Block(math.prod(shape) * dtype.itemsize, own=True)
        self._own.append(block)
        return Array(tuple(shape), dtype, dense_strides(shape), block)

    def constant(self, array: NDArray[Any]) -> Array:
        """Copy a host array."""
        block = self._constant(array)
        return Array(array.shape, array.dtype, dense_strides(array.shape), block)

    def start(self, kernel: CudaKernel, grid: Grid, **given: Any) -> None:
        """Record a launch. Array arguments stand for the arrays' addresses, and None stands for a null address."""
        addresses = []
        for name, value in given.items():
            if isinstance(value, Array):
                addresses.append((name, value.block, value.first * value.dtype.itemsize))
                self._use(value.block)
                given[name] = 0
            elif value is None:
                given[name] = 0
        if all(grid):
            self._starts.append(_Start(kernel, grid, bind(kernel, **given), tuple(addresses)))

    def keep(self, block: Block) -> None:
        """Turn a block of intermediate memory into a block whose address is passed to each run."""
        self._own.remove(block)
        block.own = False

    def uses(self, block: Block) -> bool:
        """Return True if a launch reads or writes a block."""
        return block.dies >= 0

    def program(self) -> LaunchList:
        """Return the recorded launches. Blocks of intermediate memory with disjoint lifetimes share memory."""
        placed: list[Block] = []
        total = 0
        for block in sorted(self._own, key=lambda one: -one.nbytes):
            size, offset = -(-block.nbytes // _ALIGNED) * _ALIGNED, 0
            for other in sorted(placed, key=lambda one: one.offset):
                if other.born > block.dies or other.dies < block.born:
                    continue
                if offset + size <= other.offset:
                    break
                offset = max(offset, other.offset + -(-other.nbytes // _ALIGNED) * _ALIGNED)
            block.offset = offset
            total = max(total, offset + size)
            placed.append(block)
        return LaunchList(self._starts, self._own, total)

    def _use(self, block: Block) -> None:
        now = len(self._starts)
        block.born = now if block.born < 0 else block.born
        block.dies = now

    # Elementwise functions

    def map(
        self, function: str, inputs: Sequence[Array], out: Array, parameters: Sequence[float] = (), bits: bool = False
    ) -> Array:
        """Record out = function(inputs), with broadcast inputs. `bits`: True if only the size of the type matters."""
        wide = [value.expanded(out.shape) for value in inputs]
        all_of_them = [*wide, out]
        sizes, strides = joined(out.shape, *(value.strides for value in all_of_them))
        width = _pack(all_of_them, sizes, strides)
        sizes[0] //= width
        for steps in strides:
            steps[0] *= width
        count = math.prod(sizes)
        if count > _MOST:
            raise ArrayError(f"an array of shape {list(out.shape)} has too many elements for one launch")
        scalar = _BITS[out.dtype.itemsize]
        first, last = (scalar, scalar) if bits else (wide[0].scalar, out.scalar)
        kernel = map_kernel(len(wide), function, first, last, width)
        names = ("a", "b", "c")
        given: dict[str, Any] = dict(zip(names, wide, strict=False))
        given |= {f"{name}_strides": padded(steps, 0) for name, steps in zip(names, strides, strict=False)}
        given |= dict.fromkeys(names[len(wide) :])
        given |= {f"{name}_strides": padded((), 0) for name in names[len(wide) :]}
        given |= {"out": out, "out_strides": padded(strides[-1], 0), "count": count, "axes": len(sizes)}
        blocks = -(-count // (_THREADS * _PACKS))
        p = [*parameters, 0.0, 0.0, 0.0][:3]
        self.start(kernel, (blocks, 1, 1), sizes=padded(sizes, 1), p=p, **given)
        return out

    def copy(self, source: Array, target: Array) -> Array:
        """Record a copy of elements to an array of the same shape and type."""
        return self.map("whole::copy", [source], target, bits=True)

    def dense(self, x: Array) -> Array:
        """Return the array with contiguous elements, copied if necessary."""
        return x if x.is_dense else self.copy(x, self.new(x.shape, x.dtype))

    def reshaped(self, x: Array, shape: Sequence[int]) -> Array:
        """Return the array in another shape; it is copied only if its elements are not contiguous."""
        if math.prod(shape) != x.size:
            raise ArrayError(f"an array of shape {list(x.shape)} cannot be reshaped to {list(shape)}")
        return replace(self.dense(x), shape=tuple(shape), strides=dense_strides(shape))

    def concatenated(self, parts: Sequence[Array], axis: int) -> Array:
        """Concatenate arrays along an axis."""
        axis, first = parts[0].axis(axis), parts[0]
        for part in parts:
            if len(part.shape) != len(first.shape) or any(
                a != b for i, (a, b) in enumerate(zip(part.shape, first.shape, strict=True)) if i != axis
            ):
                raise ArrayError(
                    f"shapes {[list(one.shape) for one in parts]} cannot be concatenated along axis {axis}"
                )
        total = sum(part.shape[axis] for part in parts)
        out = self.new((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype)
        start = 0
        for part in parts:
            self.copy(part, out.part(axis, start, 1, part.shape[axis]))
            start += part.shape[axis]
        return out


def map_kernel(inputs: int, function: str, scalar: str, result: str, width: int) -> CudaKernel:
    """Return the kernel for an elementwise function of `inputs` arrays."""
    text = f"map{inputs}<{function}, {scalar}, {result}, {width}>"
    return CudaKernel("arrays_map.cu", text, "MapArguments", _THREADS)


def _pack(arrays: Collection[Array], sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """Return the number of elements per thread: 16 bytes of the widest type, or fewer until accesses are aligned."""
    width = min(16 // max(value.dtype.itemsize for value in arrays), 8)
    while width > 1:
        fits = sizes[0] % width == 0 and strides[-1][0] == 1
        for value, steps in zip(arrays, strides, strict=True):
            fits = fits and steps[0] in (0, 1)
            moves = (*steps[1:], value.first) if steps[0] else ()
            fits = fits and all(step % width == 0 for step in moves)
        if fits:
            return width
        width //= 2
    return 1
