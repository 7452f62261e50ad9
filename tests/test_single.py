"""Objects that own memory and threads refuse to be copied by pickle or copy, because copies would share them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import StateError


@pytest.fixture(scope="module")
def llm() -> Iterator[genai.LLM]:
    with genai.LLM(quiet=True) as llm:
        yield llm


MAKERS: dict[str, Callable[[genai.LLM], Any]] = {
    "LLM": lambda llm: llm,
    "Model": lambda llm: llm.model,
    "Generator": lambda llm: genai.Generator(llm.model, genai.GeneratorParams(llm.model)),
    "CompletionStream": lambda llm: llm.stream("Hi", max_tokens=1),
    "InferenceSession": lambda llm: genai.InferenceSession(Path(llm.model.folder) / "model.onnx"),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_is_neither_copied_nor_pickled(llm: genai.LLM, name: str, duplicate: Callable[[Any], Any]) -> None:
    with pytest.raises(StateError, match=f"{name} objects can be neither") as caught:
        duplicate(MAKERS[name](llm))
    assert caught.value.why and caught.value.fix


def test_what_is_only_numbers_is(llm: genai.LLM) -> None:
    tokenizer = pickle.loads(pickle.dumps(llm.tokenizer))
    assert tokenizer.encode("Hi there").tolist() == llm.tokenizer.encode("Hi there").tolist()
    assert pickle.loads(pickle.dumps(llm.params(top_p=0.5))) == llm.params(top_p=0.5)
