"""Grammars of replies that call tools, in llguidance's dialect of Lark, for the formats that parsers read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Calls in one reply: a small model may go on with them for ever.
MOST_CALLS = 16


@dataclass(frozen=True)
class CallFormat:
    """What stands around the names and arguments of calls, as chat templates write them.

    Attributes:
        opening: begins the first call; text in front of it does not hold it.
        start, end: around all calls, behind the opening.
        before_name, before_arguments, after: around a call's parts.
        between: from one call to the next.
        is_alone: calls are the whole reply, not a part behind some text.
        thought: the markers of reasoning in front of all, if there may be some.
        is_free: whether a reply that calls no tool is text as it is.
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
        special: ids of the markers that are special tokens; the others are text.
        thought: markers of reasoning in front of the reply, if the format has some. is_thinking: the prompt has opened
            it.
    """

    def __init__(
        self, special: Mapping[str, int], thought: tuple[str, str] | None = None, *, is_thinking: bool = False
    ) -> None:
        self._special, self._thought, self._is_thinking = special, thought, is_thinking

    def of_body(self) -> str:
        """Reasoning, and then what the grammar `body` says."""
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
        """Calls of tools.

        Args:
            most: how many calls at most.
            is_free: whether there may be none, but text, or what the grammar `body` says.
            body: whether that is there.
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
        """A text as it stands in a rule; markers that are special tokens by their ids."""
        if not text:
            return ""
        markers = sorted((marker for marker in self._special if marker in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )
