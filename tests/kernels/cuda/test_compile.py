"""Every kernel compiles with NVRTC, the compiler that users run, for three generations of GPUs; no GPU is needed."""

from __future__ import annotations

import pytest

from genai.kernels.cuda.warmup import all_kernels
from tools.cuda_kernels import PAGE, WORK, Use, compiled, family, occupancy, page

from ...drawing import Draw

# A lane has at most so many registers where a multiprocessor holds three blocks of 128 threads.
MOST_REGISTERS, MOST_SHARED_BYTES, MOST_SPILLED_BYTES = 168, 48 << 10, 48
ALL_REGISTERS, MOST_OF_A_LANE = 65536, 255


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_compile(architecture: str, whole: bool, draw: Draw) -> None:
    """A kernel per function, or all of them (of which a run compiles some)."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not there: pip install .[cuda-ci]")
    kernels = all_kernels(int(architecture.strip("sm_a")))
    if whole:
        drawn = draw.part([f"{architecture} {kernel.name}" for kernel in kernels], 24)
        kernels = [kernel for kernel in kernels if f"{architecture} {kernel.name}" in drawn]
    else:
        kernels = list({family(kernel): kernel for kernel in kernels}.values())
    found = compiled(kernels, architecture)
    assert set(found) == {kernel.name for kernel in kernels}
    dynamic = {kernel.name: kernel.shared for kernel in kernels}
    bounds = {kernel.name: ALL_REGISTERS // (kernel.threads * kernel.blocks) for kernel in kernels if kernel.blocks}
    for name, use in found.items():
        most = min(bounds.get(name, MOST_REGISTERS), MOST_OF_A_LANE)
        assert use.registers <= most and use.shared <= MOST_SHARED_BYTES + dynamic[name], (name, use)
        assert use.spilled <= MOST_SPILLED_BYTES, (name, use)


def test_the_page_has_every_kernel() -> None:
    """Also what it does on paper."""
    kernels, text = all_kernels(), PAGE.read_text(encoding="utf-8")
    assert {family(kernel) for kernel in kernels} == set(WORK)
    assert all(text.count(f"\n| `{name}` |") == 2 for name in WORK)
    assert f"all {len(kernels)} kernels" in text


def test_occupancy_and_the_least_time() -> None:
    assert occupancy(Use(32, 0, 0), 256) == 1.0
    assert occupancy(Use(128, 0, 0), 128) == 4 * 128 / 2048
    assert occupancy(Use(32, 0, 75 << 10), 256) == 3 * 256 / 2048
    assert occupancy(Use(32, 0, 0), 32) == 0.5
    product = WORK["decode_few"]
    assert product.seconds == product.nbytes / 4.3e12
    assert WORK["gemm"].seconds > 200e-6
    text = page(all_kernels(), {kernel.name: Use(40, 0, 0) for kernel in all_kernels()})
    assert "| `norm` | 2 | 512 | 40 | 0 B | 0.0 KiB | 75 % |" in text
