"""Devices by name: the one place that chooses an executor."""

from __future__ import annotations

from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.cpu.isa import IsaError, isa
from genai.kernels.cpu.jit import LIBRARY, report_progress as report_progress
from genai.kernels.cpu.program.pool import MAX_THREADS
from genai.kernels.executor import Executor

from ..errors import OptionError


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
    """
    if threads is not None and threads > MAX_THREADS:
        raise OptionError(
            f"threads = {threads}", f"at most {MAX_THREADS} can share a step", "leave it out for the physical cores"
        )
    if device == "reference":
        from genai.kernels.reference.executor import ReferenceExecutor

        return ReferenceExecutor(threads)
    try:
        isa()
    except IsaError as error:
        raise OptionError("GENAI_CPU_ISA cannot be obeyed", str(error), "unset it, or choose another") from error
    return CpuExecutor(threads)
