"""Maximum rates of a GPU, for comparison with achieved rates: memory reads, and arithmetic that uses only registers."""

from __future__ import annotations

import time
from collections.abc import Callable

from .driver import Driver
from .launches import bind
from .sources import CudaKernel

_THREADS = 256
# More blocks than all multiprocessors of any GPU can hold.
_BLOCKS = 132 * 8 * 4
_BUFFER_BYTES, _SHARE_OF_FREE = 1 << 30, 8
_ROUNDS, _PRODUCTS = 512, 8
# Number of operations of a block in a round: _PRODUCTS products of 16 x 8 x 16 (int8: x 32) per warp, or four times
# this number of products of two numbers per thread.
_OPERATIONS = {
    "mma bf16": 2 * 16 * 8 * 16 * _PRODUCTS * _THREADS // 32,
    "mma int8": 2 * 16 * 8 * 32 * _PRODUCTS * _THREADS // 32,
    "fp32": 2 * 4 * _PRODUCTS * _THREADS,
}
_FUNCTIONS = {
    "bandwidth": "read_memory", "mma bf16": "multiply_bfloats", "mma int8": "multiply_many_bytes",
    "fp32": "multiply_floats",
}  # fmt: skip
_REPEATS = 5


def speed_kernel(name: str) -> CudaKernel:
    """Return the kernel that measures one of the rates."""
    return CudaKernel("speeds.cu", _FUNCTIONS[name], "SpeedArguments", _THREADS)


SPEED_KERNELS = tuple(speed_kernel(name) for name in _FUNCTIONS)


def measured(driver: Driver, name: str) -> float | None:
    """Measure bytes read per second ("bandwidth") or operations per second of an arithmetic; None = unknown arithmetic.

    Raises:
        MemoryError: if there is not enough memory for a buffer that exceeds the caches.
    """
    if name not in _FUNCTIONS:
        return None
    kernel = speed_kernel(name)
    functions, out = driver.load([kernel]), driver.zeros(256)
    given = {"data": 0, "out": driver.address(out), "count": _ROUNDS}
    work = float(_BLOCKS * _ROUNDS * _OPERATIONS.get(name, 0))
    if name == "bandwidth":
        buffer = driver.zeros(min(_BUFFER_BYTES, driver.free_bytes() // _SHARE_OF_FREE) // 4096 * 4096)
        work, given["count"], given["data"] = float(buffer.nbytes), buffer.nbytes // 16, driver.address(buffer)
    arguments = bind(kernel, **given)
    seconds = _seconds(driver, lambda: driver.launch(functions[kernel], kernel, (_BLOCKS, 1, 1), arguments))
    return work / seconds


def _seconds(driver: Driver, start: Callable[[], None]) -> float:
    """Return the time of one launch, which is the mean of several consecutive launches."""
    start()
    driver.synchronize()
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        start()
    driver.synchronize()
    return (time.perf_counter() - begin) / _REPEATS
