"""Every kernel compiles with NVRTC, the compiler that users run, for three generations of GPUs; no GPU is needed."""

from __future__ import annotations

import re

import pytest

from genai.kernels.cuda.every import every_kernel
from genai.kernels.cuda.sources import CudaKernel, source_of

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not there: pip install .[cuda-ci]")

# A lane has at most so many registers where a multiprocessor holds three blocks of 128 threads.
MOST_REGISTERS, MOST_SHARED_BYTES, MOST_SPILLED_BYTES = 168, 48 << 10, 16
ALL_REGISTERS, MOST_OF_A_LANE = 65536, 255
# Arrays that are indexed by what is computed lie in a stack frame, too: that is memory, not registers.
_USE = re.compile(r"entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers([^\n]*)", re.DOTALL)


def compiled(kernels: list[CudaKernel], architecture: str) -> dict[str, tuple[int, int, int]]:
    """Registers, bytes spilled or else in a stack, and bytes of shared memory per kernel, as the assembler reports."""

    def done(result: tuple[object, ...]) -> object:
        assert int(result[0]) == 0, result[0]  # type: ignore[call-overload]
        return result[1] if len(result) > 1 else None

    program = done(nvrtc.nvrtcCreateProgram(source_of(kernels).encode(), b"kernels.cu", 0, [], []))
    # As CuPy compiles it.
    options = [f"-arch={architecture}", "--std=c++17", "-ftz=true", "--device-as-default-execution-space"]
    flags = [option.encode() for option in (*options, "--ptxas-options=-v")]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = b" " * int(done(nvrtc.nvrtcGetProgramLogSize(program)))  # type: ignore[call-overload]
    done(nvrtc.nvrtcGetProgramLog(program, log))
    assert int(failed) == 0, log.decode()[:4000]
    done(nvrtc.nvrtcDestroyProgram(program))
    found = {}
    for name, spilled, registers, rest in _USE.findall(log.decode()):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = int(registers), int(spilled), int(shared[1]) if shared else 0
    return found


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile(architecture: str, whole: bool) -> None:
    """A kernel per function, or all of them."""
    kernels = every_kernel()
    if not whole:
        kernels = list({kernel.function.partition("<")[0]: kernel for kernel in kernels}.values())
    found = compiled(kernels, architecture)
    assert set(found) == {kernel.name for kernel in kernels}
    bounds = {kernel.name: ALL_REGISTERS // (kernel.threads * kernel.blocks) for kernel in kernels if kernel.blocks}
    for name, (registers, spilled, shared) in found.items():
        most = min(bounds.get(name, MOST_REGISTERS), MOST_OF_A_LANE)
        assert registers <= most and shared <= MOST_SHARED_BYTES, (name, registers, shared)
        assert spilled <= MOST_SPILLED_BYTES, (name, spilled)
