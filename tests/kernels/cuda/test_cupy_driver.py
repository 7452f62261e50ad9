"""The driver over CuPy: why there is no GPU, and every call, with a CuPy that keeps arrays on the host."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import genai
from genai import devices
from genai.errors import DeviceError
from genai.kernels.cuda import cupy_driver
from genai.kernels.cuda.compiler import KernelCompiler
from genai.kernels.cuda.cupy_driver import open_driver
from genai.kernels.cuda.driver import CudaError, NoDevice
from genai.kernels.cuda.sources import CudaKernel

from .device_array import DeviceArray, within
from .host_driver import HostDriver, LaunchError, build

Broken = Callable[..., Any]


@pytest.fixture(autouse=True)
def many_kernels_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's compiler takes seconds for each."""
    monkeypatch.setattr(cupy_driver, "_KERNELS_OF_A_MODULE", 1000)


class Array(DeviceArray):
    """An array whose `data` has an address, and which is set from others of its kind, as CuPy's."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.host.ctypes.data)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[key] = within(value)


class CUDARuntimeError(RuntimeError):
    """As CuPy names it."""


class CUDADriverError(RuntimeError):
    """As CuPy names it."""


class NVRTCError(RuntimeError):
    """As CuPy names it."""


class Nvrtc:
    """Compiles for the host: what it gives is the name of a library.

    Attributes:
        asked: options of what was compiled.
    """

    NVRTCError = NVRTCError

    def __init__(self, version: Callable[[], tuple[int, int]] = lambda: (13, 0)) -> None:
        self.getVersion, self.asked = version, list[tuple[str, ...]]()

    def getSupportedArchs(self) -> tuple[int, ...]:
        return (80, 90, 120)

    def createProgram(self, source: str, name: str, headers: tuple[str, ...], includes: tuple[str, ...]) -> Any:
        return SimpleNamespace(source=source, made="", log="")

    def compileProgram(self, program: Any, options: tuple[str, ...]) -> None:
        self.asked.append(options)
        try:
            program.made = str(build(program.source))
        except CudaError as error:
            program.log = str(error)
            raise NVRTCError("NVRTC_ERROR_COMPILATION") from error

    def getCUBIN(self, program: Any) -> bytes:
        return str(program.made).encode()

    getPTX = getCUBIN

    def getProgramLog(self, program: Any) -> str:
        return str(program.log)

    def destroyProgram(self, program: Any) -> None:
        program.made = None


class Module:
    """A library that was loaded.

    Attributes:
        unloaded: with which contexts modules were unloaded.
    """

    unloaded: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.unloaded.append(CONTEXTS.get())

    def load(self, image: bytes) -> None:
        self.library = ctypes.CDLL(image.decode())

    def get_function(self, name: str) -> Any:
        return Function(getattr(self.library, name), self)


class Function:
    """A kernel."""

    def __init__(self, function: Any, module: Module) -> None:
        self.function, self.module, self.most_shared = function, module, 0
        function.restype = ctypes.c_char_p

    @property
    def ptr(self) -> Function:
        return self

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], *, shared_mem: int
    ) -> None:
        (struct,) = arguments
        assert isinstance(struct, np.ndarray) and struct.size == 1  # which goes by value
        assert shared_mem <= max(self.most_shared, 48 << 10)
        if Stream.captured is not None:
            copy = struct.copy()
            Stream.captured.append(lambda: self(grid, block, (copy,), shared_mem=shared_mem))
            return
        address = ctypes.c_void_p(struct.ctypes.data)
        error = self.function((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_mem, 0, address)
        if error:
            raise LaunchError(error.decode())


def set_attribute(function: Function, attribute: int, value: int) -> None:
    assert attribute == 8 and value <= 227 << 10
    function.most_shared = value


class Contexts(threading.local):
    """The contexts of threads, as numbers: 100 is that of GPU 0. The runtime opens that where a thread has none."""

    opened: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.current = 0

    def get(self) -> int:
        return self.current

    def set(self, context: int) -> None:
        self.current = context

    def set_device(self, index: int) -> None:
        self.opened.add(index)
        self.current = 100 + index

    def asks(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the runtime's."""

        def asked(*arguments: Any, **options: Any) -> Any:
            if not self.current:
                self.set_device(0)
            return call(*arguments, **options)

        return asked


CONTEXTS = Contexts()


class Stream:
    """Launches that are captured are kept, and started by the graph."""

    captured: list[Callable[[], None]] | None = None
    ptr = 4711

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.synchronize()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        CONTEXTS.asks(lambda: None)()

    def __del__(self) -> None:
        CONTEXTS.asks(lambda: None)()

    def begin_capture(self) -> None:
        Stream.captured = []

    def end_capture(self) -> Any:
        launches, Stream.captured = Stream.captured, None
        assert launches is not None

        return Graph(launches)


class Graph:
    """Launches that were captured."""

    def __init__(self, launches: list[Callable[[], None]]) -> None:
        self.launches = launches

    def launch(self, stream: Stream) -> None:
        stream.synchronize()
        for one in self.launches:
            one()

    def __del__(self) -> None:
        CONTEXTS.asks(lambda: None)()


class Event:
    """Everything is done at once."""

    done = True

    def __init__(self, *, disable_timing: bool = False) -> None:
        self.is_timed = not disable_timing
        self.synchronize()

    def record(self, stream: Stream) -> None:
        assert Stream.captured is None
        self.at = time.perf_counter()
        self.synchronize()

    def synchronize(self) -> None:
        CONTEXTS.asks(lambda: None)()

    __del__ = synchronize


def elapsed(begin: Event, end: Event) -> float:
    assert begin.is_timed and end.is_timed
    return (end.at - begin.at) * 1e3


def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    assert kind in (1, 2) and stream == Stream.ptr and Stream.captured is None
    ctypes.memmove(target, source, nbytes)


def fake_cupy(**changes: Any) -> Any:
    """As much of CuPy as the driver uses; `changes` are of its runtime and compiler.

    Its GPUs are of an age (`capability`, ten times, by number) for which nothing is asked of the driver's own library,
    which may be there.
    """
    CONTEXTS.opened.clear()
    CONTEXTS.set(0)
    asks, capability = CONTEXTS.asks, changes.get("capability", lambda index: 80)
    runtime = SimpleNamespace(
        getDeviceCount=changes.get("count", lambda: 1),
        getDeviceProperties=lambda index: {"name": b"a made-up GPU", "multiProcessorCount": 4},
        deviceGetAttribute=lambda what, index: divmod(capability(index), 10)[what - 75],
        setDevice=CONTEXTS.set_device,
        deviceSynchronize=asks(lambda: None),
        memcpyAsync=asks(memcpy_async),
        memGetInfo=asks(changes.get("memory", lambda: (1 << 30, 1 << 31))),
        CUDARuntimeError=CUDARuntimeError,
    )
    cuda = SimpleNamespace(
        runtime=runtime, nvrtc=Nvrtc(changes.get("version", lambda: (13, 0))), Stream=Stream, Event=Event,
        get_elapsed_time=asks(elapsed),
        driver=SimpleNamespace(
            CUDADriverError=CUDADriverError, funcSetAttribute=set_attribute,
            ctxGetCurrent=CONTEXTS.get, ctxSetCurrent=CONTEXTS.set,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        ),
        alloc_pinned_memory=bytearray, function=SimpleNamespace(Module=Module),
    )  # fmt: skip
    return SimpleNamespace(
        cuda=cuda, ascontiguousarray=asks(lambda array: Array(np.ascontiguousarray(within(array)))),
        zeros=asks(lambda size, dtype: Array(HostDriver().zeros(size).host)),
        asarray=asks(lambda array: Array(HostDriver().upload(array).host)),
        get_default_memory_pool=lambda: SimpleNamespace(free_bytes=lambda: 0),
    )  # fmt: skip


def test_what_is_made_for_it_stays_out_of_the_user_s_cache(
    kernels_of_a_made_up_gpu_go_with_the_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU could load it, and it would be found by its source."""
    kept = KernelCompiler(Nvrtc(), 90)._folder.path
    assert kept == kernels_of_a_made_up_gpu_go_with_the_run / "kernels" / "cuda"
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path))
    assert KernelCompiler(Nvrtc(), 90)._folder.path == tmp_path / "genai" / "kernels" / "cuda"


def failing(text: str) -> Broken:
    def call() -> None:
        raise RuntimeError(text)

    return call


@pytest.mark.parametrize(
    ("module", "index", "text"),
    [
        (None, 0, "CuPy is not installed"),
        (fake_cupy(count=failing("cudaErrorInsufficientDriver\nmore")), 0, "does not respond: RuntimeError: cudaErr"),
        (fake_cupy(), 1, r"there is no GPU 1 \(number of GPUs: 1\)"),
        (fake_cupy(capability=lambda index: 75), 0, "has compute capability 75, but at least 80 is required"),
        (fake_cupy(version=failing("libnvrtc.so.13: not found")), 0, "NVRTC cannot be loaded: RuntimeError: libnvrtc"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, module: Any, index: int, text: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", module)
    with pytest.raises(NoDevice, match=text) as raised:
        open_driver(index)
    assert "\n" not in str(raised.value)
    with pytest.raises(DeviceError, match=text) as refused:
        devices.open_executor(f"cuda:{index}")
    assert f"cuda:{index}" in refused.value.what and "docs/how-to/gpu.md" in refused.value.fix


def test_auto_takes_the_cpu_and_says_so_once(monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(devices, "_told", set())
    for _ in range(2):
        executor = devices.open_executor("auto", threads=1)
        assert executor.name == "cpu"
    assert logged() == ["computing on the CPU: CuPy is not installed"]


def test_importing_the_toolkit_imports_no_cupy() -> None:
    import subprocess

    code = "import sys, genai, genai.devices, genai.kernels.cuda.executor; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_the_bundled_model_answers_through_cupy_s_calls(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch, bundled_folder: Path, device: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    with genai.LLM(bundled_folder, device=device, accuracy="fp32", context_size=128, cache_bytes=4 << 20) as llm:
        assert llm.chat([{"role": "user", "content": "What is 12 + 7?"}], temperature=0).text == "19"
        assert llm.model.device_type == "CUDA"
        assert llm.model.decoder.executor.driver.name == "a made-up GPU"  # type: ignore[attr-defined]


def test_a_kernel_that_does_not_compile_is_shown(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    with pytest.raises(CudaError, match=r"cannot be compiled on a made-up GPU(.|\n)*nothing_of_the_kind"):
        open_driver().load([CudaKernel("norm.cu", "nothing_of_the_kind", "NormArguments", 256)])


def test_other_threads_wait_while_launches_are_captured(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs would be captured, too: a GPU has one stream."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    gpu, done = open_driver(), list[str]()
    other = threading.Thread(target=lambda: done.append(str(gpu.free_bytes())))

    def work() -> None:
        other.start()
        other.join(0.2)
        done.append("captured")

    gpu.capture(work)
    other.join(10)
    assert done == ["captured", str(gpu.free_bytes())]


def test_no_other_gpu_is_opened(driver: HostDriver, monkeypatch: pytest.MonkeyPatch, bundled_folder: Path) -> None:
    """By any thread, which finds again what was current before."""
    gc.collect()  # what other tests left
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count=lambda: 2))
    options = {"accuracy": "fp32", "context_size": 128, "cache_bytes": 4 << 20}
    with genai.LLM(bundled_folder, device="cuda:1", **options) as llm:
        assert llm.generate("12 + 7", temperature=0, max_tokens=2)
        current: list[int] = []
        thread = threading.Thread(target=_ask, args=(llm.model.decoder.executor.driver, current))  # type: ignore[attr-defined]
        thread.start()
        thread.join()
    Module.unloaded.clear()
    devices._gpus.clear()
    del llm
    gc.collect()  # which destroys what is left, in a thread that has no context
    assert CONTEXTS.opened == {1} and current == [0] and CONTEXTS.get() == 0
    assert set(Module.unloaded) == {101}


def _ask(gpu: Any, current: list[int]) -> None:
    event = gpu.event()
    event.wait()
    event.record()
    gpu.synchronize()
    gpu.settle()
    current.append(CONTEXTS.get())


def test_how_long_work_takes_by_the_gpu_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count=lambda: 2))
    gpu = open_driver(1)
    assert 0.01 <= gpu.seconds(lambda: time.sleep(0.01)) < 1
    assert not gpu.event().value.is_timed  # others need not be


def test_pinned_memory_goes_back_once_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy would give it to others at once, which a copy that is under way would then write into."""

    class Pinned(bytearray):
        freed = 0

        def __del__(self) -> None:
            Pinned.freed += 1

    cupy = fake_cupy()
    cupy.cuda.alloc_pinned_memory = Pinned
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(Event, "done", False)
    gpu = open_driver()
    kept, other = gpu.host_memory(8), gpu.host_memory(8)
    del other
    assert Pinned.freed == 0
    gpu.host_memory(8)
    assert Pinned.freed == 0 and kept.tolist() == [0] * 8  # it is not known whether copies are done
    monkeypatch.setattr(Event, "done", True)
    gpu.host_memory(8)
    assert Pinned.freed == 2


def test_want_of_pinned_memory_is_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy says it as another error than that of a GPU's memory."""

    def refused(nbytes: int) -> Any:
        error = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        error.status = 2  # type: ignore[attr-defined]
        raise error

    cupy = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    gpu = open_driver()
    cupy.cuda.alloc_pinned_memory = refused
    with pytest.raises(MemoryError, match="cudaErrorMemoryAllocation"):
        gpu.host_memory(64)


def test_the_driver_s_own_call_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread that has asked CuPy for nothing."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    gpu, seen = open_driver(), list[int]()
    gpu._dependent = SimpleNamespace(launch=lambda *_: seen.append(CONTEXTS.get()))  # type: ignore[assignment]
    kernel = CudaKernel("norm.cu", "norm<false>", "NormArguments", 256)
    launch = threading.Thread(
        target=gpu.launch, args=(SimpleNamespace(value=SimpleNamespace(ptr=1)), kernel, (1, 1, 1), np.zeros(()))
    )
    launch.start()
    launch.join()
    assert seen == [100]


def test_what_raises_in_a_capture_ends_it(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    with pytest.raises(ZeroDivisionError):
        open_driver().capture(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert Stream.captured is None


@pytest.mark.parametrize("kind", [CUDARuntimeError, CUDADriverError])
def test_errors_of_cupy_become_ours(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def lost() -> None:
        raise kind("cudaErrorECCUncorrectable: uncorrectable ECC error encountered\nmore")

    cupy = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    gpu = open_driver()
    cupy.cuda.runtime.memGetInfo = lost
    with pytest.raises(CudaError, match=r"^a made-up GPU: CUDA.*: cudaErrorECCUncorrectable: uncorrectable") as raised:
        gpu.free_bytes()
    assert "more" not in str(raised.value)
