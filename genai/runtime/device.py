"""Devices by name: the one place that chooses an executor."""

from __future__ import annotations

import threading

from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.cpu.isa import IsaError, isa
from genai.kernels.cpu.jit import LIBRARY, report_progress as report_progress
from genai.kernels.cpu.program.pool import MAX_THREADS
from genai.kernels.cuda.driver import Driver
from genai.kernels.executor import Executor
from genai.kernels.messages import tell

from ..errors import DeviceError, OptionError

# Whether somebody was told why there is no GPU.
_told: set[str] = set()
# GPUs that arrays lie on.
_gpus: dict[int, Driver] = {}
_opening = threading.Lock()


def compile_seconds() -> float:
    """Seconds that this process has waited for kernels to be compiled, so far."""
    return LIBRARY.compile_seconds


def instructions(executor: Executor) -> str:
    """What an executor computes with, where that changes how results round: the device, and its instructions."""
    return f"{executor.name} {isa()}" if isinstance(executor, CpuExecutor) else executor.name


def open_executor(device: str = "cpu", threads: int | None = None) -> Executor:
    """The executor of a device.

    Args:
        device: one of `genai.model.model.DEVICES`. threads: of the CPU; None = the physical cores available.

    Raises:
        OptionError: more threads than can share a step; GENAI_CPU_ISA cannot be obeyed.
        DeviceError: there is no GPU that can be used.
    """
    if threads is not None and threads > MAX_THREADS:
        raise OptionError(
            f"threads = {threads}", f"at most {MAX_THREADS} can share a step", "leave it out for the physical cores"
        )
    if device == "reference":
        from genai.kernels.reference.executor import ReferenceExecutor

        return ReferenceExecutor(threads)
    if device.startswith(("cuda", "auto")):
        from genai.kernels.cuda.driver import NoDevice

        try:
            return _open_gpu(int(device.partition(":")[2] or 0), threads)
        except NoDevice as error:
            if device != "auto":
                fix = "genai doctor shows what is there; leave device out for the CPU; docs/cuda.md has more"
                raise DeviceError(f"device = {device!r} cannot be used", str(error), fix) from error
            if not _told:
                _told.add(device)
                tell(f"genai: computing on the CPU: {error}")
    try:
        isa()
    except IsaError as error:
        raise OptionError("GENAI_CPU_ISA cannot be obeyed", str(error), "unset it, or choose another") from error
    return CpuExecutor(threads)


def _open_gpu(index: int, threads: int | None) -> Executor:
    """The executor of a GPU. Raises NoDevice: it cannot be used."""
    from genai.kernels.cuda.cupy_driver import open_driver
    from genai.kernels.cuda.executor import CudaExecutor

    return CudaExecutor(open_driver(index), threads)


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
