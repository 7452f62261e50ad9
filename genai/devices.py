"""Devices by name: the one place that chooses an executor."""

from __future__ import annotations

import threading

from genai.common.log import logger
from genai.common.progress import is_quiet
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.cpu.jit.isa import IsaError, isa
from genai.kernels.cpu.jit.native import LIBRARY
from genai.kernels.cpu.program.thread_pool import MAX_THREADS
from genai.kernels.cuda.driver import Driver, NoDevice
from genai.kernels.device import Executor

from .errors import DeviceError, OptionError, whole_number

_log = logger(__name__)
# Why there is no GPU, once that is logged.
_told: set[str] = set()
# GPUs that arrays lie on.
_gpus: dict[int, Driver] = {}
_opening = threading.Lock()


def compile_seconds() -> float:
    """Seconds that this process has waited for kernels to be compiled, so far."""
    return LIBRARY.compile_seconds


def instructions(executor: Executor) -> str:
    """What an executor computes with, where that changes how results round: the device, and its instructions."""
    if isinstance(executor, CpuExecutor):
        return f"{executor.name} {isa()}"
    gpu = getattr(executor, "driver", None)
    return executor.name if gpu is None else f"{executor.name} sm_{gpu.capability}"


def open_executor(device: str = "cpu", threads: int | None = None) -> Executor:
    """The executor of a device.

    Args:
        device: one of `genai.models.model_options.DEVICES`. threads: of the CPU; None = the physical cores available.

    Raises:
        OptionError: more threads than can share a step; GENAI_CPU_ISA cannot be obeyed.
        DeviceError: there is no GPU that can be used.
    """
    _check_threads(threads)
    if device == "reference":
        from genai.kernels.reference.executor import ReferenceExecutor

        return ReferenceExecutor(threads)
    if device.startswith(("cuda", "auto")):
        try:
            return _open_gpu(device, threads)
        except NoDevice as error:
            if device != "auto":
                raise no_gpu(f"device = {device!r} cannot be used", error) from error
            tell_of_the_cpu(str(error))
    try:
        isa()
    except IsaError as error:
        raise OptionError("GENAI_CPU_ISA cannot be obeyed", str(error), "unset it, or choose another") from error
    return CpuExecutor(threads)


def _check_threads(threads: int | None) -> None:
    if threads is not None and threads > MAX_THREADS:
        raise OptionError(
            f"threads = {threads}", f"at most {MAX_THREADS} can share a step", "leave it out for the physical cores"
        )


def open_asked(device: str, asked_by: str, threads: int | None = None) -> Executor:
    """The executor of a GPU that nobody but a file asks for, or the CPU's, which serves as well then."""
    _check_threads(threads)
    try:
        return _open_gpu(device, threads)
    except NoDevice as error:
        tell_of_the_cpu(str(error), device, asked_by)
        return open_executor("cpu", threads)


_TAKE_THE_CPU = '--device cpu (device="cpu") takes the CPU'


def no_gpu(what: str, error: NoDevice, instead: str = _TAKE_THE_CPU) -> DeviceError:
    """The error where a GPU was asked for that cannot be used; `instead`: how to do without."""
    return DeviceError(what, str(error), f"{_remedy(str(error), instead)}; docs/cuda.md has more")


def _remedy(why: str, instead: str = _TAKE_THE_CPU) -> str:
    """What to do where a GPU cannot be used."""
    from genai.kernels.cuda.cupy_driver import NOT_INSTALLED

    doctor = f"genai doctor shows what is there; {instead}"
    install = "pip install cupy-cuda13x (cupy-cuda12x where the driver is older than 580)"
    return f"{install}; {doctor}" if why == NOT_INSTALLED else doctor


def check_device(device: object) -> None:
    """See now whether a GPU that is asked for can be used: before anything is fetched or built.

    Raises:
        DeviceError: it cannot.
    """
    kind, _, digits = str(device).partition(":")
    number = whole_number(digits or "0")
    if kind != "cuda" or number is None:
        return
    try:
        open_gpu(number)
    except NoDevice as error:
        raise no_gpu(f"device = {device!r} cannot be used", error) from error


def why_no_gpu(index: int) -> str:
    """Why the GPU with a number cannot be used, in one line; "" = it can."""
    try:
        open_gpu(index)
    except NoDevice as error:
        return str(error)
    return ""


def first_gpu() -> str:
    """The device that "auto" takes. Raises NoDevice: there is no GPU that can be used."""
    from genai.kernels.cuda.cupy_driver import device_name, open_any

    return device_name(open_any().index)


def tell_of_the_cpu(why: str, device: str = "auto", asked_by: str = "") -> None:
    """Log once that the CPU computes though a GPU might, and why; where a file asks for it, what to do about that."""
    if _told or is_quiet():
        return
    _told.add(why)
    if asked_by:
        why = f"{why}. {asked_by} asks for {device}: {_remedy(why)}"
    _log.info("computing on the CPU: %s", why)


def _open_gpu(device: str, threads: int | None) -> Executor:
    """The executor of a GPU, for "auto" of the first one that can be used. Raises NoDevice: there is none."""
    from genai.kernels.cuda.cupy_driver import device_name, open_any, open_driver
    from genai.kernels.cuda.executor import CudaExecutor

    driver = open_any() if device == "auto" else open_driver(int(device.partition(":")[2] or 0))
    return CudaExecutor(driver, threads, device_name(driver.index))


def open_gpu(index: int) -> Driver:
    """A GPU for arrays: all sessions and values of a process share its one stream, so that they see each other's work.

    Raises:
        NoDevice: it cannot be used.
    """
    from genai.kernels.cuda.cupy_driver import open_driver

    with _opening:
        if index not in _gpus:
            _gpus[index] = open_driver(index)
        return _gpus[index]
