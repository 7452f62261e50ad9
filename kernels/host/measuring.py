"""What measures this machine, and what work on arrays runs on: the parts that need NumPy."""

from __future__ import annotations

from ..cpu import ceilings
from ..cpu.blas import BLAS_THREADS
from ..cpu.emit import has_half_instructions
from ..cpu.program.calls import program_of
from ..cpu.program.pool import Threads
from ..cpu.vector import LANES
from ..large import Arena, huge_array

__all__ = [
    "Arena", "BLAS_THREADS", "LANES", "Threads", "ceilings", "has_half_instructions", "huge_array", "program_of",
]  # fmt: skip
