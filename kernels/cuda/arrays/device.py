"""A GPU that computes functions of arrays, with loaded kernels, constants, and programs with their inputs and results.

One transfer copies all inputs from the host, and another transfer copies all results that the host needs. Other results
stay in device memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..driver import Driver
from ..sources import CudaKernel
from .launches import Array, Block, Recorder, dense_strides
from .memory import DeviceTensor, Pool, Region, to_host
from .rows import gathered, gathered_by_tuples

_ALIGNED = 256
_STATUS = np.dtype(np.int32)
Value = NDArray[Any] | DeviceTensor


class ArrayDevice:
    """State that the programs of a session share.

    Attributes:
        driver: the GPU.
        pool: the memory of the programs.
        lock: held while a program is launched, because a launch stores its arguments.
        functions: loaded kernels.
    """

    def __init__(self, driver: Driver, limit: int = 0) -> None:
        self.driver, self.pool = driver, Pool(driver, limit)
        self.lock = threading.Lock()
        self.functions: dict[CudaKernel, Any] = {}
        self._constants: dict[Block, DeviceTensor] = {}

    def load(self, kernels: Iterable[CudaKernel]) -> None:
        """Compile the kernels that are not loaded yet."""
        missing = [kernel for kernel in kernels if kernel not in self.functions]
        self.functions.update(self.driver.load(missing))

    def constant(self, array: NDArray[Any]) -> tuple[Block, DeviceTensor]:
        """Copy a host array; return the block for launches, and a tensor that must be held while they use the block."""
        tensor = DeviceTensor(Region(self.driver, self.pool.take(array.nbytes), self.pool), 0, array.shape, array.dtype)
        tensor.write(array)
        return Block(array.nbytes), tensor


class DeviceConstants:
    """Constants in device memory, which live for as long as this object.

    Args:
        device: the device.
        more: earlier constants to include.
    """

    def __init__(self, device: ArrayDevice, more: DeviceConstants | None = None) -> None:
        self._device, self._more = device, more
        self._held: dict[Block, DeviceTensor] = {}

    def __call__(self, array: NDArray[Any]) -> Block:
        """Copy an array to device memory and return its block."""
        block, tensor = self._device.constant(np.ascontiguousarray(array))
        self._held[block] = tensor
        return block

    def addresses(self) -> dict[Block, int]:
        """Return the address of each constant."""
        more = {} if self._more is None else self._more.addresses()
        return more | {block: tensor.address for block, tensor in self._held.items()}


class Status:
    """A number in device memory that kernels set if an index is out of range, and the meaning of each number.

    Args:
        recorder: the recorder of the program.
        error: function that creates the error from a text that names the node.
    """

    def __init__(self, recorder: Recorder, error: Callable[[str], Exception]) -> None:
        self._to, self._error = recorder, error
        self.labels: list[str] = []
        self.array: Array | None = None

    def gathered(self, x: Array, indices: Array, axis: int, label: str) -> Array:
        """Gather `x` at `indices` of an axis; `label` names the node in the error for an index that is out of range."""
        status = self._ready(f"{label}: an index is out of the range 0 to {x.shape[x.axis(axis)] - 1}")
        return gathered(self._to, x, indices, axis, status, len(self.labels))

    def gathered_by_tuples(self, x: Array, indices: Array, batch_axes: int, label: str) -> Array:
        """Gather `x` at tuples of indices."""
        status = self._ready(f"{label}: an index is out of range for the shape {list(x.shape)}")
        return gathered_by_tuples(self._to, x, indices, batch_axes, status, len(self.labels))

    def raise_for(self, number: int) -> None:
        """Raise an error if a kernel set a number."""
        if number:
            raise self._error(self.labels[number - 1])

    def _ready(self, text: str) -> Array:
        if self.array is None:
            self.array = Array((1,), _STATUS, (1,), Block(_STATUS.itemsize))
            self._to.copy(self._to.constant(np.zeros(1, _STATUS)), self.array)
        self.labels.append(text)
        return self.array


class ArrayProgram:
    """Launches for arrays of given shapes.

    Args:
        device: the device.
        recorder: the recorder with the launches.
        constants: the constants that the launches read.
        status: the status that kernels set.
        inputs: the recorder's arrays for the inputs of a run, in order; None for an input that is not an array.
        results: results of a run; host arrays that are already known are returned unchanged.
        on_host: True for each result that is copied to the host; the other results stay on the device.
    """

    def __init__(
        self, device: ArrayDevice, recorder: Recorder, constants: DeviceConstants, status: Status,
        inputs: Sequence[Array | None], results: Sequence[Array | NDArray[Any]], on_host: Sequence[bool],
    ) -> None:  # fmt: skip
        self._device, self._constants = device, constants
        self._on_host = on_host
        placed = [value if isinstance(value, np.ndarray) else _apart(recorder, value) for value in results]
        seen: set[Block] = set()
        for index, value in enumerate(placed):
            if isinstance(value, Array):
                apart = value.block not in seen
                own = value if apart else recorder.copy(value, recorder.new(value.shape, value.dtype))
                placed[index] = own
                seen.add(own.block)
        for value in placed:
            if isinstance(value, Array):
                recorder.keep(value.block)
        self._inputs = [None if one is None or not recorder.uses(one.block) else one for one in inputs]
        self._results = placed
        self._status = status
        self._program = recorder.program()
        device.load(self._program.kernels)
        self._lay_out()

    def _lay_out(self) -> None:
        """Compute the buffer offsets of inputs and results. Results that the host needs come first."""
        self._staged, self._staged_bytes = {}, 0
        for index, array in enumerate(self._inputs):
            if array is not None:
                self._staged[index] = self._staged_bytes
                self._staged_bytes += _rounded(array.size * array.dtype.itemsize)
        self._result_offsets: dict[int, int] = {}
        end = 0 if self._status.array is None else _ALIGNED
        for wanted in (True, False):
            for index, value in enumerate(self._results):
                if isinstance(value, Array) and self._on_host[index] is wanted:
                    self._result_offsets[index] = end
                    end += _rounded(value.size * value.dtype.itemsize)
        self._result_bytes = end
        self._staging = np.zeros(self._staged_bytes, np.uint8)

    def run(self, values: Sequence[Value]) -> list[Value]:
        """Run the program and return its results in order.

        Raises:
            DeviceFull: if the device has too little memory.
            Exception: the error of `Status`, if an index is out of range. If no result is copied to the host, the error
                is raised later, when a result is read or passed to another program.
        """
        device = self._device
        with device.lock:
            taken: list[Any] = []
            try:
                return self._run(values, taken)
            finally:
                for memory in taken:
                    device.pool.give(memory)

    def _run(self, values: Sequence[Value], taken: list[Any]) -> list[Value]:
        device = self._device
        addresses = self._constants.addresses()
        self._bring(values, taken, addresses)
        own = device.pool.take(self._program.own_bytes)
        taken.append(own)
        region = Region(device.driver, device.pool.take(self._result_bytes), device.pool)
        tensors: dict[int, DeviceTensor] = {}
        for index, offset in self._result_offsets.items():
            value = self._results[index]
            tensors[index] = DeviceTensor(region, offset, value.shape, value.dtype)
            if isinstance(value, Array):
                addresses[value.block] = tensors[index].address
        if self._status.array is not None:
            addresses[self._status.array.block] = device.driver.address(region.memory)
            region.check = self._status.raise_for
        self._program.run(device.driver, device.functions, device.driver.address(own), addresses)
        wanted = [index for index in tensors if self._on_host[index]]
        copies = to_host([tensors[index] for index in wanted])
        found: dict[int, Value] = {**tensors, **dict(zip(wanted, copies, strict=True))}
        return [found.get(index, value) for index, value in enumerate(self._results)]  # type: ignore[arg-type]

    def _bring(self, values: Sequence[Value], taken: list[Any], addresses: dict[Block, int]) -> None:
        """Copy host inputs to device memory in one transfer; device inputs are read in place if they are aligned."""
        device, moves = self._device, []
        host = [index for index in self._staged if isinstance(values[index], np.ndarray)]
        apart = [
            index for index in self._staged if isinstance(value := values[index], DeviceTensor) and value.address % 16
        ]
        memory = None
        if host or apart:
            memory = device.pool.take(self._staged_bytes)
            taken.append(memory)
        for index, offset in self._staged.items():
            value, array = values[index], self._inputs[index]
            assert array is not None
            if isinstance(value, DeviceTensor):
                value.region.verify()
            if memory is not None and (index in host or index in apart):
                addresses[array.block] = device.driver.address(memory) + offset
            if isinstance(value, np.ndarray):
                raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                moves.append((offset, raw))
            elif index in apart:
                assert memory is not None
                device.driver.copy(value.bytes, memory[offset : offset + value.nbytes])
            else:
                addresses[array.block] = value.address
        if memory is None or not moves:
            return
        if len(moves) == 1 and not apart:
            offset, raw = moves[0]
            if raw.size:
                device.driver.write(memory[offset : offset + raw.size], raw)
            return
        first, end = moves[0][0], moves[-1][0] + moves[-1][1].size
        for offset, raw in moves:
            self._staging[offset : offset + raw.size] = raw
        device.driver.write(memory[first:end], self._staging[first:end])
        for index in apart:  # the transfer overwrote the memory between the host inputs
            value, offset = values[index], self._staged[index]
            assert isinstance(value, DeviceTensor)
            device.driver.copy(value.bytes, memory[offset : offset + value.nbytes])


def taken_in(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Create the array for an input of a run."""
    size = int(np.prod(shape, dtype=np.int64))
    return Array(tuple(shape), dtype, dense_strides(shape), Block(size * dtype.itemsize))


def _apart(recorder: Recorder, value: Array) -> Array:
    """Return the array in separate memory, copied if necessary."""
    if (
        value.block.own
        and value.is_dense
        and value.first == 0
        and value.block.nbytes == value.size * value.dtype.itemsize
    ):
        return value
    return recorder.copy(value, recorder.new(value.shape, value.dtype))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
