"""Values of tool calls in XML: texts that become JSON values according to the tool's schema."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.sampling.json_schema import referred
from .events import decode_json
from .source import JsonScanner

_MOST_LEVELS = 20
# Other names for types that tools use.
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "list": "array", "none": "null",
}  # fmt: skip
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def parameters_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return the schema of the parameters of each tool, by the tool's name. Malformed tools are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the named parameters of a tool, each with its schema."""
    root: Any = parameters
    for _ in range(_MOST_LEVELS):
        if isinstance(root, Mapping) and "properties" not in root and isinstance(ref := root.get("$ref"), str):
            root = referred(parameters, ref)
    properties = root.get("properties") if isinstance(root, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], level: int = 0) -> frozenset[str]:
    """Return the types of JSON values that a schema may allow; empty if they are not known."""
    if not isinstance(schema, Mapping) or level > _MOST_LEVELS:
        return frozenset()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    found: set[str] = set()
    if isinstance(kinds, list):
        found = {_ALIASES.get(kind.lower(), kind.lower()) for kind in kinds if isinstance(kind, str)}
    elif "const" in schema:
        found = {_type(schema["const"])}
    elif isinstance(values := schema.get("enum"), list):
        found = {_type(value) for value in values}
    elif isinstance(ref := schema.get("$ref"), str):
        found = set(types_of(referred(root, ref), root, level + 1))
    elif isinstance(parts := schema.get("anyOf", schema.get("oneOf")), list):
        each = [types_of(part, root, level + 1) for part in parts]
        found = set() if frozenset() in each else {kind for kinds in each for kind in kinds}
    elif isinstance(parts := schema.get("allOf"), list):
        found = set(next(filter(None, (types_of(part, root, level + 1) for part in parts)), ()))
    if found and schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def strings_of(schema: Any, root: Mapping[str, Any], level: int = 0) -> list[str] | None:
    """Return the strings that a schema lists; None if it lists no values."""
    if not isinstance(schema, Mapping) or level > _MOST_LEVELS:
        return None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None
    ref = schema.get("$ref")
    return strings_of(referred(root, ref), root, level + 1) if isinstance(ref, str) else None


def value_of(text: str, types: frozenset[str]) -> Any:
    """Return the value that the text of a parameter stands for.

    A text whose parameter is a string stays as it is, also "12" and "null". For other types, the text is JSON, or a
    constant or a literal in the syntax of Python. Without a type, a text that is not JSON is a string. A text that does
    not match its type is returned as a string.
    """
    if types == {"string"}:
        return text
    if text.strip().lower() in ("null", "none") and ("null" in types or "string" not in types):
        return None
    for read in (_json, _constant, _literal):
        if types or read is _json:
            try:
                value = read(text.strip(), types)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            if not types and not isinstance(value, str):
                return value
            if (kind := _type(value)) in types or (kind == "integer" and "number" in types):
                return value
            if kind == "number" and "integer" in types and value.is_integer():
                return int(value)
    return text


def _json(text: str, types: frozenset[str]) -> Any:
    return decode_json(text)


def _constant(text: str, types: frozenset[str]) -> Any:
    if types == {"boolean"} and text in ("0", "1"):
        return text == "1"
    return _CONSTANTS.get(text.lower(), text)


def _literal(text: str, types: frozenset[str]) -> Any:
    if not types & {"object", "array"}:
        return text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = ast.literal_eval(text)
    return decode_json(json.dumps(value, allow_nan=False))


def is_cut(text: str, types: frozenset[str]) -> bool:
    """Return True if a text is the start of an object or an array, which a marker in one of its strings interrupts."""
    scanner = JsonScanner()
    if not types or types - {"object", "array", "null"} or not text.lstrip().startswith(("{", "[")):
        return False
    scanner.feed(text.lstrip())
    return scanner.is_in_string and not scanner.problem


def _type(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", type(None): "null"}
    return kinds.get(type(value), "object")
