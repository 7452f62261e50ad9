"""Forms of JSON schemas that llguidance does not read, in forms that it reads; many of them come from Pydantic.

Each change is exact or narrows the schema, so that every reply that matches the new form also matches the schema.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import combinations, permutations
from typing import Any, TypeAlias

from genai.common.log import logger

from .json_schema import add_all, all_parts, is_number, referred

_LOG = logger(__name__)
Refuse: TypeAlias = Callable[[str, str, str], Exception | None]
"""Return the exception for a location, a reason and a fix; None to leave the requirement out."""

_HEX = "[0-9a-f]"
_UUID = f"^{_HEX}{{8}}-{_HEX}{{4}}-%s{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# Formats that llguidance enforces.
_ENFORCED = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# Patterns for formats that Pydantic writes, and for keys, to which llguidance applies no formats.
_PATTERNS = {
    **{f"uuid{version}": _UUID % version for version in range(1, 9)},
    "fraction": "^-?[0-9]{1,9}(?:/[1-9][0-9]{0,8})?$",
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
}
_KEY_PATTERNS = {
    "date": "^(?:[1-9][0-9]{3})-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])$",
    "uuid": _UUID % "4",
    "ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$",
    **_PATTERNS,
}
# Formats of addresses that llguidance enforces, for formats that also allow other texts.
_ADDRESSES = {
    f"{kind}{form}": ("ipv4", "ipv6") if kind == "ipvany" else (kind,)
    for kind in ("ipv4", "ipv6", "ipvany")
    for form in ("address", "network", "interface")
}
# Keywords that restrict no value.
_NOTES = frozenset("title description default examples deprecated readOnly writeOnly $comment".split())
# Keywords that a schema may have at the top, and those of arrays whose lists can be written out.
_ABOUT = frozenset("$schema $id $defs definitions x-guidance".split())
_ARRAY = frozenset("type items minItems maxItems uniqueItems".split())
# The maximum number of lists that are written out for an array of unique items.
_MOST_LISTS = 512
_MOST_VALUES = 64
_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: is_number(value) and float(value).is_integer(),
    "number": is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}

_noted: set[str] = set()
_noting = threading.Lock()


def hold_forms(schema: Any, refuse: Refuse, *, is_followed: bool = False) -> None:
    """Replace formats, unique items, rules for keys, and exclusive alternatives, in place.

    Args:
        schema: the schema.
        refuse: see `Refuse`.
        is_followed: True if `UniqueItems` compares the items of arrays.
    """
    known = [(path, part) for path, part in all_parts(schema) if isinstance(part, MutableMapping)]
    for path, part in known:
        _hold_format(part)
        _hold_unique(schema, path, part, refuse, is_followed)
        _hold_key_rule(schema, path, part, refuse)
    for path, part in known:
        _hold_one_of(schema, path, part, refuse)


def has_unique_items(schema: Any) -> bool:
    """Return True if a schema has arrays whose items must be compared while the reply is generated."""
    return any(
        isinstance(part, Mapping)
        and part.get("uniqueItems") is True
        and "array" in _types(part)
        and _lists(schema, part) is None
        for _, part in all_parts(schema)
    )


# --- formats ------------------------------------------------------------------------------------------------------


def _hold_format(part: MutableMapping[str, Any]) -> None:
    """Replace a format that llguidance does not know; without a pattern for it, it is an annotation."""
    name = part.get("format")
    if not isinstance(name, str) or name in _ENFORCED:
        return
    del part["format"]
    if "string" not in _types(part):
        return
    if name in _PATTERNS:
        add_all(part, [{"pattern": _PATTERNS[name]}])
    elif name in _ADDRESSES:
        add_all(part, [{"anyOf": [{"type": "string", "format": one} for one in _ADDRESSES[name]]}])
    else:
        _note(name)


def _note(name: str) -> None:
    with _noting:
        if name in _noted or len(_noted) > 1000:
            return
        _noted.add(name)
    _LOG.info("the format %.80r in JSON schemas is an annotation: it does not restrict the reply", name)


# --- unique items -------------------------------------------------------------------------------------------------


def _hold_unique(schema: Any, path: str, part: MutableMapping[str, Any], refuse: Refuse, is_followed: bool) -> None:
    """Write out the lists of an array whose items are unique, if there are few."""
    if part.get("uniqueItems") is not True:
        part.pop("uniqueItems", None)
        return
    most = part.get("maxItems")
    if "array" in _types(part) and not (is_number(most) and most <= 1):
        found = _lists(schema, part)
        if found is None and is_followed:
            values = few_values(schema, part.get("items"))
            if values is not None and "prefixItems" not in part:
                part["maxItems"] = min(most, len(values)) if is_number(most) else len(values)
        elif found is None:
            error = refuse(
                f'"uniqueItems" at {path or "the top"}',
                "a grammar cannot compare items, unless few different items are possible",
                'list the possible items in "enum" (at most 8, or more with "maxItems"), or remove "uniqueItems"',
            )
            if error is not None:
                raise error
        else:
            for name in ("type", "items", "minItems", "maxItems"):
                part.pop(name, None)
            part["enum"] = found
    del part["uniqueItems"]


def _lists(schema: Any, part: Mapping[str, Any]) -> list[list[Any]] | None:
    """Return the lists of unique items that match an array's schema; None if there are too many.

    If only the order makes the lists too many, each list has the order of the schema.
    """
    if part.get("type") != "array" or set(part) - _NOTES - _ABOUT - _ARRAY:
        return None
    values = few_values(schema, part.get("items", True))
    if values is None:
        return None
    least, most = part.get("minItems", 0), part.get("maxItems", len(values))
    if not (is_number(least) and is_number(most)):
        return None
    sizes = range(int(least), min(int(most), len(values)) + 1)
    for choose in (permutations, combinations):
        found: list[list[Any]] = []
        for size in sizes:
            for items in choose(values, size):
                found.append(list(items))
                if len(found) > _MOST_LISTS:
                    break
        if len(found) <= _MOST_LISTS:
            return found
    return None


def few_values(schema: Any, part: Any, depth: int = 0) -> list[Any] | None:
    """Return all different values that match a schema, in its order; None if they are not known or too many."""
    if not isinstance(part, Mapping) or depth > 20:
        return None
    keys = set(part) - _NOTES
    found: list[Any] | None = None
    if keys == {"$ref"}:
        return few_values(schema, referred(schema, str(part["$ref"])), depth + 1)
    if len(keys) == 1 and isinstance(inner := part.get("anyOf"), list):
        each = [few_values(schema, one, depth + 1) for one in inner]
        found = None if None in each else [value for one in each for value in one or ()]
    elif keys <= {"enum", "const", "type"} and keys & {"enum", "const"}:
        listed = part.get("enum")
        found = listed if isinstance(listed, list) else [part["const"]] if "const" in part else None
        if found is not None:
            found = [one for one in found if any(_TYPES[kind](one) for kind in _types(part))]
            if "const" in part:
                found = [one for one in found if json_key(one) == json_key(part["const"])]
    elif keys == {"type"} and _types(part) <= {"boolean", "null"}:
        kinds = _types(part)
        found = [*([False, True] if "boolean" in kinds else ()), *([None] if "null" in kinds else ())]
    elif part.get("type") == "integer" and keys == {"type", "minimum", "maximum"}:
        low, high = part["minimum"], part["maximum"]
        if is_number(low) and is_number(high) and 0 <= high - low < _MOST_VALUES and float(low).is_integer():
            found = list(range(int(low), int(high) + 1))
    if found is None or len(found) > _MOST_VALUES:
        return None
    return list({json_key(one): one for one in reversed(found)}.values())[::-1]


def json_key(value: Any) -> str:
    """Return a text that is the same for values that are equal in JSON, such as 1 and 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, list):
        return f"[{','.join(map(json_key, value))}]"
    elif isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(key)}:{json_key(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def _types(part: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows."""
    kinds = part.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    return {kind for kind in kinds if kind in _TYPES} if isinstance(kinds, list) else set(_TYPES)


# --- keys ---------------------------------------------------------------------------------------------------------


def _hold_key_rule(schema: Any, path: str, part: MutableMapping[str, Any], refuse: Refuse) -> None:
    """Replace "propertyNames" with named keys or a pattern of keys."""
    if "propertyNames" not in part:
        return
    rule, others = part.pop("propertyNames"), part.get("additionalProperties", True)
    if "object" not in _types(part):
        return
    error = _key_rule(schema, part, rule, others)
    if error and (raised := refuse(f'"propertyNames" at {path or "the top"}', error, _KEY_FIX)) is not None:
        raise raised


_KEY_FIX = 'use "patternProperties" and "additionalProperties": false'


def _key_rule(schema: Any, part: MutableMapping[str, Any], rule: Any, others: Any) -> str:
    """Apply a rule for keys to an object, and return "", or the reason why it cannot be applied."""
    for _ in range(20):
        if isinstance(rule, Mapping) and set(rule) - _NOTES == {"$ref"}:
            rule = referred(schema, str(rule["$ref"]))
    if rule is True or (isinstance(rule, Mapping) and not set(rule) - _NOTES - {"type"} and "string" in _types(rule)):
        return ""
    if part.get("properties") or part.get("patternProperties"):
        return "it is not supported together with named keys or patterns of keys"
    values = [] if rule is False else few_values(schema, rule)
    if values is None and isinstance(rule, Mapping) and "string" not in _types(rule):
        values = []
    if values is not None:
        part["properties"] = {name: others for name in values if isinstance(name, str)}
        part["additionalProperties"] = False
        return ""
    pattern = _key_pattern(rule)
    if pattern is None:
        return "only a list of keys, one pattern, one format, or limits of the length are supported"
    if pattern:
        part["patternProperties"], part["additionalProperties"] = {pattern: others}, False
    return ""


def _key_pattern(rule: Any) -> str | None:
    """Return the pattern for keys that match a rule; "" for all keys, None if there is no such pattern."""
    keys = set(rule) - _NOTES - {"type"} if isinstance(rule, Mapping) else set()
    if keys == {"pattern"} and isinstance(rule["pattern"], str):
        return str(rule["pattern"])
    if keys == {"format"} and isinstance(rule["format"], str):
        if rule["format"] not in _KEY_PATTERNS:
            _note(rule["format"])
        return _KEY_PATTERNS.get(rule["format"], "")
    if keys and keys <= {"minLength", "maxLength"} and all(is_number(rule[key]) for key in keys):
        return f"^(?s:.){{{int(rule.get('minLength', 0))},{int(rule['maxLength']) if 'maxLength' in rule else ''}}}$"
    return None


# --- exclusive alternatives ---------------------------------------------------------------------------------------


def _hold_one_of(schema: Any, path: str, part: MutableMapping[str, Any], refuse: Refuse) -> None:
    """Replace "oneOf" with "anyOf", and remove from each alternative the instances of other alternatives."""
    listed = part.get("oneOf")
    if not isinstance(listed, list) or not listed:
        return
    found = []
    for index, one in enumerate(listed):
        others = [other for other in listed if other is not one]
        unlike = _apart(schema, one, others)
        if unlike is None:
            error = refuse(
                f'"oneOf" at {path or "the top"}',
                f"an instance of alternative {index} may also match another alternative",
                'use "anyOf", or give the alternatives a required property with different "const" values',
            )
            if error is not None:
                raise error
        found.append({"allOf": [one, {"properties": dict.fromkeys(unlike, False)}]} if unlike else one)
    del part["oneOf"]
    if "anyOf" in part:
        add_all(part, [{"anyOf": found}])
    else:
        part["anyOf"] = found


def _apart(schema: Any, one: Any, others: Iterable[Any]) -> list[str] | None:
    """Return the keys without which no instance of a schema matches the others; None if there are no such keys."""
    unlike: list[str] = []
    for other in others:
        if _disjoint(schema, one, other) or set(unlike) & set(_required(schema, other)):
            continue
        first, second = _resolved(schema, one), _resolved(schema, other)
        if _kinds(schema, first) & _kinds(schema, second) != {"object"}:
            return None
        own = set(_required(schema, one))
        free = [key for key in _required(schema, other) if key not in own]
        if not free:
            return None
        named = first.get("properties") if isinstance(first, Mapping) else None
        unlike.append(next((key for key in free if not isinstance(named, Mapping) or key not in named), free[0]))
    return unlike


def _resolved(schema: Any, part: Any) -> Any:
    """Follow references that stand alone."""
    for _ in range(20):
        if not (isinstance(part, Mapping) and isinstance(ref := part.get("$ref"), str)):
            return part
        part = referred(schema, ref)
    return None


def _required(schema: Any, part: Any) -> Iterator[str]:
    part = _resolved(schema, part)
    listed = part.get("required") if isinstance(part, Mapping) else None
    yield from (key for key in listed if isinstance(key, str)) if isinstance(listed, list) else ()


def _kinds(schema: Any, part: Any) -> set[str]:
    """Return the types that instances of a schema may have."""
    if part is False:
        return set()
    if not isinstance(part, Mapping):
        return set(_TYPES)
    if (values := few_values(schema, part)) is not None:
        return {kind for kind, test in _TYPES.items() if any(test(value) for value in values)}
    found = _types(part)
    return found | {"integer"} if "number" in found else found


def _disjoint(schema: Any, one: Any, other: Any, depth: int = 0) -> bool:
    """Return True if no instance can match both schemas; False if it is unknown."""
    one, other = _resolved(schema, one), _resolved(schema, other)
    if one is False or other is False:
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or depth > 10:
        return False
    for part, beside in ((one, other), (other, one)):
        for name, enough in (("anyOf", all), ("oneOf", all), ("allOf", any)):
            inner = part.get(name)
            if isinstance(inner, list) and enough(_disjoint(schema, each, beside, depth + 1) for each in inner):
                return True
    common = _kinds(schema, one) & _kinds(schema, other)
    if not common:
        return True
    first, second = few_values(schema, one), few_values(schema, other)
    if first is not None and second is not None:
        return not {json_key(value) for value in first} & {json_key(value) for value in second}
    if common != {"object"}:
        return False
    mine, theirs = one.get("properties"), other.get("properties")
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return False
    shared = [key for key in _required(schema, one) if key in mine and key in theirs]
    shared = [key for key in shared if key in set(_required(schema, other))]
    return any(_disjoint(schema, mine[key], theirs[key], depth + 1) for key in shared)
