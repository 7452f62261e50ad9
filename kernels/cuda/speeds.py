"""What a GPU does at most, for comparison with what is reached: reading memory, and multiplying in registers alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from .driver import Driver
from .launches import bind
from .sources import CudaKernel

_THREADS = 256
# More blocks than multiprocessors hold together, whatever the GPU.
_BLOCKS = 132 * 8 * 4
_BUFFER_BYTES, _SHARE_OF_FREE = 1 << 30, 8
_ROUNDS, _PRODUCTS = 512, 8
# Operations of a block and round: a warp's tiles of 16 x 8 x 16, or a thread's four times as many products.
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
    """The kernel that measures one of them."""
    return CudaKernel("speeds.cu", _FUNCTIONS[name], "SpeedArguments", _THREADS)


SPEED_KERNELS = tuple(speed_kernel(name) for name in _FUNCTIONS)


def measured(driver: Driver, name: str) -> float | None:
    """Bytes that are read per second ("bandwidth"), or operations per second in an arithmetic; None = it is not known.

    Raises:
        MemoryError: there is too little for a buffer that caches do not hold.
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
    """Of one of several launches one after another."""
    start()
    driver.synchronize()
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        start()
    driver.synchronize()
    return (time.perf_counter() - begin) / _REPEATS
