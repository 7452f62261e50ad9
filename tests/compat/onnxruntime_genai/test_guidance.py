"""set_guidance of onnxruntime-genai's API: the same tokens, call by call, and the same things refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime_genai
import pytest

import genai
from genai.errors import GrammarError, OptionError

QUESTION = "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = """{
    "type": "object", "properties": {"answer": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["answer"], "additionalProperties": false
}"""
GUIDANCE = [
    ("regex", "[a-z]{3,5}"),
    ("regex", "hello there \\d"),
    ("json_schema", ANSWER),
    ("lark_grammar", 'start: "yes" | "no"'),
    ("lark_grammar", "start: A{3}\nA: /[0-9]{2}/ \", \""),
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs(bundled_folder: Path) -> Iterator[Any]:
    yield onnxruntime_genai.Model(str(bundled_folder))


def calls(og: Any, model: Any, guidance: tuple[Any, ...], batch: int = 1) -> list[tuple[int, list[int]]]:
    """After each generate_next_token the number of tokens, and those of the first row."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=60, batch_size=batch)
    params.set_guidance(*guidance)
    generator = og.Generator(model, params)
    ids = og.Tokenizer(model).encode(QUESTION)
    generator.append_tokens(ids if batch == 1 else [list(ids)] * batch)
    found = []
    while not generator.is_done():
        generator.generate_next_token()
        found.append((generator.token_count(), generator.get_sequence(0).tolist()))
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("appends_forced", [False, True])
@pytest.mark.parametrize("guidance", GUIDANCE)
def test_the_same_tokens_call_by_call(
    guidance: tuple[str, str], appends_forced: bool, bundled: genai.Model, theirs: Any
) -> None:
    given = (*guidance, appends_forced)
    assert calls(genai, bundled, given) == calls(onnxruntime_genai, theirs, given)


@pytest.mark.oracle
def test_a_batch_takes_forced_tokens_one_by_one(bundled: genai.Model, theirs: Any) -> None:
    given = ("regex", "hello there \\d", True)
    assert calls(genai, bundled, given, batch=2) == calls(onnxruntime_genai, theirs, given, batch=2)


def test_a_rewind_goes_back_in_the_grammar(bundled: genai.Model) -> None:
    tokenizer, params = genai.Tokenizer(bundled), genai.GeneratorParams(bundled)
    params.set_search_options(max_length=60)
    params.set_guidance("regex", "hello there [0-9]")
    with genai.Generator(bundled, params) as generator:
        generator.append_tokens(tokenizer.encode("Hi"))
        start = generator.token_count()
        for length in (start + 2, start):
            while not generator.is_done():
                generator.generate_next_token()
            assert tokenizer.decode(generator.get_sequence(0)).startswith("Hihello there ")
            generator.rewind_to(length)
        # What is appended begins the grammar anew.
        generator.append_tokens(tokenizer.encode("."))
        while not generator.is_done():
            generator.generate_next_token()
        assert tokenizer.decode(generator.get_sequence(0)).startswith("Hi.hello there ")


@pytest.mark.parametrize(
    ("guidance", "message"),
    [
        (("xml", "a"), "Unsupported guidance type: 'xml'"),
        (("", "a"), "provided together"),
        (("regex", ""), "provided together"),
        (("json_schema", "{"), "json_schema is not JSON"),
    ],
)
def test_what_set_guidance_refuses(guidance: tuple[str, str], message: str, bundled: genai.Model) -> None:
    with pytest.raises(OptionError, match=message):
        genai.GeneratorParams(bundled).set_guidance(*guidance)


def test_a_grammar_that_cannot_be_used(bundled: genai.Model) -> None:
    params = genai.GeneratorParams(bundled)
    params.set_guidance("regex", "a(")
    with pytest.raises(GrammarError, match="regex"):
        genai.Generator(bundled, params)
    params.set_guidance("", "")
    genai.Generator(bundled, params).close()


def turns(og: Any, model: Any, guidance: tuple[str, str]) -> list[list[int]]:
    """The tokens of a guided turn, of one whose guidance was cleared, and of one that follows without any."""
    engine, tokenizer = og.Engine(model), og.Tokenizer(model)
    request, buffer, found = engine.create_request(), engine.create_event_buffer(8), []
    for number in range(3):
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(40)
        if number < 2:
            options.set_guidance(*guidance)
        if number == 1:
            options.clear_guidance()
        request.begin_turn(tokenizer.encode(QUESTION if number == 0 else "\n" + QUESTION), options)
        tokens: list[int] = []
        while engine.has_pending_requests():
            engine.run(buffer)
            tokens += [buffer[i].token for i in range(len(buffer)) if buffer[i].token is not None]
        found.append(tokens)
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("guidance", GUIDANCE)
def test_turns_of_an_engine(guidance: tuple[str, str], bundled: genai.Model, theirs: Any) -> None:
    found = turns(genai, bundled, guidance)
    assert found == turns(onnxruntime_genai, theirs, guidance)
    assert found[0] != found[1]


def test_a_turn_that_cannot_be_guided(bundled: genai.Model) -> None:
    request = genai.Engine(bundled).create_request()
    options = genai.TurnOptions(request)
    options.set_guidance("regex", "(")
    with pytest.raises(GrammarError):
        request.begin_turn([5, 6], options)
    options.clear_guidance()
    request.begin_turn([5, 6], options)
    request.close()
