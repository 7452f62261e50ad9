"""A GPU that is accessed through CuPy.

CuPy's current device and stream belong to a thread, but any thread may call this driver. Therefore every method enters
and leaves the driver's device and stream.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiler import CompileError, KernelCompiler
from .context import DeviceContext, Entered, InContext
from .dependent_launch import open_dependent_launches
from .driver import DLPACK_CUDA, CudaError, Grid, NoDevice
from .sources import CudaKernel, modules

# Ampere, the first architecture with bfloat16 tensor cores and asynchronous copies.
OLDEST_CAPABILITY = 80
NOT_INSTALLED = "CuPy is not installed"
# Parsing the text takes only a tenth of a kernel's compile time, and kernels that were compiled for another model are
# cached.
_KERNELS_OF_A_MODULE = 1
# Errors raised by a broken CuPy. Some imported modules call exit, which must not end this process.
_FAILURES = (Exception, SystemExit)


def open_driver(index: int = 0) -> CupyDriver:
    """Open the GPU with this number.

    Raises:
        NoDevice: if the GPU cannot be used; the message gives the reason in one line.
    """
    cupy, count = _counted()
    if not 0 <= index < count:
        raise NoDevice(f"there is no GPU {index} (number of GPUs: {count})")
    return _opened(cupy, index)


def open_any() -> CupyDriver:
    """Open the first GPU that can be used.

    Raises:
        NoDevice: if no GPU can be used; the message gives the reason for the first GPU in one line.
    """
    cupy, count = _counted()
    refused: list[NoDevice] = []
    for index in range(count):
        try:
            return _opened(cupy, index)
        except NoDevice as error:
            refused.append(error)
    raise refused[0] if refused else NoDevice("the driver reports no GPU")


def _counted() -> tuple[Any, int]:
    """Return CuPy and the number of GPUs."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise NoDevice(NOT_INSTALLED) from None
        raise NoDevice(f"CuPy cannot be imported: {_line(error)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # e.g. a home that cannot be written; CuPy's own text is a page around its cause
        raise NoDevice(f"CuPy cannot be imported: {_line(error.__cause__ or error)}") from error
    try:
        return cupy, int(cupy.cuda.runtime.getDeviceCount())
    except _FAILURES as error:
        raise NoDevice(f"the NVIDIA driver is missing or does not respond: {_line(error)}") from error


def _opened(cupy: Any, index: int) -> CupyDriver:
    try:
        capability = _capability(cupy, index)
    except _FAILURES as error:
        raise NoDevice(f"GPU {index} does not respond: {_line(error)}") from error
    if capability < OLDEST_CAPABILITY:
        raise NoDevice(f"GPU {index} has compute capability {capability}, but at least {OLDEST_CAPABILITY} is required")
    try:
        cupy.cuda.nvrtc.getVersion()
    except _FAILURES as error:
        raise NoDevice(f"the compiler NVRTC cannot be loaded: {_line(error)}") from error
    try:
        driver = CupyDriver(cupy, index)
        driver.free_bytes()  # fails if another process owns the GPU, or its memory is full
    except _FAILURES as error:
        raise NoDevice(f"GPU {index} cannot be opened: {_line(error)}") from error
    return driver


def _capability(cupy: Any, index: int) -> int:
    """Return ten times the compute capability of a GPU, without opening a context on the GPU."""
    ask = cupy.cuda.runtime.deviceGetAttribute
    return 10 * int(ask(_CAPABILITY_MAJOR, index)) + int(ask(_CAPABILITY_MINOR, index))


def _line(error: BaseException) -> str:
    text = "" if isinstance(error, SystemExit) and error.code is None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-")]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY. CuPy also reports the first of these errors if pinned memory
# cannot be allocated.
_OUT_OF_MEMORY = 2
# cudaMemcpyKind, cudaDeviceAttr.
_TO_DEVICE, _TO_HOST = 1, 2
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def _check_same(array: Any, host: NDArray[Any]) -> None:
    """Raise ValueError unless arrays can be copied byte by byte."""
    if not (array.flags.c_contiguous and array.shape == host.shape and array.dtype == host.dtype):
        raise ValueError(
            f"device memory is {array.dtype} {list(array.shape)}, host memory is {host.dtype} {list(host.shape)}"
        )


class _Here:
    """Enters contexts, starting with the lock, and translates CuPy's errors."""

    name = ""

    def __init__(self, cupy: Any, contexts: tuple[Any, ...]) -> None:
        cuda = cupy.cuda
        self._errors = (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)
        self._contexts = contexts

    def __enter__(self) -> None:
        entered = 0
        try:
            for context in self._contexts:
                context.__enter__()
                entered += 1
        except BaseException as error:
            self._leave(entered, error)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._leave(len(self._contexts), error)

    def _leave(self, entered: int, error: BaseException | None) -> None:
        for context in reversed(self._contexts[:entered]):
            try:
                context.__exit__(None, None, None)
            except self._errors as failed:
                error = error or failed
        if isinstance(error, self._errors):
            if getattr(error, "status", None) == _OUT_OF_MEMORY:
                raise MemoryError(f"{self.name}: {_line(error)}") from error
            raise CudaError(f"{self.name}: {_line(error)}") from error


class CupyEvent:
    """See `genai.kernels.cuda.driver.Event`."""

    def __init__(self, driver: CupyDriver, event: InContext) -> None:
        self._driver, self._event = driver, event

    @property
    def value(self) -> Any:
        """CuPy's event."""
        return self._event.value

    def record(self) -> None:
        with self._driver._named:
            self.value.record(self._driver._stream.value)

    def wait(self) -> None:
        # The wait does not hold the lock, so that other threads can submit work meanwhile. An event that was never
        # recorded counts as done.
        with self._driver._waiting:
            self._event.value.synchronize()


def device_name(index: int) -> str:
    """Return the name of the GPU with this number, as users write the name."""
    return f"cuda:{index}" if index else "cuda"


class CupyDriver:
    """See `genai.kernels.cuda.driver.Driver`.

    Attributes:
        index: index of the GPU.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy, self.index = cupy, index
        self._context = context = DeviceContext(cupy, index)
        # Without the lock, the work of other threads would also be captured while launches are captured.
        self._lock = threading.RLock()
        with context:
            self._stream = InContext(context, cupy.cuda.Stream(non_blocking=True))
        self.capability = _capability(cupy, index)
        self._compiler = KernelCompiler(cupy.cuda.nvrtc, self.capability)
        # For calls with an explicit stream: entering CuPy's stream takes longer than the calls.
        self._raw, self._pointer = cupy.cuda.runtime, int(self._stream.value.ptr)
        self._entered = _Here(cupy, (self._lock, context, Entered(self._stream)))
        self._named, self._waiting = _Here(cupy, (self._lock, context)), _Here(cupy, (context,))
        # Pinned memory of deleted arrays, and pinned memory with the event after the copies that may still use the
        # memory.
        self._unused: deque[Any] = deque()
        self._in_copies: deque[tuple[InContext, list[Any]]] = deque()
        self._dependent = open_dependent_launches(self.capability, self._pointer)
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        name, self.multiprocessors = properties["name"], int(properties["multiProcessorCount"])
        self.name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        if index:  # distinguishes GPUs of the same model
            self.name += f" ({device_name(index)})"
        self._entered.name = self._named.name = self._waiting.name = self.name

    def here(self) -> _Here:
        """Return a context in which CuPy calls use this device and stream.

        Raises:
            CudaError: in place of CuPy's own errors. Memory errors become MemoryError instead.
        """
        return self._entered

    def free_bytes(self) -> int:
        with self.here():
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            return int(free) + int(self._cupy.get_default_memory_pool().free_bytes())

    def zeros(self, nbytes: int) -> Any:
        with self.here():
            return self._cupy.zeros(nbytes, np.uint8)

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        with self.here():
            self._let_go()
            pinned = self._cupy.cuda.alloc_pinned_memory(nbytes)
            memory = np.frombuffer(pinned, np.uint8, nbytes)
        weakref.finalize(memory, self._unused.append, pinned).atexit = False
        memory[:] = 0
        return memory

    def _let_go(self) -> None:
        """Return pinned memory of deleted arrays to CuPy when the copies that may still use the memory are done."""
        if self._unused:
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream.value)
            pinned = [self._unused.popleft() for _ in range(len(self._unused))]
            self._in_copies.append((InContext(self._context, event), pinned))
        while self._in_copies and self._in_copies[0][0].value.done:
            self._in_copies.popleft()

    def upload(self, array: NDArray[Any]) -> Any:
        with self.here():
            return self._cupy.asarray(np.ascontiguousarray(array))

    def write(self, target: Any, array: NDArray[Any]) -> None:
        array = np.ascontiguousarray(array)
        _check_same(target, array)
        with self._named:
            # For host memory that is not pinned, this call returns after the memory has been read.
            self._raw.memcpyAsync(target.data.ptr, array.ctypes.data, array.nbytes, _TO_DEVICE, self._pointer)

    def download(self, array: Any) -> NDArray[Any]:
        # CuPy's own method sets the thread's device and does not restore it.
        with self.here():
            dense = self._cupy.ascontiguousarray(array)
            found = np.empty(dense.shape, dense.dtype)
            if found.nbytes:
                self._raw.memcpyAsync(found.ctypes.data, dense.data.ptr, found.nbytes, _TO_HOST, self._pointer)
                self._stream.value.synchronize()
            return found.reshape(array.shape)

    def read(self, array: Any, target: NDArray[Any]) -> None:
        _check_same(array, target)
        with self._named:
            self._raw.memcpyAsync(target.ctypes.data, array.data.ptr, target.nbytes, _TO_HOST, self._pointer)

    def event(self) -> CupyEvent:
        with self.here():
            return CupyEvent(self, InContext(self._context, self._cupy.cuda.Event(disable_timing=True)))

    def copy_row(self, rows: Any, source: int, destination: int) -> None:
        with self.here():
            rows[destination] = rows[source]

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def load(self, kernels: Collection[CudaKernel]) -> Mapping[CudaKernel, Any]:
        wanted, found = modules(kernels, _KERNELS_OF_A_MODULE), dict[CudaKernel, Any]()
        try:
            images = self._compiler.images([source for source, _ in wanted])
        except CompileError as error:
            raise CudaError(f"kernels cannot be compiled on {self.name}: {error}") from error
        cuda = self._cupy.cuda
        for image, (_, ones) in zip(images, wanted, strict=True):
            with self.here():
                module = cuda.function.Module()
                module.load(image)
                for kernel in ones:
                    function = module.get_function(kernel.name)
                    if kernel.shared:  # more than 48 KiB must be requested explicitly
                        attribute = cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                        cuda.driver.funcSetAttribute(function.ptr, attribute, kernel.shared)
                    found[kernel] = InContext(self._context, function)
                del module, function  # the functions keep the module alive
        return found

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        with self.here():
            if self._dependent is not None:
                self._dependent.launch(function.value.ptr, grid, kernel.threads, arguments, kernel.shared)
            else:  # an array of one element is passed by value
                function.value(grid, (kernel.threads, 1, 1), (arguments,), shared_mem=kernel.shared)

    def capture(self, work: Callable[[], None]) -> Any:
        with self.here():
            self._stream.value.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(Exception):  # the stream must not stay in capture mode
                    self._stream.value.end_capture()
                raise
            return InContext(self._context, self._stream.value.end_capture())

    def launch_graph(self, captured: Any) -> None:
        with self._named:
            captured.value.launch(self._stream.value)

    def seconds(self, work: Callable[[], None]) -> float:
        begin, end = (CupyEvent(self, InContext(self._context, event)) for event in self._clocks())
        begin.record()
        work()
        end.record()
        end.wait()
        with self.here():
            return float(self._cupy.cuda.get_elapsed_time(begin.value, end.value)) / 1e3

    def _clocks(self) -> tuple[Any, Any]:
        with self.here():
            return self._cupy.cuda.Event(), self._cupy.cuda.Event()

    def synchronize(self) -> None:
        with self._named:
            self._stream.value.synchronize()

    def settle(self) -> None:
        with self.here():
            self._raw.deviceSynchronize()

    def borrow(self, address: int, nbytes: int) -> Any:
        with self.here():
            memory = self._cupy.cuda.UnownedMemory(address, nbytes, None, self.index)
            return self._cupy.ndarray((nbytes,), np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))

    def adopt(self, value: Any) -> Any:
        with self.here():  # CuPy passes its stream to the producer
            return self._cupy.ascontiguousarray(self._cupy.from_dlpack(value))

    def copy(self, source: Any, target: Any) -> None:
        with self.here():
            target[...] = source

    @property
    def dlpack_device(self) -> tuple[int, int]:
        return DLPACK_CUDA, self.index

    def lend(self, array: Any, stream: Any, options: Mapping[str, Any]) -> Any:
        with self.here():  # the consumer's stream waits for this stream
            return array.__dlpack__(stream=stream, **options)
