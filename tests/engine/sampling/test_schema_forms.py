"""Formats, unique items, rules for keys and exclusive alternatives in JSON schemas."""

from __future__ import annotations

import json
import logging
import re
from random import Random
from typing import Any

import jsonschema
import pytest

from genai.engine.sampling import schema_forms
from genai.engine.sampling.ecma_regex import PatternError, rewrite
from genai.engine.sampling.grammar import Grammar
from genai.engine.sampling.guidance import Guidance
from genai.errors import GrammarError
from genai.llm.reply_shape import _called

from .schema_replies import Takes, Walk, matcher_of


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


# --- formats ------------------------------------------------------------------------------------------------------


def test_unknown_formats_are_annotations(caplog: pytest.LogCaptureFixture, takes: Takes) -> None:
    """The string is free, and the log has one note per format."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "shoe-size"}}, "required": ["a"]}
    schema_forms._noted.discard("shoe-size")
    with caplog.at_level(logging.INFO, "genai"):
        for text in ("", "a b", "\n"):
            assert takes(schema, json.dumps({"a": text}))
    notes = [record.getMessage() for record in caplog.records if "shoe-size" in record.getMessage()]
    assert notes == ["the format 'shoe-size' in JSON schemas is an annotation: it does not restrict the reply"]


@pytest.mark.parametrize(("kind", "name"), [("integer", "int32"), ("number", "double"), ("boolean", "shoe-size")])
def test_formats_of_other_types(kind: str, name: str, takes: Takes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "genai"):
        assert takes({"type": kind, "format": name}, "true" if kind == "boolean" else "12")
    assert name not in caplog.text


def test_formats_with_patterns(takes: Takes) -> None:
    cases = [
        ("uuid4", "00000000-0000-4000-8000-000000000000", "00000000-0000-1000-8000-000000000000"),
        ("base64", "QUI=", "QU"),
        ("base64url", "Q-I=", "Q+I="),
        ("ipvanyaddress", "::1", "1.2.3"),
        ("time", "23:59:59Z", "23:59:60Z"),
        ("date", "2024-02-29", "0000-01-01"),
        ("duration", "P3DT2H", "P1234567D"),
    ]
    for name, good, bad in cases:
        schema = {"type": "string", "format": name, "minLength": 1}
        assert takes(schema, f'"{good}"') and not takes(schema, f'"{bad}"'), name


# --- patterns of Decimal ------------------------------------------------------------------------------------------


def pydantic_decimal(digits: int | None, places: int | None) -> str:
    """The pattern that Pydantic 2.11 writes."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*"
    if digits is not None and places is not None:
        whole = max(0, digits - places)
        return rf"{pattern}(?:\d{{0,{whole}}}|(?=[\d.]{{1,{digits + 1}}}0*$)\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"
    if digits is not None:
        return rf"{pattern}(?:\d{{0,{digits}}}|(?=[\d.]{{1,{digits + 1}}}0*$)\d*\.\d*0*$)"
    return pattern + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")


@pytest.mark.parametrize("digits", [None, 0, 1, 5, 28])
@pytest.mark.parametrize("places", [None, 0, 2, 6])
def test_patterns_of_decimals(digits: int | None, places: int | None, walk: Walk, takes: Takes) -> None:
    pattern = pydantic_decimal(digits, places)
    schema = {"type": "string", "pattern": pattern, "maxLength": 40}
    for seed in range(20):
        if (reply := walk(schema, seed, b"0123456789.+-")) is not None:
            assert re.search(pattern, text := json.loads(reply)), text
            assert re.fullmatch(r"[+-]?[0-9]*\.?[0-9]*", text) and any(one.isdigit() for one in text)
    for text in ("0", "+00", "", "-", ".", "0.0"):
        assert takes(schema, json.dumps(text)) == any(one.isdigit() for one in text), text
    for text in ("12.25", "-0012.5", "1234567.25"):
        fits = re.fullmatch(rf"(?:{pattern})\Z", text) is not None
        assert takes(schema, json.dumps(text)) == fits, text


def test_negative_lookaheads(takes: Takes) -> None:
    for pattern in ("^(?![a-c]*$)", "^(?!^[a-c]*$)[a-z]*$"):
        for text, expected in (("ab", False), ("", False), ("abd", True), ("z", True)):
            assert takes({"type": "string", "pattern": pattern}, f'"{text}"') == expected
    for pattern in ("^(?!abc)", "^(?![a]*$)+b", "^a(?![b]*$)", "(?![b]*$)", "^(?![b]$)"):
        with pytest.raises(PatternError, match="lookahead"):
            rewrite(pattern)


# --- unique items -------------------------------------------------------------------------------------------------

FEW: dict[str, dict[str, Any]] = {
    "enum": {"items": {"enum": ["a", "b", 1, 1.0, True]}},
    "many values in order": {"items": {"enum": list("abcdefghi")}},
    "few of many": {"items": {"type": "integer", "minimum": 1, "maximum": 20}, "maxItems": 2, "minItems": 1},
    "boolean": {"items": {"type": ["boolean", "null"]}},
    "union": {"items": {"anyOf": [{"const": "a"}, {"type": "boolean"}, {"enum": [[1], {"b": 1}]}]}, "minItems": 2},
    "one item": {"items": {"type": "string"}, "maxItems": 1},
    "typed": {"items": {"enum": ["a", 1, None], "type": ["string", "null"]}},
}


@pytest.mark.parametrize("name", FEW)
def test_few_unique_items(name: str, walk: Walk) -> None:
    schema = {"type": "array", "uniqueItems": True, "title": "T", **FEW[name]}
    found = {walk(schema, seed, b"") for seed in range(40)} - {None}
    assert len(found) > 3
    for reply in found:
        assert reply is not None and is_valid(schema, json.loads(reply)), reply


def test_lists_have_any_order_if_there_are_few(takes: Takes) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b", "c", "d", "e"]}, "uniqueItems": True}
    assert takes(schema, '["e", "a", "c"]') and not takes(schema, '["e", "a", "e"]')
    assert takes({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]")


MANY: dict[str, dict[str, Any]] = {
    "integers": {"items": {"type": "integer"}, "minItems": 3},
    "range": {"items": {"type": "integer", "minimum": 0, "maximum": 60}, "minItems": 4},
    "enum": {"items": {"enum": [*(f"a{number}" for number in range(20)), "a"]}, "minItems": 21},
    "numbers": {"items": {"type": "number"}, "minItems": 2},
    "objects": {"items": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}},
                "required": ["a", "b"], "additionalProperties": False}, "minItems": 3},
    "anything": {"minItems": 3},
    "strings": {"items": {"type": "string", "maxLength": 1}, "minItems": 4},
    "prefix": {"prefixItems": [{"type": "integer"}, {"type": "integer"}], "items": {"type": "integer"}},
    "recursive": {"items": {"anyOf": [{"$ref": "#"}, {"type": "boolean"}]}},
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_many_unique_items(name: str, walk: Walk) -> None:
    """Tokens that repeat an item are not allowed, nor tokens after which every token repeats an item."""
    schema = {"type": "array", "uniqueItems": True, **MANY[name]}
    for place in (schema, {"anyOf": [schema, {"type": "null"}]} if name != "recursive" else schema):
        replies = [reply for seed in range(5) if (reply := walk(place, seed, b'"0a1,')) is not None]
        assert replies
        for reply in replies:
            assert is_valid(place, json.loads(reply)), reply


def test_positions_in_unique_items(guidance: Guidance) -> None:
    matcher = matcher_of(guidance, {"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    for token in b'["a", "':
        matcher.follow(token)
    assert matcher.num_allowed(list(b'b", "a"')) == 6 and matcher.num_allowed(list(b'a"')) == 1
    fork = matcher.fork()
    for token in b'b", ':
        fork.follow(token)
    assert fork.num_allowed(list(b'"b"')) == 2 and matcher.num_allowed(list(b'b"')) == 2
    fork.rewind(len('["a", '))
    assert fork.num_allowed(list(b'"b"')) == 3 and fork.num_allowed(list(b'"a"')) == 2
    matcher.follow(ord("a"))
    with pytest.raises(GrammarError, match="the grammar failed after 8 tokens") as raised:
        matcher.follow(ord('"'))
    assert "repeats an item" in raised.value.why


def test_unique_items_in_grammars_are_refused(guidance: Guidance) -> None:
    """Items are compared only if the whole reply follows the schema."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(GrammarError, match='"uniqueItems" at the top of json_schema cannot') as raised:
        guidance.matcher(Grammar("grammar", f"start: %json {json.dumps(schema)}"))
    assert "compare items" in raised.value.why and '"enum"' in raised.value.fix


# --- rules for keys -----------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {
    "enum": {"enum": ["a", "b", 1]},
    "const": {"const": "a"},
    "numbers": {"enum": [1, 2]},
    "integer": {"type": "integer"},
    "pattern": {"pattern": "^[a-c]{1,2}$"},
    "open pattern": {"pattern": "^-?\\d+$", "type": "string"},
    "length": {"minLength": 1, "maxLength": 2},
    "max": {"maxLength": 1},
    "date": {"format": "date"},
    "unknown format": {"format": "shoe-size"},
    "all": {},
    "true": True,
    "false": False,
    "reference": {"$ref": "#/$defs/key"},
}


@pytest.mark.parametrize("name", KEYS)
def test_rules_for_keys(name: str, walk: Walk) -> None:
    schema = {
        "type": "object",
        "propertyNames": KEYS[name],
        "additionalProperties": {"type": "boolean"},
        "$defs": {"key": {"enum": ["x", "y"]}},
    }
    found = {walk(schema, seed, b'"') for seed in range(30)} - {None}
    assert found
    assert (found == {"{}"}) == (name in ("numbers", "integer", "false"))
    for reply in found:
        assert reply is not None and is_valid(schema, json.loads(reply)), reply


def test_rules_for_keys_that_are_refused(guidance: Guidance) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"propertyNames": {"pattern": "^a", "minLength": 2}}, "one pattern"),
        ({"propertyNames": {"not": {"const": "a"}}}, "one pattern"),
        ({"propertyNames": {"const": "a"}, "properties": {"a": {}}}, "together with named keys"),
        ({"propertyNames": {"const": "a"}, "patternProperties": {"a": {}}}, "together with named keys"),
    ]
    for part, why in cases:
        with pytest.raises(GrammarError, match='"propertyNames" at /items of json_schema') as raised:
            matcher_of(guidance, {"type": "array", "items": {"type": "object", **part}})
        assert why in raised.value.why and "patternProperties" in raised.value.fix


# --- exclusive alternatives ---------------------------------------------------------------------------------------


def random_alternative(random: Random) -> dict[str, Any]:
    names = random.sample("abcd", random.randrange(1, 4))
    kinds: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"const": 1},
        {"enum": [1, 2]},
        {"type": "null"},
        {"const": "x"},
    ]
    schema: dict[str, Any] = {"type": "object", "properties": {name: random.choice(kinds) for name in names}}
    schema["required"] = random.sample(names, random.randrange(len(names) + 1))
    if random.random() < 0.5:
        schema["additionalProperties"] = False
    return random.choice([schema, schema, schema, {"type": random.choice(["integer", "number", "null"])}, {"const": 3}])


def test_exclusive_alternatives(walk: Walk) -> None:
    """Every reply matches exactly one alternative; schemas for which this is not certain are refused."""
    random, followed, refused = Random(5), 0, 0
    for number in range(150):
        listed = [random_alternative(random) for _ in range(random.randrange(1, 4))]
        schema: dict[str, Any] = {"oneOf": listed}
        if random.random() < 0.3:
            schema = {"oneOf": [{"$ref": f"#/$defs/{at}"} for at in range(len(listed))],
                      "$defs": {str(at): one for at, one in enumerate(listed)}}  # fmt: skip
        try:
            replies = [walk(schema, number * 10 + seed, b"abcd12") for seed in range(6)]
        except GrammarError as error:
            assert '"oneOf" at the top' in error.what and "alternative" in error.why and "anyOf" in error.fix
            refused += 1
            continue
        for reply in filter(None, replies):
            assert is_valid(schema, json.loads(reply)), (schema, reply)
            followed += 1
    assert followed > 200 and refused > 20


def test_alternatives_of_required_keys(takes: Takes) -> None:
    text = {"type": "string"}
    schema = {
        "oneOf": [
            {"type": "object", "properties": {"a": text}, "required": ["a"]},
            {"type": "object", "properties": {"b": text, "c": text}, "required": ["b"]},
        ]
    }
    assert takes(schema, '{"a": "x"}') and takes(schema, '{"b": "x", "c": "y"}')
    assert not takes(schema, '{"a": "x", "b": "y"}') and not takes(schema, '{"b": "x", "a": "y"}')


def test_alternatives_in_alternatives(takes: Takes) -> None:
    def kind(name: str, **more: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": name}, **more}, "required": ["kind"]}

    schema = {
        "oneOf": [{"oneOf": [kind("cat"), kind("lion")]}, kind("dog", age={"type": "integer"})],
        "anyOf": [{"type": "object", "required": ["kind"]}, {"type": "null"}],
    }
    assert takes(schema, '{"kind": "dog", "age": 3}') and takes(schema, '{"kind": "lion"}')
    assert not takes(schema, '{"kind": "dog", "age": "x"}') and not takes(schema, "null")


# --- tools --------------------------------------------------------------------------------------------------------


def test_tools_apply_schemas_as_far_as_possible() -> None:
    """Only strict tools must match their schema exactly."""
    whole: dict[str, Any] = {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "any": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        "map": {"type": "object", "propertyNames": {"not": {"const": "a"}}},
    }
    for name, part in whole.items():
        function = {"name": "f", "parameters": {"type": "object", "properties": {name: part}}}
        found = _called({"type": "function", "function": function}, 0).schema["properties"][name]
        assert not {"uniqueItems", "oneOf", "propertyNames"} & set(found)
        with pytest.raises(GrammarError, match="the schema of tool 'f' cannot be enforced"):
            _called({"type": "function", "function": {**function, "strict": True}}, 0)
