"""What a reply must match, as a request says it: a JSON schema, an expression, a grammar, or one of some texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...errors import GrammarError, kind_of
from .json_schema import close_objects, cut_pattern, ends, far_number, hold_days, is_cut, move_bounds, old_draft
from .schema_depth import depth

# Longer ones are a mistake, or an attack: every character takes time and memory before a limit of the compiler counts.
MOST_CHARACTERS = 2**20
MOST_CHOICES = 10_000
# llguidance recurses from rule to rule, and from reference to reference, with up to 10 KB each, and nothing checks the
# stack's end: these fit a stack of STACK_BYTES, of which only what is used takes memory.
_MOST_RULES, _MOST_LEVELS, STACK_BYTES = 5_000, 3_000, 2**26
_INNER_SCHEMA = re.compile(r"%json\s*(?=\{)")
# Characters that regular expressions do not take for themselves.
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
# Literals, classes of characters and comments of GBNF; escapes in them, of which codes have groups.
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_BLANKS = {9: r"\t", 10: r"\n", 13: r"\r"}
_CODE_IN_CLASS = re.compile(_CODE.pattern + "|[&~]", re.DOTALL)
# The options of SamplingParams that say it; a request has at most one of them.
OPTIONS = ("json_schema", "regex", "grammar", "choice")
# On one line, as json.dumps writes it: where blanks are free, a model may write them without end. A schema can ask for
# something else ("x-guidance").
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """What the text of a reply must match, as a whole.

    Attributes:
        option: which of OPTIONS says it, or "tools": calls of tools, or a body behind reasoning, in Lark.
        text: the schema as JSON text, the regular expression, the grammar in llguidance's dialect of Lark, or the
            choices as a JSON list.
        blanks: whether JSON may have blanks anywhere, as llguidance has it by itself.
        body: what a grammar in Lark calls @body.
        inner: schemas that it holds, as JSON text, each with what messages call it.
    """

    option: str
    text: str
    blanks: bool = False
    body: Grammar | None = None
    inner: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """What messages call it: what the request says, not what is made of that."""
        if self.option != "tools":
            return f"{self.option} {self.text[:80]!r}"
        names = ", ".join(name for name, _ in self.inner)[:200]
        beside = self.body.shown if self.body is not None else ""
        return " with ".join(part for part in (names, beside) if part) or "the form of the reply"

    @property
    def source(self) -> str:
        """As llguidance takes it. Raises GrammarError: it is not of its kind."""
        try:
            return self._source()
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:  # JSON that Python reads and llguidance does not: 128 levels deep
            raise GrammarError(f"{self.shown} cannot be read", str(error)[:200], "make it simpler") from None

    def _source(self) -> str:
        from llguidance import LLMatcher

        if self.option == "json_schema":
            return LLMatcher.grammar_from_json_schema(self._schema(), defaults=None if self.blanks else JSON_STYLE)  # type: ignore[arg-type]
        if self.option == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.option == "choice":
            # As one expression: of texts that are symbols of a grammar, llguidance follows at most 2,000 at once.
            texts = (_META.sub(r"\\\g<0>", choice) for choice in json.loads(self.text))
            return LLMatcher.grammar_from_regex("|".join(texts))
        if self.body is None:
            lark = _as_lark(self.text)
            if (rules := lark.count(":")) > _MOST_RULES:
                why = f"it has {rules:,} colons, and each rule has one; at most {_MOST_RULES:,} are compiled"
                raise GrammarError("the grammar is too large", why, "make it simpler")
            return LLMatcher.grammar_from_lark(_with_held_numbers(lark))
        inner = self.body.source
        body = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": self.text}, {**body, "name": "body"}]})

    def _schema(self) -> str:
        """The schema as it is given to llguidance."""
        schema = json.loads(self.text)
        if (levels := depth(schema)) > _MOST_LEVELS:
            why = (
                f"with its references followed it may be {levels:,} levels deep; at most {_MOST_LEVELS:,} are compiled"
            )
            raise GrammarError("json_schema is too deep", why, "make it simpler")
        if not ends(schema):
            why = "an instance of it would hold another one, and that another one, without end"
            raise GrammarError("nothing is an instance of json_schema", why, "let what refers to itself be optional")
        hold_values(schema)
        # True and false are schemas, too, but hold no options.
        return json.dumps(schema if isinstance(schema, Mapping) else {"allOf": [schema]}, ensure_ascii=False)


def hold_values(schema: Any, name: str = "json_schema") -> None:
    """Move the bounds of a schema, in place, to numbers that replies are held to, and let dates be days that there are.

    Args:
        name: of the schema, for messages.

    Raises:
        GrammarError: what they could not be held to: a number, an expression, or a draft that is not understood.
    """
    if (draft := old_draft(schema)) is not None:
        raise GrammarError(
            f"{name} is of the draft {draft!r:.80}",
            "words of drafts before 4 would be left out: there, a text may be required, and numbers divisible",
            "write it in a later draft, such as https://json-schema.org/draft/2020-12/schema",
        )
    if cut := cut_pattern(schema):
        raise _backslash(f"the pattern at {cut[0] or 'the top'} of {name}", cut[1])
    hold_days(schema)
    move_bounds(schema)
    if far := far_number(schema):
        where, number = far
        why = "replies would be held to another one: grammars compute with floats, and with whole numbers of 64 bits"
        raise GrammarError(f"{name} has the number {number!r:.80} at {where}", why, "leave it out, or ask for a text")


def _with_held_numbers(lark: str) -> str:
    """A grammar in Lark, with `hold_values` of the schemas inside; what is no JSON is left to the compiler."""
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
    """A grammar in Lark, converted if it is GBNF: only that has `::=`."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(_GBNF_PART.sub(_without_codes, text))
    except (Exception, RecursionError) as error:
        raise GrammarError(
            "the grammar is not GBNF", str(error)[:300] or type(error).__name__, "correct it, or write it in Lark"
        ) from None


def _without_codes(part: re.Match[str]) -> str:
    """A literal or a class of GBNF, with characters in the place of their codes: the converter spoils codes.

    In a class, what would mean something there is left as a code, and `&` and `~`, which do in Lark, become one.
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
    """Options, and those that replace them: a grammar replaces any other one."""
    if any(name in own for name in OPTIONS):
        given = {name: value for name, value in given.items() if name not in OPTIONS}
    return {**given, **own}


# --- checks of the options, see option_rules.Check ---------------------------------------------------------------


def schema_text(name: str, value: Any) -> str | None:
    """A JSON schema as JSON text: from such text, from what JSON can write, or from a Pydantic model."""
    if value is None:
        return None
    if callable(make := getattr(value, "model_json_schema", None)):
        value = _schema_of(name, value, make)
        close_objects(value)
    if not isinstance(value, (str, Mapping, bool)):
        raise GrammarError(
            f"{name} is {kind_of(value)}",
            "a schema is a JSON object, as a dictionary or as text, or a Pydantic model",
            "pass one of these",
        )
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"{name} is not JSON", str(error)[:200], "write the schema as JSON") from None
    if not isinstance(parsed, (Mapping, bool)):
        raise GrammarError(
            f"{name} = {text[:80]} is no schema", "a schema is an object, true or false", 'such as {"type": "object"}'
        )
    return _limited(name, text)


def _schema_of(name: str, model: Any, make: Callable[[], Any]) -> Any:
    """What a class says its schema is; whatever it raises, there is none."""
    try:
        return make()
    except Exception as error:
        shown = getattr(model, "__name__", type(model).__name__)
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise GrammarError(
            f"{name}: the class {shown:.80} has no JSON schema", why, "leave out what JSON cannot say, or pass a schema"
        ) from error


def expression(name: str, value: Any) -> str | None:
    """A regular expression."""
    text = source_text(name, value)
    if text is not None and is_cut(text):
        raise _backslash(name, text)
    return text


def _backslash(name: str, pattern: str) -> GrammarError:
    return GrammarError(
        f"{name}, {pattern[-80:]!r}, ends with a backslash",
        "what it stands before is missing",
        "write two of them for the character itself",
    )


def source_text(name: str, value: Any) -> str | None:
    """A regular expression or a grammar."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        shown = f"{name} = {value!r:.80}" if isinstance(value, str) else f"{name} is {kind_of(value)}"
        raise GrammarError(shown, "a text that is not empty is expected", "pass its source")
    return _limited(name, value)


def choices(name: str, value: Any) -> tuple[str, ...]:
    """The texts of which the reply is one."""
    if value is None or value == ():
        return ()
    valid = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not valid or not all(isinstance(text, str) and text for text in value) or not 0 < len(value) <= MOST_CHOICES:
        raise GrammarError(
            f"{name} is not a list of texts", f"a list of 1 to {MOST_CHOICES:,} texts, none of them empty, is expected",
            'such as ["yes", "no"]',
        )  # fmt: skip
    _limited(name, "".join(value))
    return tuple(dict.fromkeys(value))


def _limited(name: str, text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise GrammarError(
            f"{name} has {len(text):,} characters", f"at most {MOST_CHARACTERS:,} are compiled", "make it smaller"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"{name} has half a surrogate pair at position {error.start}", "it is not valid Unicode", "remove it"
        ) from None
    return text


def contradictions(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Options that cannot be obeyed beside a grammar, as option_rules says them: two, why, and what to do."""
    given = [name for name in OPTIONS if options[name] != defaults[name]]
    if len(given) > 1:
        yield given[0], given[1], "a reply matches one grammar", "leave one of them out"
    if given and options["ignore_eos"]:
        yield given[0], "ignore_eos = True", "the end of a grammar is the end of the reply", "leave ignore_eos out"
