"""How far ahead weights are asked for: by processor, and without a change of any result."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from genai.kernels.cpu.jit.isa import Prefetch, processor, stream_prefetch

# Prints the product of three rows, all of whose bits count; the kernel is compiled for the processor of this name.
_PROGRAM = """
import hashlib, numpy as np
from genai.kernels.cpu.arrays.block_weights import BlockLinear
from genai.kernels.cpu.linear.packing import pack_matrix
rng = np.random.default_rng(0)
weight, scales = rng.integers(0, 256, (96, 40, 16), dtype=np.uint8), rng.standard_normal((96, 40)).astype(np.float16)
matrix = pack_matrix(weight=weight, scales=scales, zero_points=None, n=96, k=1280, bits=4, block_size=32)
result = BlockLinear(matrix)(rng.standard_normal((3, 1280)).astype(np.float32))
print(hashlib.sha256(result.tobytes()).hexdigest())
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [("znver4", Prefetch(2, 4096)), ("znver3", Prefetch(1, 2048)), ("sapphirerapids", Prefetch()), ("", Prefetch())],
)
def test_the_table(name: str, expected: Prefetch) -> None:
    assert stream_prefetch(name or "a processor that nobody measured") == expected


def test_the_default_is_this_machine() -> None:
    assert stream_prefetch() == stream_prefetch(processor().name)


@pytest.mark.slow
def test_no_result_depends_on_it() -> None:
    found = set()
    for name in ("znver4", "generic"):
        variables = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": processor().features}
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], env=variables, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1 and len(found.pop()) == 65
