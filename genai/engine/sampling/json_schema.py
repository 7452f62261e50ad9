"""Changes to JSON schemas before compilation, such as bounds that llguidance would widen; and finite instances.

`schema_keys` contains the changes to the keys of objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeGuard
from urllib.parse import unquote

from .ecma_regex import RARE, PatternError, Rewritten, rewrite

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not")
# Keywords whose schemas describe the same value as the schema that has the keyword.
_IN_PLACE = ("$ref", "anyOf", "allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "contains")
_BESIDE = ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples")
# Keywords that decide which keys an object can have, besides "properties", "required" and "minProperties".
_OF_KEYS = {
    *_IN_PLACE, "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
    "dependentRequired", "dependencies", "const", "enum",
}  # fmt: skip
# Keywords of bounds, each with the direction in which the valid values lie.
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
# The maximum distance by which an exclusive bound is moved. It is relative to the bound or, for small bounds, absolute.
_STEP = 1e-9
# The largest float below 2 ** 63. llguidance computes with whole numbers up to 2 ** 63, and overflows its stack at
# -(2 ** 63).
_FARTHEST = 2**63 - 1024
# llguidance treats old drafts like later ones, in which "required": true and "divisibleBy" have no meaning.
_OLD_DRAFT = re.compile(r"json-schema\.org/draft-0[0-3]/")
# A pattern for existing days, for texts that llguidance accepts as dates. llguidance allows 29 days in every February.
_DAYS = (
    "^(?:[0-9]{4}-(?:0[13-9]|1[0-2])|[0-9]{4}-02-(?:[01]|2[0-8])"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
# Patterns for what llguidance does not enforce in formats of times, or what Python's `datetime` requires: existing
# days, years from 1, no leap seconds, and durations of less than a thousand million days.
_TIMES = {
    "date": (_DAYS, "^[0-9]{0,3}[1-9]"),
    "date-time": (_DAYS, "^[0-9]{0,3}[1-9]", "^.{17}[0-5]"),
    "time": ("^.{6}[0-5]",),
    "duration": ("^[^0-9]*(?:[0-9]{1,6}[^0-9]+)*$",),
}


def parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema, each with the step of a JSON pointer that leads to it."""
    if not isinstance(schema, Mapping):
        return
    for name in _NAMED:
        inner = schema.get(name)
        for key, part in inner.items() if isinstance(inner, Mapping) else ():
            yield f"/{name}/{escaped(key)}", part
    for name in _LISTED:
        inner = schema.get(name)
        for index, part in enumerate(inner) if isinstance(inner, list) else ():
            yield f"/{name}/{index}", part
    for name in _SINGLE:
        if isinstance(schema.get(name), Mapping):
            yield f"/{name}", schema[name]


def all_parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield a schema, all subschemas, and the parts that references name, each with its JSON pointer."""
    waiting, known = [("", schema)], set()
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, Mapping):
            if id(part) in known:
                continue
            known.add(id(part))
        yield path, part
        waiting += [(path + step, inner) for step, inner in parts(part)]
        ref = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(ref, str) and isinstance(target := referred(schema, ref), Mapping):
            waiting.insert(0, (unquote(ref).removeprefix("#"), target))  # last, so that its own path has precedence


def referred(schema: Any, ref: str) -> Any:
    """Return the target of a reference; None if the reference is not a path in the schema, such as an anchor."""
    found = schema
    if not ref.startswith("#"):
        return None
    for key in unquote(ref).removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def escaped(key: str) -> str:
    """Escape a key for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def close_objects(schema: Any) -> None:
    """Disallow additional values in objects, in place, unless the schema defines them: classes ignore these values."""
    for _, part in all_parts(schema):
        if isinstance(part, MutableMapping) and ("properties" in part or "patternProperties" in part):
            part.setdefault("additionalProperties", False)


def close_alone(schema: Any) -> None:
    """Disallow keys that an object's schema does not name, in place, where no other part describes the same object.

    JSON Schema allows such keys unless "additionalProperties" is false, and models then add keys until the reply is cut
    off. llama.cpp and xgrammar disallow them, too. All replies still match the original schema.
    """
    if any(_has_unknown_target(schema, part) for _, part in all_parts(schema)):
        return
    visited = dict[tuple[int, bool], Any]()
    waiting = [(schema, True)]
    while waiting:
        part, is_alone = waiting.pop()
        if not isinstance(part, MutableMapping) or (id(part), is_alone) in visited:
            continue
        visited[id(part), is_alone] = part
        waiting += _described(schema, part, is_alone)
    for (identity, is_alone), part in visited.items():
        if is_alone and (identity, False) not in visited and _is_closable(part):
            part["additionalProperties"] = False


def _has_unknown_target(schema: Any, part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    ref = part.get("$ref")
    has_target = ref is None or (isinstance(ref, str) and referred(schema, ref) is not None)
    return not has_target or not part.keys().isdisjoint({"$dynamicRef", "$recursiveRef"})


def _described(schema: Any, part: Mapping[str, Any], is_alone: bool) -> Iterator[tuple[Any, bool]]:
    """Yield subschemas of a part; each with True if nothing else in the schema describes the same value."""
    in_place = [name for name in _IN_PLACE if name in part]
    # A choice between schemas, or one reference, leaves each of them alone if nothing stands beside it.
    is_alone = is_alone and (not in_place or (len(in_place) == 1 and part.keys() <= {*in_place, *_BESIDE}))
    for name in in_place:
        inner = referred(schema, part[name]) if name == "$ref" else part[name]
        is_choice = name in ("$ref", "anyOf") or (name == "allOf" and isinstance(inner, list) and len(inner) == 1)
        listed = [*inner.values()] if name == "dependentSchemas" and isinstance(inner, Mapping) else inner
        yield from ((one, is_alone and is_choice) for one in (listed if isinstance(listed, list) else [listed]))
    patterns = part.get("patternProperties")
    may_meet = isinstance(patterns, Mapping) and len(patterns) + ("properties" in part) > 1
    for step, inner in parts(part):
        if step.startswith(("/properties/", "/patternProperties/")):
            yield inner, is_alone and not may_meet
        elif step.startswith(("/items", "/prefixItems/", "/additionalProperties", "/additionalItems")):
            yield inner, is_alone


def _is_closable(part: Mapping[str, Any]) -> bool:
    """Return True if an object can have the keys in "properties" only, and the part says nothing else about keys."""
    named, required, least = part.get("properties"), part.get("required", []), part.get("minProperties", 0)
    if not isinstance(named, Mapping) or not part.keys().isdisjoint(_OF_KEYS):
        return False
    is_possible = isinstance(required, list) and all(isinstance(key, str) and key in named for key in required)
    return is_possible and isinstance(least, (int, float)) and least <= len(named)


def old_draft(schema: Any) -> str | None:
    """Return the declared JSON Schema draft if it is older than the supported drafts."""
    known = schema.get("$schema") if isinstance(schema, Mapping) else None
    return known if isinstance(known, str) and _OLD_DRAFT.search(known) else None


def is_cut(pattern: Any) -> bool:
    """Return True if a regular expression ends with a single backslash, which llguidance would ignore."""
    return isinstance(pattern, str) and (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def hold_patterns(schema: Any, refuse: Callable[[str, str, str], Exception]) -> tuple[str, str]:
    """Rewrite all patterns, in place, so that llguidance reads them as ECMA 262 does.

    Args:
        schema: the schema.
        refuse: returns the exception for a pattern that cannot be rewritten, from its location, the pattern and the
            reason.

    Returns:
        A required control character that JSON writes as \\u00XX only, and its location; empty if there is none.
    """
    rare = ("", "")
    for path, part in list(all_parts(schema)):
        if not isinstance(part, MutableMapping):
            continue

        def rewritten(pattern: str, where: str = path) -> Rewritten:
            nonlocal rare
            try:
                found = rewrite(pattern)
            except PatternError as error:
                raise refuse(where, pattern, str(error)) from None
            if found.rare:
                rare = found.rare, where
            return found

        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"], *others = rewritten(pattern).patterns
            if others:
                add_all(part, [{"pattern": other} for other in others])
        if isinstance(named := part.get("patternProperties"), Mapping):
            keys: dict[str, Any] = {}
            part["patternProperties"] = keys
            for key, inner in named.items():
                new = rewritten(key).patterns
                if len(new) > 1:
                    raise refuse(path, key, "a lookahead in patternProperties is not supported")
                keys[new[0]] = {"allOf": [keys[new[0]], inner]} if new[0] in keys else inner
        for value in (part.get("const"), part.get("enum")):
            if control := next((one for text in _texts(value) for one in text if one in RARE), ""):
                rare = control, path
    return rare


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a constant value, without the names in objects, which llguidance always writes alike."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        waiting += one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()


def add_all(part: MutableMapping[str, Any], others: list[Any]) -> None:
    """Add schemas that an instance must match, too."""
    if isinstance(known := part.setdefault("allOf", []), list):
        known += others


def without_additional_items(schema: Any) -> None:
    """Remove "additionalItems" where it has no meaning, in place; llguidance would then ignore "prefixItems"."""
    for _, part in all_parts(schema):
        if isinstance(part, MutableMapping) and "prefixItems" in part and not isinstance(part.get("items"), list):
            part.pop("additionalItems", None)


def hold_times(schema: Any) -> None:
    """Restrict dates, times and durations, in place, to those that exist and that Python can represent."""
    for _, part in list(all_parts(schema)):
        if isinstance(part, MutableMapping) and isinstance(name := part.get("format"), str):
            first, *others = _TIMES.get(name, ("",))
            if first and "pattern" not in part:
                part["pattern"] = first
            elif first:
                others.append(first)
            if others:
                add_all(part, [{"pattern": other} for other in others])


def far_number(schema: Any) -> tuple[str, float] | None:
    """Return the location and value of a number that cannot be enforced in replies; None if there is none.

    This is a bound or another number outside llguidance's range of whole numbers, or a number in "const" or "enum" that
    a float cannot represent. The bounds must already have been moved.
    """
    # Entries: path, keyword, value, True if the value's keys are names of schemas, True if it is in a constant value.
    waiting: list[tuple[str, str, Any, bool, bool]] = [("", "", schema, False, False)]
    while waiting:
        path, name, value, names, fixed = waiting.pop()
        if isinstance(value, Mapping):
            for key, inner in value.items():
                word = "" if names or fixed else key
                fixes = fixed or word in ("const", "enum")
                waiting.append((f"{path}/{escaped(key)}", word, inner, word in _NAMED, fixes))
        elif isinstance(value, list):
            waiting += [(f"{path}/{index}", "", inner, False, fixed) for index, inner in enumerate(value)]
        elif isinstance(value, int if name not in _BOUNDS else (int, float)) and (
            abs(value) > _FARTHEST or (fixed and int(float(value)) != value)
        ):
            return path, value
    return None


def move_bounds(schema: Any) -> None:
    """Replace whole-number bounds that a float cannot represent, and exclusive bounds, with adjacent numbers, in place.

    llguidance 1.9 accepts 2 for "greater than 2" if the other bound is below 3. In merged schemas, the other bound may
    be in another subschema.
    """
    known = [part for _, part in all_parts(schema) if isinstance(part, MutableMapping)]
    for part in known:
        for name, sign in _BOUNDS.items():
            if _is_real(bound := part.get(name)) and sign * bound <= _FARTHEST:
                part[name] = _inward(bound, sign)
    merges = any("allOf" in part or ("$ref" in part and len(part) > 1) for part in known)
    for part in known:
        if part.get("type") != "integer":
            _move(part, "exclusiveMinimum", "minimum", "aximum", 1, merges)
            _move(part, "exclusiveMaximum", "maximum", "inimum", -1, merges)


def _move(part: MutableMapping[str, Any], exclusive: str, inclusive: str, other: str, sign: int, merges: bool) -> None:
    bound = part.get(exclusive)
    if not is_number(bound) or not float(bound).is_integer() or abs(bound) > 2**40:
        return
    if is_number(known := part.get(inclusive)) and sign * known > sign * bound:
        return  # the inclusive bound is stricter
    limits = [part[name] for name in part if name.endswith(other) and is_number(part[name])]
    room = min((sign * (limit - bound) for limit in limits), default=math.inf)
    if merges or 0 < room < 1:
        del part[exclusive]
        part[inclusive] = bound + sign * min(_STEP * max(1.0, abs(bound)), room / 2 if room > 0 else math.inf)


def _inward(bound: float, sign: int) -> float:
    """Return the nearest float on the side of the valid values, because llguidance computes with floats."""
    if sign * bound < -_FARTHEST:
        return -sign * _FARTHEST
    near = float(bound)
    if sign * near < sign * bound:
        near = math.nextafter(near, sign * math.inf)
    return int(near) if isinstance(bound, int) else near


def is_number(value: Any) -> TypeGuard[float]:
    return _is_real(value) and abs(value) < 1e300


def _is_real(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def ends(schema: Any) -> bool:
    """Return True if the schema has a finite instance; some recursive schemas have none."""
    known = {f"#{path}": part for path, part in all_parts(schema)}
    finite = dict.fromkeys(known, False)
    while True:
        found = [ref for ref, part in known.items() if not finite[ref] and _ends(part, finite)]
        finite |= dict.fromkeys(found, True)
        if finite["#"] or not found:
            return finite["#"]


def _ends(schema: Any, finite: Mapping[str, bool]) -> bool:
    """Return True if a schema is known to have a finite instance; schemas not understood are assumed to have one."""
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True
    if isinstance(ref := schema.get("$ref"), str) and not finite.get(ref, True):
        return False
    for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        inner = schema.get(name)
        if isinstance(inner, list) and inner and not enough(_ends(part, finite) for part in inner):
            return False
    types = schema.get("type")
    if types == "object":
        named, required = schema.get("properties"), schema.get("required")
        if isinstance(named, Mapping) and isinstance(required, list):
            return all(_ends(named[key], finite) for key in required if isinstance(key, str) and key in named)
    if types == "array" and is_number(least := schema.get("minItems")) and least > 0:
        return _ends(schema.get("items"), finite)
    return True
