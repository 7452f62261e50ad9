"""Keys of objects in JSON schemas: changes to schemas whose keys llguidance would not apply as JSON Schema does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any

from .ecma_regex import PatternError, found_by_any_engine, rewrite
from .json_schema import all_parts, is_number

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance's option for the escapes in JSON texts. Without \uXXXX, every text has exactly one form in JSON.
ONE_FORM = {"json_allowed_escapes": 'nrbtf\\"', "json_allow_general_unicode_escapes": False}
# A quantifier without an upper bound in a rewritten pattern. Such a pattern matches any number of keys.
_ENDLESS = re.compile(r"(?<!\\)(?:\\\\)*(?:[*+]|,\})")

# The number of characters above which a subschema is not copied, because copies in copies multiply. Shorter ones are
# copied, because llguidance refuses references to schemas without instances, but not the schemas themselves.
_LONG = 2000


def hold_names(schema: Any) -> None:
    """Apply patterns of keys, in place, to keys that a schema names where llguidance does not apply them.

    JSON Schema applies to a named key its own schema and the schemas of all patterns that match the key. llguidance
    merges these schemas itself. This function handles two exceptions:

    - A pattern may match named keys only, such as "^a$" beside the property "a". llguidance excludes named keys from
      patterns, so that no key remains, but nevertheless allows the comma before such a key. The pattern is replaced
      with the keys that it matches. They can be named in any subschema, because subschemas can be merged.
    - Engines may differ on whether a pattern matches a named key. The key must then match both schemas.
    """
    known = [part for _, part in all_parts(schema) if isinstance(part, MutableMapping)]
    names = dict.fromkeys(name for part in known for name in _named(part))
    for part in known:
        if isinstance(patterns := part.get("patternProperties"), MutableMapping):
            for pattern in list(patterns):
                _hold_pattern(schema, part, pattern, names)


def _named(part: Mapping[str, Any]) -> list[str]:
    """Return the keys that an object schema names."""
    named, required = part.get("properties"), part.get("required")
    return [
        *(named if isinstance(named, Mapping) else ()),
        *(key for key in (required if isinstance(required, list) else ()) if isinstance(key, str)),
    ]


def _hold_pattern(schema: Any, part: MutableMapping[str, Any], pattern: str, names: Iterable[str]) -> None:
    try:
        written = rewrite(pattern).patterns
    except PatternError:
        return  # `hold_patterns` reports it
    if len(written) > 1 or not isinstance(part.get("properties", {}), MutableMapping):
        return
    inner, keys = part["patternProperties"][pattern], []
    if "$" in written[0] and not _ENDLESS.search(written[0]):
        keys = _matching(written[0], names)
        if keys and not _matches_others(written[0], keys):
            del part["patternProperties"][pattern]
            for key, one in zip(keys, _copies(schema, inner, len(keys)), strict=True):
                _add(part, key, one, True)
    unlike = [key for key in found_by_any_engine(pattern, _named(part)) if key not in keys]
    matched = _matching(written[0], unlike)
    for key in dict.fromkeys(unlike):
        if key not in matched:
            _add(part, key, inner, part.get("additionalProperties", True))


def _add(part: MutableMapping[str, Any], key: str, inner: Any, otherwise: Any) -> None:
    """Apply a schema to a key in addition to the key's own schema, which is `otherwise` if the key has none."""
    named = part.setdefault("properties", {})
    own = named.get(key, otherwise)
    named[key] = inner if own is True else {"allOf": [own, inner]}


def _copies(schema: MutableMapping[str, Any], inner: Any, count: int) -> list[Any]:
    """Return a subschema for several places. A long subschema becomes a definition, so that it is written once."""
    definitions = schema.setdefault("$defs", {}) if count > 1 and count * len(json.dumps(inner)) > _LONG else None
    if not isinstance(definitions, MutableMapping):
        return [inner] * count
    name = next(name for number in range(len(definitions) + 1) if (name := f"keys{number}") not in definitions)
    definitions[name] = inner
    return [{"$ref": f"#/$defs/{name}"}] * count


def _matching(pattern: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that llguidance matches with a rewritten pattern."""
    matcher = _object({"patternProperties": {pattern: {"const": 1}}}) if keys else None
    if matcher is None or matcher.is_error():
        return []
    texts = {key: list(f"{{{json.dumps(key, ensure_ascii=False)}".encode()) for key in keys}
    return [key for key, text in texts.items() if matcher.validate_tokens(text) == len(text)]


def _matches_others(pattern: str, keys: Iterable[str]) -> bool:
    """Return True if llguidance matches further keys with a rewritten pattern, or if it cannot determine it."""
    named = {"properties": dict.fromkeys(keys, False), "patternProperties": {pattern: {"const": 1}}}
    matcher = _object({**named, "x-guidance": {**ONE_FORM, "whitespace_flexible": False}})
    if matcher.is_error() or not matcher.consume_token(ord("{")):
        return True
    matcher.compute_bitmask()
    return not (matcher.is_error() and "NoExtension" in matcher.get_error())


def _object(schema: Mapping[str, Any]) -> LLMatcher:
    """Return a matcher for an object with one key of the patterns or more; its tokens are bytes."""
    from llguidance import LLMatcher

    schema = {"type": "object", "additionalProperties": False, "minProperties": 1, **schema}
    return LLMatcher(_byte_tokens(), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)


@cache
def _byte_tokens() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def hold_keys(schema: Any) -> str | None:
    """Return the location of an object whose keys are partly named and partly open; None if there is none.

    A named key is recognised by its JSON text, so a key must not have several texts, such as "a" and "\\u0061".
    """
    for path, part in all_parts(schema):
        if isinstance(part, Mapping) and _is_object(part):
            named, patterns, is_open = bool(part.get("properties") or part.get("required")), *_open_keys(part)
            if named + patterns + is_open > 1:
                return path or "the top"
    return None


def countless_keys(schema: Any) -> str | None:
    """Return the location of a minimum of keys that would also count repeated keys; None if there is none."""
    for path, part in all_parts(schema):
        if isinstance(part, Mapping) and _is_object(part) and is_number(least := part.get("minProperties")):
            required = part.get("required")
            fixed = len(set(map(str, required))) if isinstance(required, list) else 0
            if least - fixed > 1 and any(_open_keys(part)):
                return f"{path}/minProperties"
    return None


def _is_object(part: Mapping[str, Any]) -> bool:
    types = part.get("type", "object")
    return types == "object" or (isinstance(types, list) and "object" in types)


def _open_keys(part: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return True if keys of an object may match patterns, and if keys without a name or a pattern are allowed."""
    return bool(part.get("patternProperties")), part.get("additionalProperties") is not False
