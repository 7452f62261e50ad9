"""Matrices that format readers return: blocks of integers, or floats if no block format can represent the values."""

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
        parts: names of the tensors that store the matrix.
        dtype: dtype of the result of `read`: blocks [.., rows, blocks] (see `quant.block_types`), or float32.
        read: memory-maps or converts the matrix; repeated at every call.
        order: int64 [columns]: column i of the result of `read` is the matrix's column order[i]; None means no change.
        why: the reason why none of our block formats can represent the values exactly, or "".
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]
    order: NDArray[np.int64] | None = None
    why: str = ""

    def of_experts(self, count: int) -> LazyMatrix:
        """Return the matrix with its rows divided into the matrices of `count` experts."""
        rows, columns = self.shape
        read = self.read
        return replace(
            self, shape=(count, rows // count, columns), read=lambda: read().reshape(count, rows // count, -1)
        )


Matrices = Iterator[tuple[str, LazyMatrix]]
# A function that yields the quantised matrices among a checkpoint's tensors, by their names in float checkpoints.
# Without tensors, the function only validates the settings.
Reader = Callable[[Files, HFConfig], Matrices]


def bases(files: Files, suffix: str) -> Iterator[str]:
    """Yield all names that end with the suffix, without the suffix."""
    return (name.removesuffix(suffix) for name in files if name.endswith(suffix))


def part(files: Files, name: str, kinds: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> Array:
    """Return a tensor; None in `shape` allows any size. Raise InputError if the type or the shape is wrong."""
    if name not in files:
        raise InputError(
            f"the checkpoint has no tensor {name!r}",
            "the quantised matrix cannot be decoded without this tensor",
            "download the checkpoint again, or use another checkpoint of the same model",
        )
    tensor = files[name]
    if tensor.dtype.name not in kinds:
        raise InputError(
            f"{name} has type {tensor.dtype}",
            f"expected {' or '.join(kinds)}",
            "check quant_method in quantization_config",
        )
    if shape is not None and (
        tensor.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, tensor.shape, strict=True))
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise InputError(
            f"{name} has shape {list(tensor.shape)}, expected [{wanted}]",
            "the sizes follow from the matrix's other tensors and from quantization_config",
            "check that quantization_config and the weights belong to the same checkpoint",
        )
    return tensor


def floats(files: Files, name: str, shape: tuple[int | None, ...] | None = None) -> Array:
    """Return a tensor of 16- or 32-bit floats."""
    return part(files, name, _FLOATS, shape)


def words(files: Files, name: str, shape: tuple[int | None, ...] | None = None) -> NDArray[np.uint32]:
    """Return a tensor of 32-bit integers as unsigned words."""
    return part(files, name, ("int32", "uint32"), shape).view(np.uint32)


def bits_of(name: str, numerator: int, denominator: int) -> int:
    """Return the bits per number from the sizes of packed and unpacked numbers. Raise InputError if unsupported."""
    bits, rest = divmod(numerator, max(denominator, 1))
    if rest or bits not in CODE_BITS:
        raise InputError(
            f"{name} has {numerator} bits for {denominator} numbers",
            f"the supported widths are {', '.join(map(str, CODE_BITS))} bits per number",
            "check that the scales belong to the same matrix",
        )
    return bits


_PER_LAYER = ("dynamic", "extra_config", "modules_to_not_convert")


def check_group_size(name: str, columns: int, groups: int, settings: HFConfig, *keys: str) -> None:
    """Raise InputError if the group size differs from quantization_config, unless it sets the size per layer."""
    size = settings.get(*keys)
    if size is None or any(settings.get(key) for key in _PER_LAYER):
        return
    wanted, found = settings.integer(*keys, least=-1), groups_of(name, columns, groups)
    if found != wanted and not (groups == 1 and (wanted == -1 or wanted >= columns)):
        raise InputError(
            f"{name} has groups of {found} columns, but quantization_config sets group size {wanted}",
            "the two group sizes must be equal",
            "check that config.json and the weights belong to the same checkpoint",
        )


def check_bits(name: str, found: int, settings: HFConfig, *keys: str) -> None:
    """Raise InputError if the bits differ from quantization_config, unless it sets the bits per layer."""
    wanted = settings.integer(*keys, default=found)
    if found != wanted and not any(settings.get(key) for key in _PER_LAYER):
        raise InputError(
            f"{name} contains {found}-bit numbers, but quantization_config sets {wanted} bits",
            "the two bit widths must be equal",
            "check that config.json and the weights belong to the same checkpoint",
        )


def contradiction(name: str, found: str, setting: str) -> InputError:
    """Return the error for a tensor that differs from the settings.

    Args:
        name: the tensor or the matrix.
        found: what the tensors contain.
        setting: the key and the value of the setting.
    """
    return InputError(
        f"{name} has {found}, but quantization_config sets {setting}",
        "the settings and the tensors must describe the same quantisation",
        "check that config.json and the weights belong to the same checkpoint",
    )


def check_symmetric(name: str, zeros: Array, bits: int, settings: HFConfig, key: str, *, symmetric: bool) -> None:
    """Raise InputError if the setting `key` has the value of symmetric weights, but a zero point is not in the middle.

    Args:
        name: the tensor of the zero points.
        zeros: the actual zero points.
        symmetric: the value of the setting for symmetric weights.
    """
    if settings.get(key) is not symmetric or any(settings.get(other) for other in _PER_LAYER):
        return
    middle = 1 << (bits - 1)
    if (others := zeros[zeros != middle]).size:
        raise contradiction(name, f"zero points such as {int(others[0])}", f"{key} = {symmetric}, which means {middle}")


def groups_of(name: str, columns: int, groups: int) -> int:
    """Return the number of columns per group. Raise InputError if the groups do not divide the columns."""
    if not groups or columns % groups:
        raise InputError(
            f"{name} has {groups} groups for {columns} columns",
            "all groups must have the same number of columns",
            "check that quantization_config and the weights belong to the same checkpoint",
        )
    return columns // groups


@dataclass(frozen=True)
class Codes:
    """A matrix of integer codes that select values from a grid, with one scale per group.

    Attributes:
        shape: [rows, columns].
        bits: bits per code.
        groups: number of groups per row.
        parts: names of the tensors that the matrix consists of.
        packed: reads the codes as rows of bits, uint8 [rows, columns * bits / 8], lowest bits first.
        scales: reads the scales [rows, groups].
        zeros: zero points, integers [rows, groups]; None means 2 ** (bits - 1), or a grid that contains 0.
        least: reads the values of code 0, [rows, groups].
        grid: as in `plain_blocks`.
        order: as in `LazyMatrix`.
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
        """Return the matrix as blocks; groups that are longer than our longest block are split."""
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
        """Return the values stored in addition to scales. A stored zero point can exceed the largest code by one."""
        zeros = self.zeros
        if self.least is not None:
            return "least", self.least
        if zeros is None or (zeros == 1 << (self.bits - 1)).all():
            return "none", None
        if zeros.max() < 1 << self.bits:
            return "zero point", lambda: zeros
        return "least", lambda: -self.scales().astype(np.float32) * zeros.astype(np.float32)

    def _floats(self) -> Array:
        """Return the dequantised values."""
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
    """Pack codes [rows, columns] into rows of bits."""
    return pack_bits(codes, bits)


def group_order(
    name: str, g_idx: Array, groups: int
) -> tuple[NDArray[np.int64] | None, int]:  # the order, and the columns of a group
    """Return the column order that sorts columns by group, or None if they are already sorted.

    Raises:
        InputError: a group index is out of range.
        UnsupportedModelError: groups have different sizes.
    """
    index, columns = np.array(g_idx, np.int64), len(g_idx)
    if index.min(initial=0) < 0 or index.max(initial=0) >= groups:
        raise InputError(
            f"{name} contains group {int(index.max() if index.max() >= groups else index.min())}, but the number of "
            f"groups is {groups}",
            "each entry must be the index of a group, starting from 0",
            "download the checkpoint again",
        )
    size = groups_of(name, columns, groups)
    if (np.bincount(index, minlength=groups) != size).any():
        raise UnsupportedModelError(
            f"{name} has groups of different sizes",
            "all groups must have the same number of columns",
            "use the float checkpoint, or a checkpoint that was quantised with desc_act=false",
        )
    order = np.argsort(index, kind="stable")
    return (None if np.array_equal(order, np.arange(columns)) else order), size
