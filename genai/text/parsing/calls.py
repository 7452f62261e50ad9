"""Grammars for replies with tool calls, in llguidance's Lark dialect, for the formats that the parsers read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import GrammarError
from .xml_values import properties_of, strings_of, types_of

# Maximum number of calls in a reply. Without a limit, a small model may repeat calls forever.
MOST_CALLS = 16


@dataclass(frozen=True)
class ParameterFormat:
    """The text around the parameters of calls in XML.

    Attributes:
        before_name: text before the name of a parameter.
        before_value: text between the name and the value.
        after: text after the value. White space before the first marker is optional after a string.
    """

    before_name: str
    before_value: str
    after: str


@dataclass(frozen=True)
class CallFormat:
    """The text around the names and arguments of calls, as chat templates write it.

    Attributes:
        opening: the start of the first call; text before the call does not contain it.
        start: text after `opening`, before all calls.
        end: text after all calls.
        before_name: text before a call's name.
        before_arguments: text between a call's name and its arguments.
        after: text after a call's arguments.
        between: text between two calls.
        is_alone: True if calls are the whole reply, without text before them.
        thought: opening and closing marker of reasoning before the reply, if the format has it.
        is_free: True if a reply without calls is plain text.
        before_number: text between a call's name and its number; "" if calls have no numbers.
        parameters: the format of parameters in XML; None if the arguments of a call are JSON.
    """

    opening: str
    before_name: str
    before_arguments: str
    after: str
    between: str
    start: str = ""
    end: str = ""
    is_alone: bool = False
    thought: tuple[str, str] | None = None
    is_free: bool = True
    before_number: str = ""
    parameters: ParameterFormat | None = None


@dataclass(frozen=True)
class CalledTool:
    """A tool that a reply may call: its name, and the schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


_TERMINALS = """
TEXT: /(.|\\n)+/
ANY_TEXT: /(.|\\n)*/
BREAKS: /\\n{0,3}/
NUMBER: /[0-9]{1,3}/
KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/
"""
# Keywords that constrain strings, and that cannot be enforced in XML.
_STRING_RULES = ("pattern", "format", "minLength", "maxLength", "allOf")


class ReplyGrammar:
    """Writes the grammar of a reply.

    Args:
        special: ids of the markers that are special tokens; all other markers are text.
        thought: opening and closing marker of reasoning before the reply, if the format has it.
        is_thinking: True if the prompt has already opened the reasoning.
    """

    def __init__(
        self, special: Mapping[str, int], thought: tuple[str, str] | None = None, *, is_thinking: bool = False
    ) -> None:
        self._special, self._thought, self._is_thinking = special, thought, is_thinking

    def of_body(self) -> str:
        """Return the grammar of reasoning followed by the grammar `body`."""
        return self._whole("@body", "")

    def of_calls(
        self,
        call_format: CallFormat,
        tools: Sequence[CalledTool],
        *,
        most: int,
        is_free: bool = False,
        body: bool = False,
    ) -> str:
        """Return the grammar of a reply with tool calls.

        Args:
            call_format: the format of the calls.
            tools: the tools that may be called.
            most: maximum number of calls.
            is_free: True if the reply may be text (or the grammar `body`) instead of calls.
            body: True if there is a grammar `body`.
        """
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        rules = [f"call: {names}"]
        for index, tool in enumerate(tools):
            name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
            head = self._literal(call_format.before_name + name + call_format.before_number)
            if call_format.before_number:
                head += " NUMBER"
            if call_format.parameters is None:
                arguments = f"%json {json.dumps(tool.schema, ensure_ascii=False)}"
            else:
                arguments = self._parameters(call_format.parameters, tool, f"value_{index}", rules)
            before, after = self._literal(call_format.before_arguments), self._literal(call_format.after)
            rules.append(f"call_{index}: {head} {before} {arguments} {after}")
        if call_format.parameters is not None:
            rules.append(self._text_value(call_format.parameters))
        more = f"({self._literal(call_format.between)} call){{0,{most - 1}}}" if most > 1 else ""
        rules.append(f"calls: {self._literal(call_format.start)} call {more} {self._literal(call_format.end)}")
        opening = self._literal(call_format.opening)
        if not is_free:
            rules.append(f"reply: {opening} calls")
        elif body:
            rules.append(f"reply: @body | {opening} calls")
        elif call_format.is_alone:
            first = re.escape(call_format.opening[0])
            rules += [f"reply: ANSWER? | {opening} calls", f"ANSWER: /[^{first}](.|\\n)*/"]
        elif any(call_format.opening.startswith(marker) for marker in self._special):
            rules.append(f"reply: TEXT? ({opening} calls)?")
        else:
            rules += ["reply: TEXT? | head calls", f"head[lazy]: ANY_TEXT {opening}"]
        return self._whole("reply", "\n".join(rules))

    def _parameters(self, form: ParameterFormat, tool: CalledTool, name: str, rules: list[str]) -> str:
        """Return the expression of a call's parameters, in the order of the schema, and append their rules."""
        properties, required = properties_of(tool.schema), tool.schema.get("required")
        parts = []
        for index, (key, part) in enumerate(properties.items()):
            if part is False:
                continue
            if not key.strip() or any(one in key for one in "<>\n\"'") or key != key.strip():
                raise GrammarError(
                    f"the parameter {key!r:.80} of tool {tool.name!r:.80}",
                    "this model writes names of parameters in XML, which cannot have quotes, brackets or line breaks",
                    "rename the parameter",
                )
            before = self._literal(form.before_name + key + form.before_value)
            rules.append(f"{name}_{index}: {before} {self._value(form, tool, key, part)}")
            is_required = isinstance(required, list) and key in required
            parts.append(f"{name}_{index}{'' if is_required else '?'}")
        if not properties and tool.schema.get("additionalProperties") is not False:
            before, after = self._literal(form.before_name), self._literal(form.before_value)
            parts.append(f"({before} KEY {after} text_value){{0,{MOST_CALLS}}}")
        return " ".join(parts)

    def _value(self, form: ParameterFormat, tool: CalledTool, key: str, part: Any) -> str:
        """Return the expression of a value and the text after it."""
        types = types_of(part, tool.schema)
        texts = [text for text in strings_of(part, tool.schema) or () if form.after.strip() not in text]
        if types == {"string"} and texts:
            after = self._literal(form.after)
            return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {after}"
        style = tool.schema.get("x-guidance")
        is_lenient = not isinstance(style, Mapping) or style.get("lenient") is not False
        rule = next((name for name in _STRING_RULES if isinstance(part, Mapping) and name in part), "")
        if not types or "string" in types:
            if rule and not is_lenient:
                raise GrammarError(
                    f"{rule!r} of the parameter {key!r:.80} of tool {tool.name!r:.80} cannot be enforced",
                    "this model writes texts in XML, and the grammar of XML values has no rules for texts",
                    'remove the keyword, or "strict": true',
                )
            return "text_value"
        about = {name: tool.schema[name] for name in ("$defs", "definitions", "x-guidance") if name in tool.schema}
        schema = {**(part if isinstance(part, Mapping) else {}), **about}
        return f"%json {json.dumps(schema, ensure_ascii=False)} {self._literal(form.after)}"

    def _text_value(self, form: ParameterFormat) -> str:
        """Return the rule of a text up to the text after a value."""
        after = form.after.lstrip("\n")
        if any(after.startswith(marker) for marker in self._special):
            return f"text_value: TEXT? {self._literal(after)}"
        marker, end = after.rstrip("\n"), "\n" * after.count("\n")
        return f"text_value: text_end {self._literal(end)}\ntext_end[lazy]: ANY_TEXT {self._literal(marker)}"

    def _whole(self, reply: str, rules: str) -> str:
        thought = ""
        if self._thought is not None:
            opening, closing = self._thought
            if any(marker in closing for marker in self._special):
                rules += f"\nthought: TEXT? {self._literal(closing)} BREAKS"
            else:
                rules += f"\nthought: thought_end BREAKS\nthought_end[lazy]: ANY_TEXT {self._literal(closing)}"
            thought = "thought" if self._is_thinking else f"({self._literal(opening)} thought)?"
        return f"start: {thought} {reply}\n{rules}\n{_TERMINALS}"

    def _literal(self, text: str) -> str:
        """Return a text as an expression of a rule, with ids in place of markers that are special tokens."""
        if not text:
            return ""
        markers = sorted((marker for marker in self._special if marker in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )
