"""Keys of objects in JSON schemas: named keys, patterns of keys, and all others. The judge is `jsonschema`."""

from __future__ import annotations

import copy
import json
import re
from itertools import permutations
from random import Random
from typing import Any

import jsonschema
import pytest

from genai.engine.sampling.ecma_regex import found_by_any_engine
from genai.engine.sampling.grammar import hold_values
from genai.engine.sampling.guidance import Guidance
from genai.engine.sampling.json_schema import close_alone
from genai.errors import GrammarError
from tests.drawing import Draw

from .schema_replies import Takes, Walk, matcher_of

NUMBER, NULL = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}
OPEN: list[Any] = [
    {"properties": {"a": NUMBER}},
    {"properties": {"a": NUMBER}, "required": ["a", "b\n"]},
    {"properties": {"\n": NUMBER}, "additionalProperties": NULL},
    {"properties": {"a/": NUMBER, "é": NUMBER}, "additionalProperties": NULL},
    {"properties": {"\x01": NUMBER, '"': NUMBER}, "additionalProperties": {"type": "string"}},
    {"properties": {"\n": NUMBER, "a": NUMBER}, "patternProperties": {r"^\s$": NULL}, "additionalProperties": False},
    {"patternProperties": {'^[^"]$': NULL}, "additionalProperties": NUMBER},
    {"patternProperties": {r"^\d$": NUMBER, "^[0-9]$": {"const": 3}}, "additionalProperties": False},
    {"patternProperties": {"^[^ -~]{1,2}$": NULL}, "minProperties": 1, "additionalProperties": False},
    {"allOf": [{"properties": {"a": NUMBER}}, {"additionalProperties": NUMBER}]},
    {"anyOf": [{"type": "object", "properties": {"a": NUMBER}, "additionalProperties": NULL}, NULL]},
]


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_objects_with_open_keys(schema: Any, walk: Walk) -> None:
    schema = {"type": "object", **schema} if "anyOf" not in schema else schema
    found = 0
    for seed in range(40):
        if (reply := walk(schema, seed)) is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(reply))
            found += 1
    assert found > 5


def test_a_named_key_in_another_form(takes: Takes) -> None:
    schema = {"properties": {"a": NUMBER, "\n": NUMBER}, "type": "object", "additionalProperties": True}
    assert takes(schema, r'{"a": 1, "\n": 2, "b": null}')
    for key in (r"\u0061", r"\u000a"):
        assert not takes(schema, f'{{"{key}": null}}')
    closed = {**schema, "additionalProperties": False, "properties": {"a": {"type": "string"}}}
    assert takes(closed, r'{"a": "\u001b"}')  # nothing to confuse, so control characters remain


def test_items_that_a_schema_names(takes: Takes) -> None:
    schema = {"type": "array", "prefixItems": [NUMBER], "additionalItems": False, "items": NULL, "minItems": 1}
    assert takes(schema, "[1, null]") and not takes(schema, '["x"]') and not takes(schema, "[null]")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "minProperties": 2}, "/minProperties"),
        ({"items": {"type": "object", "minProperties": 3, "required": ["a"]}}, "/items/minProperties"),
    ],
)
def test_minimums_that_repeated_keys_would_reach(schema: Any, place: str, guidance: Guidance) -> None:
    with pytest.raises(GrammarError, match=f"a minimum of keys at {place} that") as raised:
        matcher_of(guidance, schema)
    assert "repeat" in raised.value.why and "required" in raised.value.fix
    hold_values({**schema, "x-guidance": {"lenient": True}})  # as far as possible


A = {"type": "object", "properties": {"a": NUMBER}}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, True),
        ({**A, "required": ["a"], "minProperties": 1}, True),
        ({"type": "array", "items": A, "minItems": 1}, True),
        ({"type": "object", "properties": {"k": A}, "required": ["k"]}, True),
        ({"type": "object", "additionalProperties": A, "minProperties": 1}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, True),
        ({"anyOf": [A, {"type": "null"}], "title": "A or null"}, True),
        ({"allOf": [A]}, True),
        ({**A, "additionalProperties": True}, False),
        ({**A, "required": ["z"]}, False),
        ({**A, "required": ["a"], "minProperties": 2}, False),
        ({**A, "patternProperties": {"^z": {}}}, False),
        ({"allOf": [A, {"type": "object", "properties": {"z": {}}}]}, False),
        ({**A, "$ref": "#/$defs/z", "$defs": {"z": {"properties": {"z": {}}}}}, False),
        ({"oneOf": [A, {"type": "null"}]}, False),
        ({"type": "object", "properties": {"k": A}, "allOf": [{"properties": {"k": {"required": ["z"]}}}]}, False),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}}, False),
        ({"type": "object"}, False),
    ],
    ids=str,
)
def test_keys_that_a_schema_does_not_name(schema: dict[str, Any], closed: bool) -> None:
    """Objects have no such keys, unless the schema allows or needs them, or other parts describe the same object."""
    held = copy.deepcopy(schema)
    close_alone(held)
    assert (held != schema) == closed


def test_replies_have_named_keys_only(takes: Takes) -> None:
    assert takes(A, '{"a": 1}') and takes(A, "{}") and not takes(A, '{"b": 1}')
    assert takes({**A, "additionalProperties": True}, '{"b": 1}')


def test_rare_control_characters_beside_open_keys(guidance: Guidance, takes: Takes) -> None:
    for part in ({"const": "\x01"}, {"enum": ["a", {"b": "\x01"}]}, {"type": "string", "pattern": "^\x01$"}):
        schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": True}
        with pytest.raises(GrammarError, match=r"requires the character '.x01' at /properties/a") as raised:
            matcher_of(guidance, schema)
        assert "u0001" in raised.value.why and "additionalProperties" in raised.value.fix
        matcher_of(guidance, {**schema, "additionalProperties": False})
    with pytest.raises(GrammarError, match="names every control character"):
        hold_values({"pattern": "|".join(f"\\x{code:02x}" for code in range(32))})


# --- named keys that patterns match -------------------------------------------------------------------------------

SMALL, TEXT = {"minimum": 3, "maximum": 5}, {"type": "string", "maxLength": 2}
DEFINITIONS = {"number": NUMBER, "text": TEXT}


def _both(properties: Any, patterns: Any, others: Any = True, **keywords: Any) -> dict[str, Any]:
    """An object schema with named keys and patterns of keys."""
    named = {"properties": properties} if properties is not None else {}
    return {"type": "object", **named, "patternProperties": patterns, "additionalProperties": others, **keywords}


_REF = {"$ref": "#/$defs/number"}
_CLOSED = _both({"a": NUMBER}, {"^a$": SMALL}, False)
_LONG = "^\\w+$"
# A schema, valid instances, and invalid instances. The judge is jsonschema, see the test.
BOTH: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (_both({"a": NUMBER}, {"^a": SMALL}), [{"a": 4}, {}, {"b": 0}], [{"a": 2}, {"ab": 7}]),
    (_both({"a": NUMBER}, {"^a$": SMALL}), [{"a": 4}, {}, {"ab": 7}], [{"a": 2}]),
    (_CLOSED, [{"a": 4}, {}], [{"a": 2}, {"b": 1}]),
    (_both({"a": NUMBER, "b": NUMBER}, {"^[ab]$": SMALL}, False), [{"a": 4, "b": 3}], [{"a": 4, "b": 2}]),
    (_both({"a": NUMBER, "b": TEXT}, {"^(a|b)$": {"x": 1}}, False), [{"a": 4, "b": "x"}, {"b": ""}], [{"a": "x"}]),
    (_both({"a": {}}, {"^a$": NUMBER}, False, required=["a"]), [{"a": 4}], [{}, {"a": "x"}]),
    (_both(None, {"^a$": NUMBER}, False, required=["a"]), [{"a": 4}], [{}, {"a": "x"}]),
    (
        _both(None, {"^(a|b)$": NUMBER}, TEXT, required=["a", "b"]),
        [{"a": 4, "b": 1}, {"a": 4, "b": 1, "c": "x"}],
        [{"a": 4, "b": "x"}, {"a": 4, "b": 1, "c": 1}],
    ),
    (_both({"a": True, "b": False}, {"^[ab]$": NUMBER}, False), [{"a": 4}, {}], [{"b": 1}, {"a": "x"}]),
    (_both({"a": NUMBER}, {"^a$": False}, False), [{}], [{"a": 1}]),
    (_both({"a": NUMBER}, {"^a$": True}, False), [{}, {"a": 1}], [{"a": "x"}]),
    (_both({"a": NUMBER, "b": TEXT}, {"^a$": TEXT}, False), [{}, {"b": "x"}], [{"a": 1}, {"a": "x"}]),
    (_both({"a": _REF}, {"^a$": _REF, "^b": SMALL}, False), [{"a": 1, "b": 3}, {"bb": 4}], [{"a": "x"}, {"b": 1}]),
    (_both({"a": NUMBER}, {"^a": SMALL, "^[^a]": TEXT}, False), [{"a": 4, "b": "x"}], [{"a": 2}, {"b": 1}, {"": 1}]),
    (_both({"a": NUMBER}, {"^a": SMALL, "^a$": {"maximum": 4}}), [{"a": 4}, {"ab": 5}], [{"a": 5}, {"ab": 6}]),
    (_both({"o": _CLOSED}, {"^o$": {"required": ["a"]}}), [{"o": {"a": 4}}, {}], [{"o": {}}, {"o": {"a": 2}}]),
    (
        _both({"o": {"properties": {"a": NUMBER}}}, {"^o": _both(None, {"^a$": SMALL}, False)}),
        [{"o": {"a": 4}}, {"o": {}}],
        [{"o": {"a": 2}}, {"o": {"b": 1}}],
    ),
    (
        {"type": "object", "allOf": [{"properties": {"a": NUMBER}}, _both(None, {"^a$": SMALL}, False)]},
        [{"a": 4}, {}],
        [{"a": 2}, {"b": 1}],
    ),
    (
        {"type": "object", "properties": {"o": {"$ref": "#/$defs/closed"}}},
        [{"o": {"a": 4}}, {"o": {}}],
        [{"o": {"a": 2}}, {"o": {"b": 1}}],
    ),
    (_both({"größe": NUMBER}, {_LONG: SMALL}), [{"größe": 4}], [{"größe": 2}]),
    (_both(None, {_LONG: SMALL}, NUMBER, required=["größe"]), [{"größe": 4}], [{"größe": 2}]),
    (_both({"\x01": NUMBER}, {"^[^a]$": SMALL}), [{"\x01": 4}], [{"\x01": 2}]),
    (_both({"\x01": NUMBER, "b": TEXT}, {"^\\x01$": SMALL}, False), [{"\x01": 4, "b": ""}, {"b": ""}], [{"\x01": 2}]),
    (_both({'"': NUMBER}, {'^"$': SMALL}, False), [{'"': 4}], [{'"': 2}]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), BOTH, ids=[str(one[0]) for one in BOTH])
def test_a_named_key_matches_its_own_schema_and_those_of_patterns(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any], walk: Walk, takes: Takes
) -> None:
    schema = {"$defs": {"number": NUMBER, "closed": _CLOSED}, **schema}
    judge = jsonschema.Draft202012Validator(schema)
    assert all(map(judge.is_valid, valid)) and not any(map(judge.is_valid, invalid))
    for instance in (*valid, *invalid):
        assert takes(schema, json.dumps(instance, ensure_ascii=False)) == (instance in valid), instance
    replies = [walk(schema, seed, b'ab1"}') for seed in range(30)]
    assert any(replies)
    for reply in filter(None, replies):
        judge.validate(json.loads(reply))


_SUBSCHEMAS: list[Any] = [
    {}, True, False, NUMBER, TEXT, SMALL, {"const": 1}, {"enum": [1, "x", None]}, {"type": ["integer", "string"]},
    {"$ref": "#/$defs/number"}, {"$ref": "#/$defs/text"}, {"type": "array", "items": NUMBER, "maxItems": 2},
    {"anyOf": [NUMBER, NULL]}, {"oneOf": [NUMBER, NULL]}, {"pattern": "^a"}, {"minLength": 2},
    {"type": "object", "properties": {"b": NUMBER}, "additionalProperties": False},
    {"type": "object", "properties": {"b": TEXT}, "required": ["b"]},
]  # fmt: skip
_KEYS = ("a1", "a2", "b1", "c", "b")
_PATTERNS = ("^a", "1$", "^b", "^a1$", "2", "[ab]", "^[^a]", "^(a1|b1)$", "^[ab]1?$", "^c$", ".*")
_VALUES = (0, 1, 3, 5, 9, 10, "", "a", "x", "ab", "abc", None, {}, {"b": 1}, {"b": "x"}, [1], True)


def _random_object(random: Random, depth: int = 0) -> dict[str, Any]:
    def inner() -> Any:
        return _random_object(random, 1) if not depth and random.random() < 0.2 else random.choice(_SUBSCHEMAS)

    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: inner() for key in random.sample(_KEYS, random.randrange(4))},
        "patternProperties": {pattern: inner() for pattern in random.sample(_PATTERNS, random.choice((1, 1, 2)))},
    }
    if (kind := random.random()) < 0.7:
        schema["additionalProperties"] = False if kind < 0.5 else inner()
    if random.random() < 0.6:
        schema["required"] = random.sample(_KEYS, random.randrange(1, 3))
    return schema


def test_random_keys_and_patterns(draw: Draw, walk: Walk, takes: Takes) -> None:
    """Every reply is valid, and every valid instance is a reply, in one of the orders of its keys."""
    random, counts, refused = Random(draw.seed), {True: 0, False: 0}, 0
    for _ in range(150):
        schema = {**_random_object(random), "$defs": DEFINITIONS}
        judge = jsonschema.Draft202012Validator(schema)
        chosen = [[key for key in (*_KEYS, "zz") if random.random() < 0.4] for _ in range(30)]
        instances = [{key: random.choice(_VALUES) for key in keys} for keys in chosen if len(keys) < 5]
        try:
            replies = [walk(schema, seed, b'ab12"}') for seed in range(4)]
        except GrammarError as error:
            limits = ("are not disjoint", "$defs/keys")  # llguidance refuses references to schemas without instances
            known = any(limit in error.why for limit in limits)
            assert known or not any(map(judge.is_valid, instances)), (schema, error)
            refused += 1
            continue
        for reply in filter(None, replies):
            assert judge.is_valid(json.loads(reply)), (schema, reply)
        for instance in instances:
            orders = (json.dumps(dict(order)) for order in permutations(instance.items()))
            expected = judge.is_valid(instance)
            assert any(takes(schema, text) for text in orders) == expected, (schema, instance)
            counts[expected] += 1
    assert counts[True] > 50 and counts[False] > 50 and refused < 100


def test_patterns_that_match_the_same_key_are_refused_by_name(guidance: Guidance) -> None:
    inner = {"properties": {"a1": NUMBER}, "patternProperties": {"^a": SMALL, "1$": NUMBER}}
    with pytest.raises(GrammarError, match="at /properties/o") as raised:
        matcher_of(guidance, {"type": "object", "properties": {"o": inner}})
    assert "/^a/ and /1$/ are not disjoint" in raised.value.why and "no key matches two" in raised.value.fix
    required = {"properties": {"a": NUMBER}, "patternProperties": {"^a$": TEXT}, "required": ["a"], "type": "object"}
    with pytest.raises(GrammarError, match="json_schema") as raised:
        matcher_of(guidance, required)
    assert "'a' is unsatisfiable" in raised.value.why


def test_a_schema_for_many_keys_is_written_once() -> None:
    """Nested patterns of eight keys each: copies would be 8**12 times as long."""
    keys = [f"k{number}" for number in range(8)]
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(12):
        patterns = {f"^({'|'.join(keys)})$": schema}
        schema = {"type": "object", "properties": dict.fromkeys(keys, True), "patternProperties": patterns}
    hold_values(schema)
    assert len(json.dumps(schema)) < 20_000


def test_keys_in_which_engines_find_a_pattern() -> None:
    keys = ["größe", "日本", "a b", "K", "\u212a", "\x01", '"', "α", ""]
    for pattern in ("^\\w+$", "(?i)^k$", "^[^a]$", "^\\s$", "^.$", "", "b$"):
        ours = found_by_any_engine(pattern, keys)
        assert set(filter(re.compile(pattern).search, keys)) <= set(ours), pattern
    assert found_by_any_engine("^\\w$", keys) == ["K", "\u212a", "α"]
    assert found_by_any_engine(r"^\p{Script=Greek}$", keys) == ["α"]
    assert found_by_any_engine(r"^\p{ID_Start}$", keys) == []  # RE2 does not know this property
