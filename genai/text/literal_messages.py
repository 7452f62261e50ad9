"""Marks special tokens in the texts of a conversation, so that they remain ordinary text in the prompt.

Every text that a template receives can hold special tokens: contents, results and arguments of tools, definitions of
tools, and variables such as documents. Roles and types are part of the conversation's structure and stay unchanged.

Templates can take texts apart. So a conversation with marks is rendered again with two characters for each mark, and
with each mark moved by one character. If these prompts differ in more than the marks, the template cut, counted or
escaped a text. Templates also look for markers such as "</think>" in the messages of an assistant, so the prompt is
compared with a rendering without marks in these messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ChatTemplateError, InputError
from .literal import MarkedText, Marker, free_mark
from .template_messages import REASONING_NAMES

ASSISTANT = "assistant"
_FLAG = "literal"


@dataclass(frozen=True)
class LiteralFlags:
    """Which texts of a message are literal.

    Attributes:
        message: True for the texts of the message, except its parts.
        parts: one value per part of the content.
    """

    message: bool
    parts: tuple[bool, ...] = ()

    @property
    def any(self) -> bool:
        """True if a text of the message is literal."""
        return self.message or any(self.parts)


def take_flags(messages: Sequence[dict[str, Any]], default: bool) -> list[LiteralFlags]:
    """Remove the key "literal" from messages and parts, and return its values.

    Raises:
        InputError: a value is not a boolean.
    """
    return [_flags_of(message, default, f"messages[{index}]") for index, message in enumerate(messages)]


def _flags_of(message: dict[str, Any], default: bool, where: str) -> LiteralFlags:
    own = _taken(message, default, where)
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return LiteralFlags(own, tuple(_taken(part, own, f"{where}.content[{at}]") for at, part in enumerate(parts)))


def _taken(fields: dict[str, Any], default: bool, where: str) -> bool:
    value = fields.pop(_FLAG, None)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(
            f"{where} has {_FLAG!r}: {value!r:.40}",
            "true or false is expected: true if special tokens in the text are ordinary text",
            f"set {_FLAG!r} to true or false, or remove the key",
        )
    return value


@dataclass(frozen=True)
class ControlNames:
    """The names of control tokens.

    Attributes:
        special: those of every text.
        written: these, and the other added tokens that the template writes.
    """

    special: frozenset[str]
    written: frozenset[str]


class ConversationMarker:
    """Puts marks into the texts of a conversation.

    Args:
        names: the names of the control tokens.
        known: texts in which the mark must not occur.
    """

    def __init__(self, names: ControlNames, known: Sequence[str]) -> None:
        self.mark, self.control = free_mark(known), names.written
        self._any = Marker(names.written, self.mark)
        # The template may look for the tokens that it writes, such as "</think>", in the replies of the model.
        self._replies = Marker(names.special, self.mark)

    def messages(self, messages: Sequence[dict[str, Any]], flags: Sequence[LiteralFlags]) -> list[dict[str, Any]]:
        """Return the messages with marks."""
        return [self._message(message, own) for message, own in zip(messages, flags, strict=True)]

    def _message(self, message: dict[str, Any], flags: LiteralFlags) -> dict[str, Any]:
        marker = self._replies if message["role"] == ASSISTANT else self._any
        changed = {
            name: self._field(name, value, marker) if flags.message else value for name, value in message.items()
        }
        content = message.get("content")
        if isinstance(content, list):
            changed["content"] = [
                {**part, "text": marker.whole(part["text"])} if is_literal else part
                for part, is_literal in zip(content, flags.parts, strict=True)
            ]
        return changed

    def _field(self, name: str, value: Any, marker: Marker) -> Any:
        if name == "role":
            return value
        if name in ("content", *REASONING_NAMES):
            return mapped(value, marker.whole)
        if name == "tool_calls" and isinstance(value, list):
            return [self._call(call) for call in value]
        return mapped(value, self._any.inside)

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if isinstance(function, dict):
            return {**mapped(call, self._any.inside), "function": self._call(function)}
        changed: dict[str, Any] = mapped(call, self._any.inside)
        if "arguments" in call:
            changed["arguments"] = mapped(call["arguments"], self._any.edges, self._any.inside)
        return changed

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of a template with marks, except the special tokens by role."""
        return {
            name: value if name.endswith("_token") else mapped(value, self._any.edges, self._any.inside)
            for name, value in values.items()
        }


def mapped(value: Any, change: Callable[[str], str], of_keys: Callable[[str], str] | None = None) -> Any:
    """Return a value of JSON types with changed strings and keys; `of_keys` changes keys, if it is given."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [mapped(item, change, of_keys) for item in value]
    if isinstance(value, dict):
        return {(of_keys or change)(key): mapped(item, change, of_keys) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class LiteralCheck:
    """The marks of a conversation, and the check that a template leaves them intact.

    Attributes:
        mark: the character.
        control: the names of the control tokens.
        values: the template's variables except the messages, with marks.
        has_marks: False if no text has a special token, so that there is nothing to check.
    """

    mark: str
    control: frozenset[str]
    values: Mapping[str, Any]
    has_marks: bool = True

    @property
    def num_checks(self) -> int:
        """The number of renderings of `variations`."""
        return 3 if self.has_marks else 0

    def variations(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the changes for further renderings: two characters for each mark, marks that are moved by one
        character, and replies without marks.
        """
        if not self.has_marks:
            return []
        values = {**self.values, "messages": list(messages)}
        twice = mapped(values, lambda text: text.replace(self.mark, 2 * self.mark))
        moved = mapped(values, lambda text: re.sub(rf"{self.mark}(\S)", rf"\1{self.mark}", text))
        plain = [mapped(message, self._clean) if message["role"] == ASSISTANT else message for message in messages]
        return [twice, moved, {"messages": plain}]

    def _clean(self, text: str) -> str:
        return text.replace(self.mark, "")

    def check(self, prompt: str, others: Sequence[Mapping[str, Any]], origin: str) -> None:
        """Compare the renderings of `variations` with the prompt.

        Raises:
            ChatTemplateError: the template changed a text, or the special tokens in a reply have a meaning for it.
        """
        if not others:
            return
        *changed, plain = (result.get("text") for result in others)
        if any(text is None or self._clean(text) != self._clean(prompt) for text in changed):
            raise ChatTemplateError(
                "the chat template changes texts in which special tokens are ordinary text",
                f"{origin} cuts, counts or escapes such texts, so the tokens cannot be kept apart from its own",
                "remove the special tokens from the texts, or leave out the option literal",
            )
        if plain is not None and self._clean(plain) != self._clean(prompt):
            raise ChatTemplateError(
                "the chat template reads special tokens in the text of an assistant's message",
                f"{origin} writes another prompt if these tokens are ordinary text",
                'pass reasoning as "reasoning_content" and calls as "tool_calls", or set "literal" to false in this '
                "message",
            )

    def marked(self, prompt: str) -> MarkedText:
        """Return a prompt with the marks that it contains."""
        return MarkedText(prompt, self.mark, self.control)
