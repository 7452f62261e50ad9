"""Weights in device memory, copied once for all ops that use them, and the check of weight formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..device import UnsupportedOp
from ..ir import BlockWeight, Constants, DenseWeight, Weight
from ..weights import QuantizationError
from .driver import MOST_IN_GRID, Driver
from .launches import bind
from .memory import as_float32
from .sources import CudaKernel, structs
from .weight_layout import ADDRESSES, CHUNK, BlockReader, UnsupportedWeight, check_grid, lay_out

STRIDE = 1024
"""The number of columns that a warp processes together, 32 per lane."""
_SCALAR = {"float32": "float", "float16": "half_bits", "bfloat16": "bfloat_bits"}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Number of bytes of codes that are copied together, before they are arranged in planes.
_STAGED_BYTES = 32 << 20
_PACK_THREADS = 128


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix [rows, columns] in device memory. For experts, the matrix holds the rows of one expert after another.

    Attributes:
        rows: number of rows.
        columns: number of columns.
        fields: fields of `BlockMatrix` in weights.cuh.
        reader: reader of the quantised weights; None for floats.
        scalar: C++ type of the floats.
        nbytes: number of bytes that a matmul reads.
        held: the device arrays of the matrix.
    """

    rows: int
    columns: int
    fields: dict[str, Any]
    reader: BlockReader | None
    scalar: str
    nbytes: int
    held: tuple[Any, ...]

    @property
    def bits(self) -> int:
        """The number of bits of a code; 0 for floats."""
        return self.reader.bits if self.reader else 0

    @property
    def number_bytes(self) -> int:
        """The number of bytes of a row's scales and offsets, for quantised weights."""
        return max(self.nbytes // self.rows - 4 * self.bits * -(-self.columns // CHUNK), 0)

    @property
    def strides(self) -> int:
        """The number of strides of 1,024 columns (one warp's) in a row; the last stride is padded."""
        return -(-self.columns // STRIDE)


class DeviceWeights:
    """Weights and other constants of an executor's programs. A name is unique only within its program's constants."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._matrices: WeakKeyDictionary[Constants, dict[Weight, DeviceMatrix]] = WeakKeyDictionary()
        self._vectors: WeakKeyDictionary[Constants, dict[str, Any]] = WeakKeyDictionary()
        self._indices: WeakKeyDictionary[Constants, dict[str, Any]] = WeakKeyDictionary()
        self._packing: dict[CudaKernel, Any] = {}

    def matrix(self, weight: Weight, constants: Constants) -> DeviceMatrix:
        """Return a weight in device memory.

        Raises:
            UnsupportedOp: if no kernel supports the weight's format.
        """
        known = self._matrices.setdefault(constants, {})
        if weight not in known:
            check_weight(weight, constants)
            try:
                known[weight] = self._copy(weight, constants)
            except (UnsupportedWeight, QuantizationError) as error:
                raise UnsupportedOp(f"CUDA has no kernels for {error}") from None
            constants.packed(weight)
        return known[weight]

    def _copy(self, weight: Weight, constants: Constants) -> DeviceMatrix:
        if isinstance(weight, BlockWeight):
            return self._copy_blocks(weight, *lay_out(weight, constants))
        return self._copy_floats(weight, constants)

    def vector(self, constants: Constants, name: str) -> Any:
        """Return a constant as contiguous float32 in device memory."""
        return self._once(self._vectors, constants, name, as_float32)

    def indices(self, constants: Constants, name: str) -> Any:
        """Return a constant of indices as contiguous int32 in device memory."""
        return self._once(self._indices, constants, name, lambda array: np.ascontiguousarray(array, np.int32))

    def _once(
        self,
        copies: WeakKeyDictionary[Constants, dict[str, Any]],
        constants: Constants,
        name: str,
        convert: Callable[[NDArray[Any]], NDArray[Any]],
    ) -> Any:
        known = copies.setdefault(constants, {})
        if name not in known:
            known[name] = self._driver.upload(convert(constants.array(name)))
        return known[name]

    def address(self, constants: Constants, name: str) -> int:
        """Return the address of a constant as float32; 0 for ""."""
        return self._driver.address(self.vector(constants, name)) if name else 0

    def _copy_blocks(
        self, weight: BlockWeight, reader: BlockReader, codes: NDArray[np.uint8], fields: dict[str, Any]
    ) -> DeviceMatrix:
        driver, planes = self._driver, self._pack(reader, codes, fields["chunks"])
        copies = {name: driver.upload(_as_integers(fields[name])) for name in ADDRESSES if name in fields}
        fields = _no_fields() | fields | {name: driver.address(copy) for name, copy in copies.items()}
        fields |= {"data": driver.address(planes[0]), "second": driver.address(planes[1]) if planes[1:] else 0}
        held = (*planes, *copies.values())
        nbytes = sum(array.nbytes for array in held)
        return DeviceMatrix(len(codes), weight.columns, fields, reader, "", nbytes, held)

    def _pack(self, reader: BlockReader, codes: NDArray[np.uint8], chunks: int) -> list[Any]:
        """Arrange the codes of a matrix in planes. The device does this for some rows at a time."""
        rows, row_bytes = codes.shape
        planes = [self._driver.zeros(4 * words * rows * chunks) for words in reader.words if words]
        kernel = pack_kernel(reader)
        if kernel not in self._packing:
            self._packing |= self._driver.load([kernel])
        together = min(max(1, _STAGED_BYTES // row_bytes), MOST_IN_GRID)
        for first in range(0, rows, together):
            staged = self._driver.upload(codes[first : first + together])
            arguments = bind(
                kernel, source=self._driver.address(staged), data=self._driver.address(planes[0]),
                second=self._driver.address(planes[-1]), first_row=first, row_bytes=row_bytes, rows=len(staged),
                chunks=chunks,
            )  # fmt: skip
            self._driver.launch(self._packing[kernel], kernel, (-(-chunks // _PACK_THREADS), len(staged), 1), arguments)
        return planes

    def _copy_floats(self, weight: DenseWeight, constants: Constants) -> DeviceMatrix:
        stored, experts = constants.array(weight.data), max(weight.experts, 1)
        scalar = _SCALAR.get(stored.dtype.name)
        if scalar is None:
            raise UnsupportedOp(f"CUDA has no kernels for weights of {stored.dtype.name}")
        rows, chunks = experts * weight.rows, -(-weight.columns // CHUNK)
        if weight.transposed:
            whole = stored.reshape(rows, weight.columns)
        else:
            whole = stored.reshape(experts, weight.columns, weight.rows).swapaxes(1, 2).reshape(rows, weight.columns)
        if weight.columns % CHUNK:
            whole = np.pad(whole, ((0, 0), (0, -weight.columns % CHUNK)))
        array = self._driver.upload(_as_integers(np.ascontiguousarray(whole)))
        fields = _no_fields() | {"data": self._driver.address(array), "chunks": chunks}
        return DeviceMatrix(rows, weight.columns, fields, None, scalar, array.nbytes, (array,))


def check_weight(weight: Weight, constants: Constants | None = None) -> None:
    """Raise UnsupportedOp unless kernels can read a weight; the message names the format.

    Args:
        weight: the weight.
        constants: the constants that hold the weight's grid; None = the grid is checked later.
    """
    refused = ""
    if isinstance(weight, BlockWeight) and not weight.is_uniform:
        try:
            if weight.values:
                check_grid(np.array(weight.values, np.float32))
            elif constants is not None:
                check_grid(np.asarray(constants.array(weight.grid), np.float32))
        except UnsupportedWeight as error:
            refused = str(error)
    if refused:
        raise UnsupportedOp(f"CUDA has no kernels for {refused}")


def pack_kernel(reader: BlockReader) -> CudaKernel:
    """Return the kernel that arranges codes in planes. The kernel does not depend on the numbers of blocks."""
    plain = BlockReader(reader.bits, grid=reader.grid)
    return CudaKernel("packing.cu", f"pack_codes<{plain.name}>", "PackArguments", _PACK_THREADS)


def _no_fields() -> dict[str, Any]:
    return dict.fromkeys(structs("weights.cuh")["BlockMatrix"].names or (), 0)


def _as_integers(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same bits in a type that all devices' arrays support."""
    if array.dtype in (np.float32, np.float16):
        return array
    bits: NDArray[Any] = array.view(_UNSIGNED[array.itemsize])
    return bits
