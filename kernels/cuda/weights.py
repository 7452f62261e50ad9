"""Weights in device memory, copied once however many records name them, and which of them there are kernels for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..executor import UnsupportedRecord
from ..records import BlockWeight, Constants, DenseWeight, Weight
from ..weight_formats import unpack_bits
from .driver import Driver
from .memory import as_float32

CHUNK, STRIDE = 32, 1024
"""Columns that a lane takes at once, and a warp."""
_BITS = (4, 8)
_SCALAR = {"float32": "float", "float16": "half_bits", "bfloat16": "bfloat_bits"}


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix [rows, columns] in device memory, or as many after another as a mixture has experts.

    Attributes:
        fields: of `BlockMatrix` in weights.cuh; of a matrix of floats `data` alone counts.
        bits: of a code; 0 = it holds floats. scalar: C++ type of the scales, or of the floats.
        nbytes: bytes that a product reads. held: the arrays.
    """

    rows: int
    columns: int
    fields: dict[str, int]
    bits: int
    scalar: str
    nbytes: int
    held: tuple[Any, ...]

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

    def matrix(self, weight: Weight, constants: Constants) -> DeviceMatrix:
        """A weight in device memory.

        Raises:
            UnsupportedRecord: there is no kernel for its form.
        """
        known = self._matrices.setdefault(constants, {})
        if weight not in known:
            check_weight(weight)
            copy = self._copy_blocks if isinstance(weight, BlockWeight) else self._copy_floats
            known[weight] = copy(weight, constants)
            constants.packed(weight)
        return known[weight]

    def vector(self, constants: Constants, name: str) -> Any:
        """A constant as contiguous float32 in device memory."""
        known = self._vectors.setdefault(constants, {})
        if name not in known:
            known[name] = self._driver.upload(as_float32(constants.array(name)))
        return known[name]

    def address(self, constants: Constants, name: str) -> int:
        """Where a constant begins; 0 for ""."""
        return self._driver.address(self.vector(constants, name)) if name else 0

    def _copy_blocks(self, weight: Any, constants: Constants) -> DeviceMatrix:
        blocks, rows = -(-weight.columns // weight.block_size), weight.rows * max(weight.experts, 1)
        codes = constants.array(weight.data).reshape(rows, -1)
        missing = blocks * weight.block_size * weight.bits // 8 - codes.shape[1]
        if missing:  # experts are stored without what only fills up the last block of a row
            codes = np.pad(codes, ((0, 0), (0, missing)))
        scales = _scales(constants.array(weight.scales).reshape(rows, -1), blocks)
        arrays = [self._driver.upload(codes), self._driver.upload(scales)]
        if weight.points:
            points = constants.array(weight.points)
            if points.dtype != np.uint8:
                raise UnsupportedRecord("CUDA has no kernels for block-quantised weights with zero points of floats")
            whole = unpack_bits(points.reshape(rows, -1), weight.bits, blocks)
            arrays.append(self._driver.upload(whole))
        addresses = [self._driver.address(array) for array in arrays]
        fields = {"data": addresses[0], "scales": addresses[1], "points": addresses[2] if weight.points else 0}
        fields |= {"blocks": blocks, "block_size": weight.block_size}
        nbytes = sum(array.nbytes for array in arrays)
        scalar = _SCALAR[scales.dtype.name]
        return DeviceMatrix(weight.rows, weight.columns, fields, weight.bits, scalar, nbytes, tuple(arrays))

    def _copy_floats(self, weight: Any, constants: Constants) -> DeviceMatrix:
        stored = constants.array(weight.data)
        rows = stored.reshape(-1, weight.columns) if weight.transposed else stored.T
        scalar = _SCALAR.get(stored.dtype.name)
        if scalar is None:
            raise UnsupportedRecord(f"CUDA has no kernels for weights of {stored.dtype.name}")
        bits = np.ascontiguousarray(rows)
        array = self._driver.upload(bits.view(np.uint16) if scalar == "bfloat_bits" else bits)
        fields = {"data": self._driver.address(array), "scales": 0, "points": 0, "blocks": 0, "block_size": CHUNK}
        return DeviceMatrix(weight.rows, weight.columns, fields, 0, scalar, array.nbytes, (array,))


def check_weight(weight: Weight) -> None:
    """Raise UnsupportedRecord, which names the form, unless kernels read it."""
    if isinstance(weight, BlockWeight):
        name = f"block-quantised weights of {weight.bits} bits in blocks of {weight.block_size}"
        fits = weight.bits in _BITS and weight.block_size % CHUNK == 0
    elif isinstance(weight, DenseWeight):
        name, fits = "weights of floats", True
    else:
        name, fits = f"weights of {weight.form}", False
    if not fits:
        raise UnsupportedRecord(f"CUDA has no kernels for {name}")


def _scales(scales: NDArray[Any], blocks: int) -> NDArray[Any]:
    """Scales [rows, blocks], of 16 bits where that loses nothing."""
    if scales.dtype.name == "bfloat16":
        scales = scales.astype(np.float32)
    scales = np.ascontiguousarray(np.broadcast_to(scales, (len(scales), blocks)))
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    return halves if np.array_equal(halves.astype(np.float32), scales.astype(np.float32)) else scales
