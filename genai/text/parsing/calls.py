"""Grammars for replies with tool calls, in llguidance's Lark dialect, for the formats that the parsers read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Maximum number of calls in a reply. Without a limit, a small model may repeat calls forever.
MOST_CALLS = 16


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


@dataclass(frozen=True)
class CalledTool:
    """A tool that a reply may call: its name, and the schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


_TERMINALS = """
TEXT: /(.|\\n)+/
ANY_TEXT: /(.|\\n)*/
BREAKS: /\\n{0,3}/
"""


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
            before, after = call_format.before_name + name + call_format.before_arguments, call_format.after
            arguments = f"%json {json.dumps(tool.schema, ensure_ascii=False)}"
            rules.append(f"call_{index}: {self._literal(before)} {arguments} {self._literal(after)}")
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
