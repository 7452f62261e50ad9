"""Weights in device memory, copied once however many ops name them, and which of them there are kernels for."""

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
"""Columns that a warp takes at once, 32 a lane."""
_SCALAR = {"float32": "float", "float16": "half_bits", "bfloat16": "bfloat_bits"}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Bytes of codes that are copied at once, before they are put into planes.
_STAGED_BYTES = 32 << 20
_PACK_THREADS = 128


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix [rows, columns] in device memory; that of experts has the rows of one expert after another's.

    Attributes:
        fields: of `BlockMatrix` in weights.cuh.
        reader: of small integers; None = it holds floats. scalar: C++ type of the floats.
        nbytes: bytes that a product reads. held: the arrays.
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
        """Of a code; 0 = it holds floats."""
        return self.reader.bits if self.reader else 0

    @property
    def number_bytes(self) -> int:
        """Of a row's scales and what goes with them, where it is of small integers."""
        return max(self.nbytes // self.rows - 4 * self.bits * -(-self.columns // CHUNK), 0)

    @property
    def strides(self) -> int:
        """Warps' strides of 1,024 columns in a row, the last one filled up."""
        return -(-self.columns // STRIDE)


class DeviceWeights:
    """Weights and other constants of an executor's programs: names mean something among their own constants only."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._matrices: WeakKeyDictionary[Constants, dict[Weight, DeviceMatrix]] = WeakKeyDictionary()
        self._vectors: WeakKeyDictionary[Constants, dict[str, Any]] = WeakKeyDictionary()
        self._indices: WeakKeyDictionary[Constants, dict[str, Any]] = WeakKeyDictionary()
        self._packing: dict[CudaKernel, Any] = {}

    def matrix(self, weight: Weight, constants: Constants) -> DeviceMatrix:
        """A weight in device memory.

        Raises:
            UnsupportedOp: there is no kernel for its format.
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
        """A constant as contiguous float32 in device memory."""
        return self._once(self._vectors, constants, name, as_float32)

    def indices(self, constants: Constants, name: str) -> Any:
        """A constant of indices as contiguous int32 in device memory."""
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
        """Where a constant begins; 0 for ""."""
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
        """The codes of a matrix in planes, put there by the device, some rows at a time."""
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
    """Raise UnsupportedOp, which names the format, unless kernels read it.

    Args:
        constants: in which a grid is found; None = it is looked at later.
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
    """The kernel that puts codes into planes; it does not depend on what the numbers of blocks are."""
    plain = BlockReader(reader.bits, grid=reader.grid)
    return CudaKernel("packing.cu", f"pack_codes<{plain.name}>", "PackArguments", _PACK_THREADS)


def _no_fields() -> dict[str, Any]:
    return dict.fromkeys(structs("weights.cuh")["BlockMatrix"].names or (), 0)


def _as_integers(array: NDArray[Any]) -> NDArray[Any]:
    """The same bits in a type that every device's arrays have."""
    if array.dtype in (np.float32, np.float16):
        return array
    bits: NDArray[Any] = array.view(_UNSIGNED[array.itemsize])
    return bits
