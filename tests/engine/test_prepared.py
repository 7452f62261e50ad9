"""A loaded model has all kernels: no step waits for the compiler or for a file."""

from __future__ import annotations

import pytest

import genai
from genai.kernels.cpu.jit.native import Compiled


def test_the_first_step_finds_its_kernels_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    with genai.LLM(quiet=True) as llm:
        waited: list[str] = []
        for name in ("load", "make"):
            monkeypatch.setattr(Compiled, name, lambda self, name=name: waited.append(f"{name} {self.name}"))
        llm.generate("Monday, Tuesday, " * 20, max_tokens=3, temperature=0.7, top_p=0.9, top_k=40)
    assert waited == []
