"""What a format's reader gives: matrices that are blocks of integers, or floats where no blocks hold their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import CODE_BITS, pack_bits, uniform_grid, unpack_bits
from genai.quant.block_types import Second, block_of, plain_blocks
from genai.quant.formats import GRIDS

from ...errors import InputError, UnsupportedModelError
from ..hf_config import HFConfig

Array = NDArray[Any]
Files = Mapping[str, Array]
FLOAT32 = np.dtype(np.float32)
_FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class LazyMatrix:
    """A matrix of a checkpoint that is not stored as an array of floats.

    Attributes:
        shape: [rows, columns], or [experts, rows, columns].
        parts: names of the tensors that belong to it.
        dtype: of what `read` gives: an array of blocks [.., rows, blocks] (see `quant.block_types`), or float32.
        read: reads it; maps or converts anew every time.
        order: int64 [columns], or None: column i of what is read is column order[i] of the matrix.
        why: if there are no blocks of ours that hold its numbers exactly, why, in words.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]
    order: NDArray[np.int64] | None = None
    why: str = ""

    def of_experts(self, count: int) -> LazyMatrix:
        """The same rows as those of so many experts."""
        rows, columns = self.shape
        read = self.read
        return replace(
            self, shape=(count, rows // count, columns), read=lambda: read().reshape(count, rows // count, -1)
        )


Matrices = Iterator[tuple[str, LazyMatrix]]
# The matrices among a checkpoint's tensors, by the names that they have in float checkpoints. Without tensors it
# checks the settings alone.
Reader = Callable[[Files, HFConfig], Matrices]


def bases(files: Files, suffix: str) -> Iterator[str]:
    """What stands before this end of a tensor's name, for all that have it."""
    return (name.removesuffix(suffix) for name in files if name.endswith(suffix))


def part(files: Files, name: str, kinds: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> Array:
    """A tensor of one of these types; in `shape`, None is any size. InputError: it is missing, or another."""
    if name not in files:
        raise InputError(
            f"the checkpoint has no tensor {name!r}",
            "without it the integers beside it mean nothing",
            "download the checkpoint again; if it is whole, the tool that wrote it left it out",
        )
    tensor = files[name]
    if tensor.dtype.name not in kinds:
        raise InputError(
            f"{name} has type {tensor.dtype}", f"expected {' or '.join(kinds)}", "check quantization_config's method"
        )
    if shape is not None and (
        tensor.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, tensor.shape, strict=True))
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise InputError(
            f"{name} has shape {list(tensor.shape)}, expected [{wanted}]",
            "the sizes follow from the tensors beside it and from quantization_config",
            "check that quantization_config and the weights belong together",
        )
    return tensor


def floats(files: Files, name: str, shape: tuple[int | None, ...] | None = None) -> Array:
    """A tensor of floats of 16 or 32 bits."""
    return part(files, name, _FLOATS, shape)


def words(files: Files, name: str, shape: tuple[int | None, ...] | None = None) -> NDArray[np.uint32]:
    """A tensor of integers of 32 bits, whose signs mean nothing."""
    return part(files, name, ("int32", "uint32"), shape).view(np.uint32)


def bits_of(name: str, numerator: int, denominator: int) -> int:
    """Bits of a code by the sizes of packed and of counted numbers. InputError: no such bits."""
    bits, rest = divmod(numerator, max(denominator, 1))
    if rest or bits not in CODE_BITS:
        raise InputError(
            f"{name} has {numerator} bits for {denominator} numbers",
            f"a number takes {', '.join(map(str, CODE_BITS))} bits",
            "check that the tensor beside it that holds scales is of the same matrix",
        )
    return bits


def check_bits(name: str, found: int, settings: HFConfig, *keys: str) -> None:
    """Refuse tensors of other bits than quantization_config says, unless it says them layer by layer."""
    wanted = settings.integer(*keys, default=found)
    if found != wanted and not any(settings.get(key) for key in ("dynamic", "extra_config", "modules_to_not_convert")):
        raise InputError(
            f"{name} holds numbers of {found} bits, quantization_config says {wanted}",
            "one of them is wrong",
            "check that config.json and the weights belong together",
        )


def groups_of(name: str, columns: int, groups: int) -> int:
    """Columns of a group. InputError: they do not divide."""
    if not groups or columns % groups:
        raise InputError(
            f"{name} has scales for {groups} groups of {columns} columns",
            "groups of one size were expected",
            "check that quantization_config and the weights belong together",
        )
    return columns // groups


@dataclass(frozen=True)
class Codes:
    """A matrix of small integers that stand for numbers of a grid, group by group.

    Attributes:
        shape: [rows, columns]. bits: of a code. groups: of a row.
        parts: names of the tensors.
        packed: reads codes as rows of bits, uint8 [rows, columns * bits / 8], least bits first.
        scales: reads [rows, groups].
        zeros: integers [rows, groups] that stand for 0, None = 2 ** (bits - 1), or the grid has a 0 of its own.
        least: reads what a code of 0 stands for, [rows, groups].
        grid: as `plain_blocks` has it. order: as `LazyMatrix` has it.
    """

    shape: tuple[int, int]
    bits: int
    groups: int
    parts: tuple[str, ...]
    packed: Callable[[], NDArray[np.uint8]]
    scales: Callable[[], Array]
    zeros: Array | None = None
    least: Callable[[], Array] | None = None
    grid: str = "int"
    order: NDArray[np.int64] | None = field(default=None, kw_only=True)

    def matrix(self) -> LazyMatrix:
        """As blocks; the groups of a row are cut where they are longer than a block of ours."""
        group = groups_of(self.parts[0], self.shape[1], self.groups)
        columns = block_of(group)
        if columns is None:
            why = f"groups of {group} columns"
            return LazyMatrix(self.shape, self.parts, FLOAT32, self._floats, self.order, why)
        second, beside = self._second()
        kind, count = plain_blocks(self.bits, columns, grid=self.grid, second=second), group // columns

        def read() -> Array:
            both = (self.scales(), beside() if beside else None)
            scales, other = (None if one is None else np.repeat(one, count, 1) for one in both)
            assert scales is not None
            return kind.array(self.packed(), scales, other)

        return LazyMatrix(self.shape, self.parts, kind.dtype, read, self.order)

    def _second(self) -> tuple[Second, Callable[[], Array] | None]:
        """What blocks have beside scales. A stored zero point may be one above the largest code."""
        zeros = self.zeros
        if self.least is not None:
            return "least", self.least
        if zeros is None or (zeros == 1 << (self.bits - 1)).all():
            return "none", None
        if zeros.max() < 1 << self.bits:
            return "zero point", lambda: zeros
        return "least", lambda: -self.scales().astype(np.float32) * zeros.astype(np.float32)

    def _floats(self) -> Array:
        """The numbers themselves."""
        columns = self.shape[1]
        middle = 0 if self.least else 1 << (self.bits - 1)
        grid = GRIDS[self.grid] if self.grid != "int" else uniform_grid(self.bits, centred=not self.least)
        values = grid[unpack_bits(self.packed(), self.bits, columns)]
        count = columns // self.groups
        if self.zeros is not None:
            values += middle - np.repeat(self.zeros.astype(np.float32), count, 1)
        values *= np.repeat(self.scales().astype(np.float32), count, 1)
        return values if self.least is None else values + np.repeat(self.least().astype(np.float32), count, 1)


def rows_of_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [rows, columns] as rows of bits."""
    return pack_bits(codes, bits)


def group_order(
    name: str, g_idx: Array, groups: int
) -> tuple[NDArray[np.int64] | None, int]:  # the order, and the columns of a group
    """The order of columns in which groups lie side by side, from the group of each column; None = they do already.

    Raises:
        InputError: a group that there is not, or groups of different sizes.
    """
    index, columns = np.array(g_idx, np.int64), len(g_idx)
    if index.min(initial=0) < 0 or index.max(initial=0) >= groups:
        raise InputError(
            f"{name} names group {int(index.max() if index.max() >= groups else index.min())}, there are {groups}",
            "it says which scale each column has",
            "download the checkpoint again",
        )
    size = groups_of(name, columns, groups)
    if (np.bincount(index, minlength=groups) != size).any():
        raise UnsupportedModelError(
            f"{name} has groups of different sizes",
            "columns are put in order so that those of one scale lie side by side, in groups of one size",
            "use the float checkpoint, or one that was quantised with desc_act false",
        )
    order = np.argsort(index, kind="stable")
    return (None if np.array_equal(order, np.arange(columns)) else order), size
