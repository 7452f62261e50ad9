"""Grammar options of a request: a JSON schema, a regular expression, a grammar, or a choice of strings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...errors import GrammarError, kind_of
from .json_schema import (
    close_alone,
    close_objects,
    ends,
    far_number,
    hold_patterns,
    hold_times,
    is_cut,
    move_bounds,
    old_draft,
    without_additional_items,
)
from .schema_depth import depth
from .schema_forms import has_unique_items, hold_forms
from .schema_keys import ONE_FORM, countless_keys, hold_keys, hold_names

# A longer grammar is a mistake or an attack. Each character costs time and memory before the compiler's limits apply.
MOST_CHARACTERS = 2**20
MOST_CHOICES = 10_000
# llguidance recurses from rule to rule and from reference to reference. Each level uses up to 10 KB, and llguidance
# does not check for stack overflow. These limits fit a stack of STACK_BYTES, of which only the used part occupies
# memory.
_MOST_RULES, _MOST_LEVELS, STACK_BYTES = 5_000, 3_000, 2**26
_INNER_SCHEMA = re.compile(r"%json\s*(?=\{)")
# Characters with a special meaning in regular expressions.
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
# Literals, character classes and comments in GBNF; and the escapes in them, with groups for character codes.
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_BLANKS = {9: r"\t", 10: r"\n", 13: r"\r"}
_CODE_IN_CLASS = re.compile(_CODE.pattern + "|[&~]", re.DOTALL)
# The options of SamplingParams that set a grammar; a request may use at most one of them.
OPTIONS = ("json_schema", "regex", "grammar", "choice")
# JSON on one line, in the style of json.dumps: if whitespace is unrestricted, a model may generate it without end. A
# schema can override this style ("x-guidance").
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """The form that the entire text of a reply must match.

    Attributes:
        option: one of OPTIONS, or "tools" (tool calls, or a body after reasoning, in Lark).
        text: the schema as JSON text, the regular expression, the grammar in llguidance's dialect of Lark, or the
            choices as a JSON list.
        blanks: True if JSON may have whitespace anywhere, which is llguidance's default.
        body: the grammar that a Lark grammar references as @body.
        inner: schemas in the grammar, each with its name in messages and its JSON text.
    """

    option: str
    text: str
    blanks: bool = False
    body: Grammar | None = None
    inner: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """The name of the grammar in messages, in the words of the request."""
        if self.option != "tools":
            return f"{self.option} {self.text[:80]!r}"
        names = ", ".join(name for name, _ in self.inner)[:200]
        beside = self.body.shown if self.body is not None else ""
        return " with ".join(part for part in (names, beside) if part) or "the reply format"

    @property
    def source(self) -> str:
        """The grammar in llguidance's format. Raises GrammarError if it is malformed."""
        try:
            return self._source()
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:  # Python reads deeper JSON than llguidance's 128 levels
            raise GrammarError(f"{self.shown} cannot be read", str(error)[:200], "simplify the grammar") from None

    def schema_of_unique_items(self) -> Any:
        """Return the schema if items of its arrays must be compared while the reply is generated; otherwise None."""
        schema = json.loads(self.text) if self.option == "json_schema" and "uniqueItems" in self.text else None
        return schema if has_unique_items(schema) else None

    def _source(self) -> str:
        from llguidance import LLMatcher

        if self.option == "json_schema":
            return LLMatcher.grammar_from_json_schema(self._schema(), defaults=None if self.blanks else JSON_STYLE)  # type: ignore[arg-type]
        if self.option == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.option == "choice":
            # A single regular expression, because llguidance follows at most 2,000 literals of a grammar at a time.
            texts = (_META.sub(r"\\\g<0>", choice) for choice in json.loads(self.text))
            return LLMatcher.grammar_from_regex("|".join(texts))
        if self.body is None:
            lark = _as_lark(self.text)
            if (rules := lark.count(":")) > _MOST_RULES:
                why = f"the grammar has {rules:,} colons, one per rule, but the limit is {_MOST_RULES:,} rules"
                raise GrammarError("the grammar is too large", why, "use fewer rules")
            return LLMatcher.grammar_from_lark(_with_held_values(lark))
        inner = self.body.source
        body = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": self.text}, {**body, "name": "body"}]})

    def _schema(self) -> str:
        """Return the schema to pass to llguidance."""
        schema = json.loads(self.text)
        if (levels := depth(schema)) > _MOST_LEVELS:
            why = (
                f"with its references, the schema may have {levels:,} levels, but the limit is {_MOST_LEVELS:,} levels"
            )
            raise GrammarError("json_schema is too deeply nested", why, "use fewer nested levels")
        if not ends(schema):
            why = "the schema requires itself recursively, so every instance would be infinite"
            raise GrammarError("json_schema has no valid instance", why, "make the recursive part optional")
        hold_values(schema, is_followed=True)
        # `true` and `false` are also schemas, but they cannot hold options.
        return json.dumps(schema if isinstance(schema, Mapping) else {"allOf": [schema]}, ensure_ascii=False)


def hold_values(schema: Any, name: str = "json_schema", *, is_followed: bool = False) -> None:
    """Change a schema, in place, to one that llguidance enforces in full.

    Keywords that llguidance does not read are replaced. Bounds move to numbers that llguidance can represent, times are
    restricted to existing days and seconds, and patterns are rewritten. Objects whose schema names keys have no other
    keys, unless the schema allows them explicitly. If an object has both named and open keys, every key has only one
    form in JSON.

    Args:
        schema: the schema. With the option "lenient" in "x-guidance", requirements of the number of keys remain as they
            are, although llguidance does not enforce them.
        name: name of the schema in messages.
        is_followed: True if `UniqueItems` compares the items of arrays.

    Raises:
        GrammarError: the schema has a number, a pattern or another requirement that cannot be enforced, or an
            unsupported draft.
    """
    if (draft := old_draft(schema)) is not None:
        raise GrammarError(
            f"{name} uses the draft {draft!r:.80}",
            'keywords of drafts before 4, such as "required": true and "divisibleBy", would be ignored',
            "use a later draft, such as https://json-schema.org/draft/2020-12/schema",
        )

    def refuse(where: str, pattern: str, why: str) -> GrammarError:
        place = f"the pattern at {where or 'the top'} of {name}"
        if is_cut(pattern):
            return _backslash(place, pattern)
        return GrammarError(
            f"{place}, {pattern[:80]!r}, cannot be used", why, "write the pattern without it, in the syntax of ECMA 262"
        )

    def refuse_form(what: str, why: str, fix: str) -> GrammarError | None:
        return None if _is_lenient(schema) else GrammarError(f"{what} of {name} cannot be enforced", why, fix)

    close_alone(schema)
    hold_forms(schema, refuse_form, is_followed=is_followed)
    hold_times(schema)
    hold_names(schema)
    rare, where_rare = hold_patterns(schema, refuse)
    if place := hold_keys(schema):
        _hold_one_form(schema, name, place, rare, where_rare)
    without_additional_items(schema)
    move_bounds(schema)
    _check_values(schema, name)


def _is_lenient(schema: Any) -> bool:
    """Return True if a schema is applied as far as possible."""
    style = schema.get("x-guidance") if isinstance(schema, Mapping) else None
    return isinstance(style, Mapping) and bool(style.get("lenient"))


def _hold_one_form(schema: Any, name: str, place: str, rare: str, where_rare: str) -> None:
    """Allow one form in JSON for every text, in place."""
    if rare:
        raise GrammarError(
            f"{name} requires the character {rare!r} at {where_rare or 'the top'}",
            f"JSON writes it as \\u{ord(rare):04x}, and the object at {place} would then allow named keys in other"
            " forms, with values that are not checked",
            'remove the character, or disallow other keys with "additionalProperties": false',
        )
    style = schema.get("x-guidance")
    schema["x-guidance"] = {**(style if isinstance(style, Mapping) else {}), **ONE_FORM}


def _check_values(schema: Any, name: str) -> None:
    if far := far_number(schema):
        where, number = far
        why = "grammars use floats and 64-bit integers, so replies would be checked against a different number"
        raise GrammarError(
            f"{name} has the number {number!r:.80} at {where}", why, "remove the number, or use a string"
        )
    if not _is_lenient(schema) and (place := countless_keys(schema)):
        raise GrammarError(
            f"{name} has a minimum of keys at {place} that cannot be enforced",
            "a reply may repeat a key, and repeated keys count as one",
            'name the keys in "required", or lower the minimum to the number of required keys plus 1',
        )


def _with_held_values(lark: str) -> str:
    """Apply `hold_values` to the schemas in a Lark grammar; invalid JSON is left to the compiler."""
    written, end = [], 0
    for found in _INNER_SCHEMA.finditer(lark):
        if found.end() >= end:
            try:
                schema, after = json.JSONDecoder().raw_decode(lark, found.end())
                before = json.dumps(schema)
            except (ValueError, RecursionError):
                continue
            with suppress(RecursionError):
                hold_values(schema)
                if json.dumps(schema) != before:
                    written += [lark[end : found.end()], json.dumps(schema, ensure_ascii=False)]
                    end = after
    return "".join([*written, lark[end:]])


def _as_lark(text: str) -> str:
    """Convert a GBNF grammar (recognised by `::=`) to Lark; return a Lark grammar unchanged."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(_GBNF_PART.sub(_without_codes, text))
    except (Exception, RecursionError) as error:
        raise GrammarError(
            "the grammar is not GBNF",
            str(error)[:300] or type(error).__name__,
            "correct the grammar, or write it in Lark",
        ) from None


def _without_codes(part: re.Match[str]) -> str:
    """Replace character codes in a GBNF literal or class with the characters, because the converter corrupts codes.

    In a class, characters with a special meaning remain codes, and `&` and `~`, which are special in Lark, become
    codes.
    """
    text, is_class = part[0], part[0].startswith("[")

    def shown(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        number = ord(found[0]) if len(found[0]) == 1 else int(code, 16) if code else -1
        if number in _BLANKS:
            return _BLANKS[number]
        if not 32 <= number <= 0x10FFFF or 0x7F <= number < 0xA0 or 0xD800 <= number <= 0xDFFF:
            return found[0]
        if is_class and number < 127:
            return f"\\x{number:02x}"
        return f"\\{chr(number)}" if chr(number) in '"\\' else chr(number)

    return text if text.startswith("#") else (_CODE_IN_CLASS if is_class else _CODE).sub(shown, text)


def joined_options(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of options; a grammar in the second set replaces any grammar in the first."""
    if any(name in own for name in OPTIONS):
        given = {name: value for name, value in given.items() if name not in OPTIONS}
    return {**given, **own}


# --- checks of the options, see option_rules.Check ---------------------------------------------------------------


def schema_text(name: str, value: Any) -> str | None:
    """Convert a JSON schema to JSON text; accepts JSON text, JSON values and Pydantic models."""
    if value is None:
        return None
    if callable(make := getattr(value, "model_json_schema", None)):
        value = _schema_of(name, value, make)
        close_objects(value)
    if not isinstance(value, (str, Mapping, bool)):
        raise GrammarError(
            f"{name} is {kind_of(value)}",
            "a schema must be a JSON object (a dictionary or a string) or a Pydantic model",
            "pass a schema in one of these forms",
        )
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"{name} is not JSON", str(error)[:200], "pass the schema as JSON") from None
    if not isinstance(parsed, (Mapping, bool)):
        raise GrammarError(
            f"{name} = {text[:80]} is not a schema",
            "a schema must be a JSON object, true or false",
            'pass a schema such as {"type": "object"}',
        )
    return _limited(name, text)


def _schema_of(name: str, model: Any, make: Callable[[], Any]) -> Any:
    """Return the schema of a class; convert any error that the class raises to a GrammarError."""
    try:
        return make()
    except Exception as error:
        shown = getattr(model, "__name__", type(model).__name__)
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise GrammarError(
            f"{name}: the class {shown:.80} has no JSON schema",
            why,
            "remove fields that JSON cannot represent, or pass a schema",
        ) from error


def expression(name: str, value: Any) -> str | None:
    """Check a regular expression."""
    text = source_text(name, value)
    if text is not None and is_cut(text):
        raise _backslash(name, text)
    return text


def _backslash(name: str, pattern: str) -> GrammarError:
    return GrammarError(
        f"{name}, {pattern[-80:]!r}, ends with a backslash",
        "the character to escape is missing",
        "to match a backslash, write two backslashes",
    )


def source_text(name: str, value: Any) -> str | None:
    """Check the text of a regular expression or a grammar."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        shown = f"{name} = {value!r:.80}" if isinstance(value, str) else f"{name} is {kind_of(value)}"
        raise GrammarError(shown, "expected: a non-empty string", "pass the text of the grammar")
    return _limited(name, value)


def choices(name: str, value: Any) -> tuple[str, ...]:
    """Check the choices for a reply."""
    if value is None or value == ():
        return ()
    valid = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not valid or not all(isinstance(text, str) and text for text in value) or not 0 < len(value) <= MOST_CHOICES:
        raise GrammarError(
            f"{name} is not a list of strings", f"expected: 1 to {MOST_CHOICES:,} non-empty strings",
            'pass a list such as ["yes", "no"]',
        )  # fmt: skip
    _limited(name, "".join(value))
    return tuple(dict.fromkeys(value))


def _limited(name: str, text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise GrammarError(
            f"{name} has {len(text):,} characters", f"the limit is {MOST_CHARACTERS:,} characters", "shorten the text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"{name} has an unpaired surrogate at position {error.start}",
            "the text must be valid Unicode",
            "remove the surrogate",
        ) from None
    return text


def contradictions(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield pairs of options that contradict each other because of a grammar, with the reason and the fix."""
    given = [name for name in OPTIONS if options[name] != defaults[name]]
    if len(given) > 1:
        yield given[0], given[1], "a reply can match only one grammar", "remove one of the two options"
    if given and options["ignore_eos"]:
        yield given[0], "ignore_eos = True", "the reply ends where the grammar ends", "remove ignore_eos"
