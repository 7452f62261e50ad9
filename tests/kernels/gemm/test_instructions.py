"""The tests of this folder again, with the kernels of other instruction sets (where the machine has them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.instructions import other_instructions


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    files = [str(path) for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name]
    with_instructions(name, *files)
