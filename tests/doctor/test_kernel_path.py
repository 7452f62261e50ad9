"""The processor that kernels are compiled for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from genai.doctor.processor import find_kernel_path, vector_registers

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        (X86, {"avx512f", "avx2", "avx"}, ("AVX-512", 512)),
        (X86, {"avx2", "avx"}, ("AVX2", 256)),
        (X86, {"avx"}, ("AVX", 256)),
        (X86, set(), ("SSE2", 128)),
        (ARM, {"neon", "sve"}, ("NEON", 128)),
        ("arm64-apple-darwin", set(), ("NEON", 128)),
        ("riscv64-unknown-linux-gnu", {"v"}, ("generic vectors", 128)),
    ],
)
def test_registers(triple: str, features: set[str], expected: tuple[str, int]) -> None:
    assert vector_registers(triple, features) == expected


def test_this_machine() -> None:
    path = find_kernel_path({"NUMBA_OPT": "2", "OTHER": "x"})
    assert path.vector_bits in (128, 256, 512)
    assert path.overrides == {"NUMBA_OPT": "2"}
    assert f"register{'' if path.vector_bits == 512 else 's'} of {path.vector_bits} bits" in path.lanes


def test_variables_that_narrow_the_kernels_are_seen() -> None:
    """Numba reads its variables on import, so this test needs a separate process."""
    code = (
        "import dataclasses, json, os; from genai.doctor.processor import find_kernel_path; "
        "print(json.dumps(dataclasses.asdict(find_kernel_path(os.environ))))"
    )
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_DISABLE_JIT": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    path = json.loads(result.stdout)
    assert path["processor"] == "generic"
    assert path["vector_bits"] == 128 <= path["host_vector_bits"]
    assert path["compiled"] is False
    assert set(path["overrides"]) == {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT"}
