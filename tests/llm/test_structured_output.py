"""Replies that match a schema, an expression, a grammar or one of several texts, with any other options."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import GenaiError, GrammarError, SamplingError
from tools.schemas import ask, make_schema, problem

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "naïve"]}, "maxItems": 3},
        "described_at_length": {"const": "a text that nobody has to choose, since it is always the same"},
    },
    "required": ["name", "age", "tags", "described_at_length"],
    "additionalProperties": False,
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.3},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.7},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "dry": {"dry_multiplier": 3.0},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "mirostat": {"mirostat": 2, "mirostat_tau": 2.0},
    "biased": {"logit_bias": {93: 5.0}, "temperature": 1.0},
}


@pytest.fixture(scope="module")
def prompt(llm: genai.LLM) -> str:
    return llm.render("Answer in JSON: who are you?")


def test_varied_schemas(llm: genai.LLM) -> None:
    """A part of the cases of `python -m tools.schemas`; every finished reply is a valid instance."""
    tally = ask(llm, range(2000, 2032), [1, 2], max_tokens=150, temperature=1.0)
    assert not tally.invalid and not tally.refused
    assert tally.finished > 30


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler(name: str, llm: genai.LLM, prompt: str) -> None:
    for completion in llm.generate([prompt] * 3, json_schema=PERSON, seed=5, **SAMPLERS[name]):
        assert completion.finish_reason == "stop" and completion.stopped_by is None
        assert not problem(PERSON, completion.text)


@pytest.mark.parametrize("name", ["greedy", "drawn", "penalties", "top-k"])
def test_forced_tokens_are_those_that_would_be_chosen(name: str, llm: genai.LLM, prompt: str) -> None:
    """If log-probabilities are requested, every token is sampled, with the same bits."""
    options: dict[str, Any] = {"json_schema": PERSON, "seed": 5, **SAMPLERS[name]}
    (quick,), (slow,) = llm.generate(prompt, **options), llm.generate(prompt, logprobs=0, **options)
    assert quick.token_ids == slow.token_ids and quick.text == slow.text
    assert slow.logprobs is not None and len(slow.logprobs) == len(slow.token_ids)


def test_forced_tokens_are_computed_together(llm: genai.LLM, monkeypatch: pytest.MonkeyPatch, prompt: str) -> None:
    steps = []
    step = type(llm.model.decoder).step
    monkeypatch.setattr(
        type(llm.model.decoder), "step", lambda self, *given, **named: (steps.append(1), step(self, *given, **named))[1]
    )
    fixed = "a text that nobody has to choose, since it is always the same; and it goes on for more than 32 tokens"
    (completion,) = llm.generate(prompt, json_schema={"const": fixed}, temperature=0)
    assert json.loads(completion.text) == fixed and len(completion.token_ids) > 32
    assert len(steps) < 8


def test_samples_and_mixed_rows(llm: genai.LLM, prompt: str) -> None:
    """n samples of one prompt, and rows with different grammars or none; each equals its result alone."""
    samples = llm.generate(prompt, json_schema=PERSON, n=4, seed=3, temperature=1.2)
    assert len({one.text for one in samples}) > 1
    assert not any(problem(PERSON, one.text) for one in samples)
    asked: list[dict[str, Any]] = [
        {"regex": "[a-f]{4,9}"}, {}, {"choice": ["left", "right"]}, {"json_schema": PERSON},
        {"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]+/'}, {"regex": "x{3}"},
    ]  # fmt: skip
    params = [llm.params(seed=9, temperature=0.9, max_tokens=120, **one) for one in asked]
    together = llm.generate([prompt] * len(params), params)
    alone = [llm.generate(prompt, one)[0] for one in params]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert re.fullmatch("[a-f]{4,9}", together[0].text) and together[2].text in ("left", "right")
    assert together[5].text == "xxx" and not problem(PERSON, together[3].text)


def test_unique_items_in_batches(llm: genai.LLM, prompt: str) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "uniqueItems": True,
              "minItems": 6, "maxItems": 6}  # fmt: skip
    options: dict[str, Any] = {"json_schema": schema, "seed": 3, "temperature": 1.5, "max_tokens": 100}
    together = llm.generate([prompt] * 2, n=3, **options)
    assert [one.token_ids for one in llm.generate(prompt, n=3, **options)] == [one.token_ids for one in together[:3]]
    assert not any(problem(schema, one.text) for one in together) and len({one.text for one in together}) > 1


def test_preempted_sequences_go_on_in_their_grammar(form_folder: Callable[[str], Path]) -> None:
    """A cache for a part of the batch, and random weights, so that only the grammar determines the text."""
    asked = {"json_schema": PERSON, "seed": 2, "temperature": 1.0, "max_tokens": 150}
    prompts = [f"Question {number}: " for number in range(6)]
    with genai.LLM(form_folder("int4")) as roomy:
        expected = [one.token_ids for one in roomy.generate(prompts, **asked)]
        block = roomy.model.info.kv_bytes_per_token * 32
    with genai.LLM(form_folder("int4"), cache_bytes=12 * block) as cramped:
        found = cramped.generate(prompts, **asked)
    assert [one.token_ids for one in found] == expected
    assert not any(problem(PERSON, one.text) for one in found if one.finish_reason == "stop")


def test_a_graph_that_runs_sequence_by_sequence(form_folder: Callable[[str], Path]) -> None:
    with genai.LLM(form_folder("dense")) as llm:
        (completion,) = llm.generate("Once", choice=["yes", "no, never"], temperature=1.0, seed=1)
    assert completion.text in ("yes", "no, never")


def test_the_reference_device(bundled_folder: Path, llm: genai.LLM, prompt: str) -> None:
    options: dict[str, Any] = {"regex": "(ab|cd|ef){3}", "temperature": 0}
    with genai.LLM(bundled_folder, device="reference") as other:
        (found,) = other.generate(prompt, **options)
    assert found.text == llm.generate(prompt, **options)[0].text


def test_how_replies_end(llm: genai.LLM, prompt: str) -> None:
    (cut,) = llm.generate(prompt, json_schema=PERSON, max_tokens=4)
    assert cut.finish_reason == "length" and len(cut.token_ids) == 4
    (exact,) = llm.generate(prompt, regex="[0-9]{3}", max_tokens=3)
    assert exact.finish_reason == "stop" and len(exact.text) == 3
    (stopped,) = llm.generate(prompt, regex="abcdef", stop="cd")
    assert stopped.text == "ab" and stopped.stopped_by == "cd"
    # EOS ends a grammar that would allow more.
    (open_end,) = llm.generate(llm.render("What is 12 + 7?"), regex="[0-9]+", temperature=0)
    assert open_end.text == "19" and open_end.stopped_by == llm.tokenizer.eos_token_ids[0]
    # Before min_tokens it does not.
    (longer,) = llm.generate(llm.render("What is 12 + 7?"), regex="[0-9]+", temperature=0, min_tokens=5, max_tokens=8)
    assert len(longer.token_ids) >= 5 and longer.text.isdigit()


def test_banned_strings_go_back_in_the_grammar(llm: genai.LLM, prompt: str) -> None:
    (found,) = llm.generate(prompt, regex="(ab|cd){6}", banned_strings="cd", temperature=0)
    assert found.text == "ab" * 6
    (same,) = llm.generate(prompt, regex="[a-z]{8}", banned_strings=["e", "th"], temperature=1.0, seed=4)
    assert re.fullmatch("[a-df-z]{8}", same.text) and "th" not in same.text


def test_nothing_left_to_choose(llm: genai.LLM, prompt: str) -> None:
    with pytest.raises(SamplingError, match="no next token"):
        llm.generate(prompt, regex="[0-9]", banned_strings=list("0123456789"))
    # The others go on.
    rows = list(llm.map([{"prompt": prompt, "regex": "[0-9]", "banned_strings": list("0123456789")},
                         {"prompt": prompt, "regex": "ok"}]))  # fmt: skip
    assert isinstance(rows[0].error, SamplingError) and rows[1].text == "ok"


def test_streams_and_chats(llm: genai.LLM) -> None:
    with llm.stream("Once", regex="[a-c]{12}") as stream:
        text = "".join(stream)
    assert re.fullmatch("[a-c]{12}", text) and stream.completion.finish_reason == "stop"
    assert llm.chat("Yes or no?", choice=["yes", "no"]).text in ("yes", "no")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"json_schema": {"type": "object", "properties": {"a": {"type": "strin"}}}}, "/properties/a"),
        ({"json_schema": {"minimum": 3, "maximum": 1, "type": "integer"}}, "json_schema"),
        ({"regex": "a("}, "regex"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"regex": "ab\\"}, "regex, 'ab\\\\', ends with a backslash"),
        ({"json_schema": {"items": {"pattern": "^a\\\\\\"}}}, "the pattern at /items of json_schema"),
        ({"json_schema": {"patternProperties": {"a\\": {}}}}, "the pattern at the top of json_schema"),
        ({"json_schema": {"$schema": "http://json-schema.org/draft-03/schema#"}}, "draft-03"),
        ({"grammar": 'start: %json {"$schema": "http://json-schema.org/draft-02/schema#"}'}, "draft-02"),
        ({"choice": []}, "choice"),
        ({"choice": ["a"], "regex": "a"}, "contradicts"),
    ],
)
def test_bad_input_is_refused_at_once(options: dict[str, Any], named: str, llm: genai.LLM) -> None:
    with pytest.raises(GenaiError) as raised:
        llm.generate("Once", **options)
    assert named in raised.value.what and raised.value.why and raised.value.fix
    assert llm.generate("Once", max_tokens=1)


def _chain(count: int, link: Callable[[dict[str, Any]], dict[str, Any]], at: str = "$defs") -> dict[str, Any]:
    """Return a schema that is a chain of definitions."""
    links = {f"d{n}": link({"$ref": f"#/{at}/d{n + 1}"}) for n in range(count)}
    return {at: {**links, f"d{count}": {"type": "null"}}, "$ref": f"#/{at}/d0"}


LINKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "reference": lambda ref: ref,
    "object": lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
    "array": lambda ref: {"type": "array", "items": ref},
    "choice": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "circles": lambda ref: {"anyOf": [ref, {"type": "array", "items": {"$ref": "#"}}]},
}


@pytest.mark.parametrize("name", LINKS)
def test_chains_of_references(name: str, llm: genai.LLM) -> None:
    """Chains on which llguidance would recurse until the process ends are refused; other long ones are compiled."""
    for count, at in ((4_000, "$defs"), (9_000, "x-parts")):
        with pytest.raises(GrammarError, match="too deep") as raised:
            llm.generate("Once", json_schema=_chain(count, LINKS[name], at))
        assert raised.value.why and raised.value.fix
    assert llm.generate("Once", json_schema=_chain(100, LINKS[name]), max_tokens=2)


def test_as_many_choices_as_are_allowed(llm: genai.LLM) -> None:
    many = [f"item {number}" for number in range(10_000)]
    odd = ["^a.b|c(d)[e]{2}*+?$ \\d", 'new\nline "quoted"', "~#&-/%<>=!", "😀 ß\t", "a", "ab"]
    for texts in (many, odd):
        found = llm.generate("A", choice=texts, temperature=2.0, n=12, seed=3, max_tokens=80)
        assert {one.text for one in found} <= set(texts) and len({one.text for one in found}) > 1
    for text in odd:
        assert llm.generate("A", choice=[text], max_tokens=80)[0].text == text


def _nested(key: str, levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {key: schema}
    return schema


def test_json_that_is_too_deep_for_the_compiler_ends_its_own_request_only(llm: genai.LLM) -> None:
    deep = [_nested("items", 200), {"type": "integer", "default": json.loads("[" * 150 + "]" * 150)}]
    items = [*({"prompt": "A", "json_schema": schema} for schema in deep), {"prompt": "A", "regex": "fine"}]
    answers = list(llm.map(items, max_tokens=4))
    assert answers[-1].text == "fine"
    for answer in answers[:-1]:
        assert isinstance(answer.error, GrammarError) and "recursion limit" in answer.error.why and answer.error.fix


FAR = 2**63
BOUNDS_THAT_FLOATS_ROUND: dict[str, dict[str, Any]] = {
    "lower": {"minimum": 2**53 + 1, "maximum": 2**53 + 5},
    "upper": {"minimum": 2**60 - 3000, "maximum": 2**60 - 1},
    "negative": {"minimum": -(2**53) - 5, "maximum": -(2**53) - 1},
    "least": {"minimum": -FAR, "maximum": -FAR + 5000},
    "least float": {"minimum": -float(FAR), "maximum": -(2**62)},
    "beyond": {"minimum": -(10**400), "maximum": -(2**62)},
    "largest": {"minimum": 2**62, "maximum": FAR - 1},
    "excluded": {"exclusiveMinimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 9},
    "merged": {"allOf": [{"minimum": 2**53 + 1}, {"maximum": FAR}]},
}


@pytest.mark.parametrize("name", BOUNDS_THAT_FLOATS_ROUND)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_that_floats_round(name: str, kind: str, llm: genai.LLM) -> None:
    """llguidance computes with floats: it would overflow at -2 ** 63, and clamps larger bounds."""
    schema = {"type": kind, **BOUNDS_THAT_FLOATS_ROUND[name]}
    for completion in llm.generate("A", json_schema=schema, temperature=1.5, n=8, seed=1, max_tokens=40):
        assert completion.finish_reason == "length" or not problem(schema, completion.text)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "minimum": 10**30}, "/minimum"),
        ({"type": "integer", "maximum": -FAR}, "/maximum"),
        ({"properties": {"a": {"exclusiveMinimum": float(FAR)}}}, "/properties/a/exclusiveMinimum"),
        ({"$ref": "#/x/a", "x": {"a": {"type": "integer", "maximum": -FAR}}}, "/x/a/maximum"),
        ({"const": FAR * 2 + 1}, "/const"),
        ({"enum": [1, {"a": [-FAR - 1]}]}, "/enum/1/a/0"),
        ({"const": 2**53 + 1}, "/const"),
        ({"properties": {"const": {"enum": ["a", {"default": 2**62 + 1}]}}}, "/properties/const/enum/1/default"),
    ],
)
def test_numbers_that_no_reply_could_be_held_to(schema: dict[str, Any], place: str, llm: genai.LLM) -> None:
    with pytest.raises(GrammarError, match=f"has the number .* at {place}\n") as raised:
        llm.generate("A", json_schema=schema)
    assert "64-bit integers" in raised.value.why and raised.value.fix


@pytest.mark.parametrize("number", [2**53 + 2, -(2**62), 10**15 + 1, 1e20])
def test_whole_numbers_that_floats_hold(number: float, llm: genai.LLM) -> None:
    note = {"default": 2**53 + 1, "examples": [2**53 + 1]}  # no reply is held to these
    text = llm.generate("A", json_schema={"const": number, **note}, max_tokens=60)[0].text
    assert json.loads(text) == number


@pytest.mark.parametrize("kind", ["date", "date-time"])
def test_dates_are_days_that_there_are(kind: str, llm: genai.LLM) -> None:
    def ask(start: str, **more: Any) -> str:
        schema = {"type": "string", "format": kind, "pattern": f"^{start}", **more}
        return str(json.loads(llm.generate("A", json_schema=schema, temperature=2.0, seed=1, max_tokens=90)[0].text))

    for day in ("2024-02-29", "2000-02-29", "1900-02-28", "2023-02-28", "2023-12-31", "0400-02-29"):
        assert ask(day).startswith(day) and ask(day, allOf=[{"minLength": 10}]).startswith(day)
    for day in ("2023-02-29", "1900-02-29", "2024-02-30", "2100-02-29"):
        with pytest.raises(GrammarError):
            ask(day)


def test_an_empty_list_of_schemas(llm: genai.LLM) -> None:
    with pytest.raises(GrammarError) as raised:
        llm.generate("A", json_schema={"anyOf": []})
    assert "without end" not in raised.value.why and raised.value.fix


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (r'root ::= "\u00e9" "\x41" "\U0001F642" "\u0031"', "éA🙂1"),
        (r'root ::= "\x22\x5c\x0a\x2d/[#" # "\x41', '"\\\n-/[#'),
        (r'root ::= "a\\x41" [\\] [\x5b] [\]]', r"a\x41\[]"),
        (r"root ::= [a&&b]{4} [~~a]{2} [\u00e9] [^\x00-\u00e8\u00ea-\U0010ffff]", "[ab&]{4}[~a]{2}éé"),
        (r"root ::= [\x5d\x5e\x2d]{4}", r"[\]^-]{4}"),
    ],
)
def test_codes_of_characters_in_gbnf(grammar: str, expected: str, llm: genai.LLM) -> None:
    for one in llm.generate("A", grammar=grammar, temperature=2.0, seed=1, n=4, max_tokens=60):
        assert one.text == expected or re.fullmatch(expected, one.text), one.text


def test_numbers_of_schemas_inside_grammars(llm: genai.LLM) -> None:
    held = {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}
    text = llm.generate("A", grammar=f'start: "n = " %json {json.dumps(held)}', temperature=2.0, seed=1)[0].text
    assert text == f"n = {2**53 + 2}"
    far = {"type": "integer", "minimum": -FAR, "maximum": -FAR + 2}  # llguidance would end the process
    with pytest.raises(GrammarError, match="has the number"):
        llm.generate("A", grammar=f"start: a\na: %json {json.dumps(far)}")


def test_a_schema_may_be_wide_and_refer_to_itself(llm: genai.LLM) -> None:
    parts = {f"d{n}": {"type": "array", "items": {"$ref": "#/$defs/any"}} for n in range(200)}
    any_part = {"anyOf": [{"type": "null"}, *({"$ref": f"#/$defs/{name}"} for name in parts)]}
    schema = {"$defs": {**parts, "any": any_part}, "$ref": "#/$defs/any"}
    assert llm.generate("Once", json_schema=schema, max_tokens=2)


@pytest.mark.parametrize("link", ["r{n}: r{next}", "r{n}: r{next} | r{next} r{next}", 'R{n}: "y" R{next}'])
def test_chains_of_rules(link: str, llm: genai.LLM) -> None:
    def chain(count: int) -> str:
        first = link[0]
        rules = [link.format(n=n, next=n + 1) for n in range(count)]
        return "\n".join([f"start: {first}0", *rules, f'{first}{count}: "x"'])

    with pytest.raises(GrammarError, match="too large"):
        llm.generate("Once", grammar=chain(8_000))
    with contextlib.suppress(GrammarError):  # on a busy machine the time may be over
        llm.generate("Once", grammar=chain(4_500), max_tokens=1)
    assert llm.generate("Once", grammar=chain(300), max_tokens=1)


def test_a_grammar_that_explodes_ends_its_own_request_only(llm: genai.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    small = LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    monkeypatch.setattr("genai.engine.sampling.guidance._limits", lambda: small)
    items = [{"prompt": "A", "regex": "(.*a.{500}){5}", "logit_bias": {67: 50.0}}, {"prompt": "A", "regex": "fine"}]
    answers = list(llm.map(items, max_tokens=500))
    assert isinstance(answers[0].error, GrammarError) and answers[1].text == "fine"


def test_the_same_schema_always_has_the_same_number() -> None:
    assert make_schema(7) == make_schema(7) != make_schema(8)
