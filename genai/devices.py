"""Devices by name: the only module that chooses an executor."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from genai.common.log import logger
from genai.common.progress import is_quiet
from genai.kernels.cpu.jit.isa import IsaError, isa
from genai.kernels.cpu.jit.native import LIBRARY
from genai.kernels.cpu.program.thread_pool import MAX_THREADS, Threads
from genai.kernels.cuda.driver import Driver, NoDevice

from .errors import DeviceError, OptionError, whole_number

if TYPE_CHECKING:  # executors import the kernels of decoders, which most sessions do not need
    from genai.kernels.device import Executor

_log = logger(__name__)
# Reasons for the use of the CPU instead of a GPU that were already logged.
_told: set[str] = set()
# The open GPUs that hold arrays, by number.
_gpus: dict[int, Driver] = {}
_opening = threading.Lock()


def compile_seconds() -> float:
    """Return the seconds that this process has spent waiting for kernels to compile."""
    return LIBRARY.compile_seconds


def instructions(executor: Executor) -> str:
    """Return the device and the instruction set that determine how an executor's results round."""
    if executor.device == "cpu":
        return f"{executor.name} {isa()}"
    gpu = getattr(executor, "driver", None)
    return executor.name if gpu is None else f"{executor.name} sm_{gpu.capability}"


def open_executor(device: str = "cpu", threads: int | None = None) -> Executor:
    """Open the executor of a device.

    Args:
        device: one of `genai.models.model_options.DEVICES`.
        threads: number of CPU threads; None = the physical cores available.

    Raises:
        OptionError: if there are more threads than can share a step, or GENAI_CPU_ISA is invalid.
        DeviceError: if no GPU can be used.
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
    from genai.kernels.cpu.executor import CpuExecutor

    _check_isa()
    return CpuExecutor(threads)


def open_threads(count: int | None = None) -> Threads:
    """Return CPU threads for functions of arrays.

    Args:
        count: number of threads; None = the physical cores available.

    Raises:
        OptionError: if there are more threads than can share a step, or GENAI_CPU_ISA is invalid.
    """
    _check_threads(count)
    _check_isa()
    return Threads(count)


def _check_isa() -> None:
    try:
        isa()
    except IsaError as error:
        raise OptionError(
            "GENAI_CPU_ISA cannot be applied", str(error), "unset GENAI_CPU_ISA, or set it to another instruction set"
        ) from error


def _check_threads(threads: int | None) -> None:
    if threads is not None and threads > MAX_THREADS:
        raise OptionError(
            f"threads = {threads}",
            f"a step can use at most {MAX_THREADS} threads",
            "to use all physical cores, omit threads",
        )


def open_asked(device: str, asked_by: str, threads: int | None = None) -> Executor:
    """Open the executor of a GPU that only a file requests, or the CPU's executor if the GPU cannot be used."""
    _check_threads(threads)
    try:
        return _open_gpu(device, threads)
    except NoDevice as error:
        tell_of_the_cpu(str(error), device, asked_by)
        return open_executor("cpu", threads)


_TAKE_THE_CPU = 'to use the CPU, pass --device cpu (device="cpu")'


def no_gpu(what: str, error: NoDevice, instead: str = _TAKE_THE_CPU) -> DeviceError:
    """Return the error for a requested GPU that cannot be used; `instead` is the fix that does not need a GPU."""
    return DeviceError(what, str(error), f"{_remedy(str(error), instead)}; see docs/how-to/gpu.md")


def _remedy(why: str, instead: str = _TAKE_THE_CPU) -> str:
    """Return the fix for a GPU that cannot be used."""
    from genai.kernels.cuda.cupy_driver import NOT_INSTALLED

    doctor = f"to list the devices, run genai doctor; {instead}"
    install = "run pip install cupy-cuda13x (or cupy-cuda12x, for a driver older than 580)"
    return f"{install}; {doctor}" if why == NOT_INSTALLED else doctor


def check_device(device: object) -> None:
    """Raise an error now if a requested GPU cannot be used, before anything is downloaded or built.

    Raises:
        DeviceError: if the GPU cannot be used.
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
    """Return the reason why a GPU cannot be used, in one line; "" if the GPU can be used."""
    try:
        open_gpu(index)
    except NoDevice as error:
        return str(error)
    return ""


def first_gpu() -> str:
    """Return the device that "auto" selects. Raises NoDevice if no GPU can be used."""
    from genai.kernels.cuda.cupy_driver import device_name, open_any

    return device_name(open_any().index)


def tell_of_the_cpu(why: str, device: str = "auto", asked_by: str = "") -> None:
    """Log, only once, that the CPU is used instead of a GPU, and why. If a file requested the GPU, also log the fix."""
    if _told or is_quiet():
        return
    _told.add(why)
    if asked_by:
        why = f"{why}. {asked_by} requests {device}: {_remedy(why)}"
    _log.info("computing on the CPU: %s", why)


def _open_gpu(device: str, threads: int | None) -> Executor:
    """Open the executor of a GPU; for "auto", the first usable GPU. Raises NoDevice if there is no such GPU."""
    from genai.kernels.cuda.cupy_driver import device_name, open_any, open_driver
    from genai.kernels.cuda.executor import CudaExecutor

    driver = open_any() if device == "auto" else open_driver(int(device.partition(":")[2] or 0))
    return CudaExecutor(driver, threads, device_name(driver.index))


def open_gpu(index: int) -> Driver:
    """Return a GPU for arrays. All sessions and values of a process share its single stream, which orders the work.

    Raises:
        NoDevice: if the GPU cannot be used.
    """
    from genai.kernels.cuda.cupy_driver import open_driver

    with _opening:
        if index not in _gpus:
            _gpus[index] = open_driver(index)
        return _gpus[index]
