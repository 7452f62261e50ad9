"""Grammars with speculative decoding: no token changes, and proposals that violate the grammar are not computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.engine.sampling.grammar import Grammar
from genai.text.vocabulary import guidance_of
from tools.speculation_agreement import WAYS, ScriptedGuesses, facts, guessing, known_of

from .test_speculation import SteadyCosts

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["small animal", "small automobile"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}
OPTIONS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA, "temperature": 0, "max_tokens": 60},
    {"json_schema": SCHEMA, "temperature": 1.1, "seed": 3, "max_tokens": 60, "n": 2},
    {"json_schema": SCHEMA, "temperature": 0.9, "seed": 4, "max_tokens": 60, "logprobs": 1},
    {"regex": "(ab|ba){3,9}", "temperature": 1, "seed": 5, "max_tokens": 30},
    {"choice": ["yes, of course", "yes, of lemons", "no"], "temperature": 1, "seed": 6},
    {"temperature": 0.8, "seed": 7, "max_tokens": 20},
]
QUESTION = 'Write {"name": "Luna", "kind": "small animal", "counts": [1, 2, 3]} again. '


def requests(llm: genai.LLM) -> tuple[list[list[int]], list[genai.SamplingParams]]:
    prompts = [llm.encode(QUESTION * 2 + str(index)) for index in range(len(OPTIONS))]
    return prompts, [genai.SamplingParams(**options) for options in OPTIONS]


@pytest.fixture(scope="module")
def llm(bundled_folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(bundled_folder, threads=2) as found:
        yield found


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_guessed_replies_are_the_same(way: str, llm: genai.LLM) -> None:
    prompts, params = requests(llm)
    expected = llm.generate(prompts, params)
    guesses = ScriptedGuesses(known_of(prompts, expected), llm.model.decoder.vocab_size, way)
    with guessing(llm, guesses):
        found = llm.generate(prompts, params)
    assert [facts(one) for one in found] == [facts(one) for one in expected]
    assert guesses.proposed > 50
    assert (guesses.kept > 50) == (way in ("right", "mixed"))


@pytest.mark.parametrize("draft", [False, True], ids=["lookup", "draft"])
def test_policies_guess_beside_grammars(
    draft: bool, llm: genai.LLM, bundled_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genai.llm.speculation.Speculator", SteadyCosts)
    prompts, params = requests(llm)
    expected = llm.generate(prompts, params)
    speculation = genai.Speculation(lookup=not draft, draft=bundled_folder if draft else None)
    with genai.LLM(bundled_folder, threads=2, speculation=speculation) as guesser:
        found = guesser.generate(prompts, params)
    assert [facts(one) for one in found] == [facts(one) for one in expected]
    assert sum(one.accepted_tokens for one in found[:4]) > 10, "those with a grammar"
    for one in found[:4]:
        if one.finish_reason == "stop":
            assert json.loads(one.text)["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]


def test_the_grammar_says_how_many_guesses_it_allows(llm: genai.LLM) -> None:
    matcher = guidance_of(llm.model).matcher(Grammar("regex", "ab+c"))
    a, b, c = (llm.tokenizer.to_token_id(one) for one in "abc")
    assert [matcher.num_allowed(tokens) for tokens in ([a, b, b, c], [a, b, a, c], [b], [])] == [4, 2, 0, 0]
    for token in (a, b, c):
        matcher.follow(token)
    assert matcher.is_over and matcher.num_allowed([c]) == 0
