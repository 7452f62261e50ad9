"""Every example in the docstrings of the public API runs and prints the expected output."""

from __future__ import annotations

import asyncio
import doctest
import inspect
from importlib import import_module

import pytest

import genai

MODULES = (
    "genai.llm.completion",
    "genai.compat.onnxruntime_genai.generator",
    "genai.llm.llm",
    "genai.models.model",
    "genai.text.parsing.splitter",
    "genai.engine.sampling.params",
    "genai.compat.onnxruntime_genai.tensor",
    "genai.text.tokenizer",
)
WITH_EXAMPLES = ("genai.llm.completion", "genai.llm.llm", "genai.text.parsing.splitter", "genai.engine.sampling.params")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, bundled: genai.Model) -> None:
    with genai.LLM(bundled) as llm:
        module = import_module(name)
        results = doctest.testmod(
            module,
            extraglobs={"llm": llm, "asyncio": asyncio},
            optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
        )
    assert results.failed == 0
    assert results.attempted > 0 or name not in WITH_EXAMPLES


@pytest.mark.parametrize("kind", [genai.LLM, genai.SamplingParams])
def test_every_public_method_has_an_example(kind: type) -> None:
    for name, member in vars(kind).items():
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
            assert ">>>" in (inspect.getdoc(getattr(kind, name)) or ""), f"{kind.__name__}.{name}"
