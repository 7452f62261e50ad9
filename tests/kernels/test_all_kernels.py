"""The kernels that `genai doctor --compile` makes ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genai import LLM
from genai.kernels.cpu.jit.native import LIBRARY, Compiled
from genai.kernels.cpu.warmup import all_kernels


@pytest.mark.parametrize("accuracy", ["auto", "fp32"])
def test_all_that_the_bundled_model_needs(accuracy: str, bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: set[Compiled] = set()
    prepare = LIBRARY.prepare

    def note(wanted: Any, *arguments: Any, later: Any = (), **named: Any) -> Any:
        needed.update([*wanted, *later])
        return prepare(wanted, *arguments, later=later, **named)

    monkeypatch.setattr(LIBRARY, "prepare", note)
    with LLM(bundled_folder, accuracy=accuracy, threads=2) as llm:
        llm.generate("Tell me a story. " * 20, max_tokens=2, temperature=0.7, min_p=0.1, logprobs=2, prompt_logprobs=0)
    assert {made.name for made in needed} <= {made.name for made in all_kernels()}
    assert needed <= set(all_kernels())


def test_each_once() -> None:
    names = [made.name for made in all_kernels()]
    assert len(names) == len(set(names)) > 300
