"""What a reply to a conversation may be: reasoning, calls of tools, and text or what the request's grammar says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..engine.sampling.grammar import JSON_STYLE, Grammar, hold_values
from ..engine.sampling.json_schema import ends
from ..errors import GrammarError, OptionError, did_you_mean, kind_of
from ..text.parsing import Parser, calls
from ..text.parsing.calls import CalledTool, CallFormat, ReplyGrammar
from ..text.template_messages import plain
from ..text.tokenizer import Tokenizer

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any] | None
"""Whether a reply calls tools: as the model likes (auto, also None), not at all (none; the prompt then names no tools),
at least once (required), or the one that {"type": "function", "function": {"name": …}} names, once."""
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ReplyShape:
    """What stands around the grammar of a request, or in its place.

    Attributes:
        writer: writes grammars of replies to this prompt. has_thought: whether there may be reasoning in front.
        call_format: how calls are written; None where none can be constrained.
        tools: those that may be called. most: how many calls at most. is_free: whether there may be
            none.
    """

    writer: ReplyGrammar
    has_thought: bool
    call_format: CallFormat | None = None
    tools: Sequence[CalledTool] = ()
    most: int = 1
    is_free: bool = True

    def around(self, grammar: Grammar | None) -> Grammar | None:
        """The grammar of the reply, where the request itself has this one."""
        if self.call_format is None or not self.tools:
            return grammar if grammar is None or not self.has_thought else self._with_body(grammar)
        if not self.is_free and grammar is not None:
            raise OptionError(
                f"{grammar.option} contradicts tool_choice", "the reply is nothing but calls", "leave one of them out"
            )
        text = self.writer.of_calls(
            self.call_format, self.tools, most=self.most, is_free=self.is_free, body=grammar is not None
        )
        inner = tuple((_schema_name(tool.name), json.dumps(tool.schema)) for tool in self.tools)
        return Grammar("tools", text, body=grammar, inner=inner)

    def _with_body(self, grammar: Grammar) -> Grammar:
        return Grammar("tools", self.writer.of_body(), body=grammar)


def reply_shape(
    tokenizer: Tokenizer,
    parser: Parser,
    prompt: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    choice: ToolChoice = None,
) -> ReplyShape:
    """The shape of replies to a rendered prompt.

    Raises:
        OptionError: a choice that is none, or that cannot be obeyed: no tools, or a format that is not known.
        GrammarError: a tool without a name, or parameters that are no schema.
    """
    chosen = check_choice(choice, tools)
    call_format = parser.calls(tokenizer.template_text(with_tools=True)) if tools and parser.calls is not None else None
    is_required = chosen not in ("auto", "none")
    if is_required and call_format is None:
        raise OptionError(
            f"tool_choice = {choice!r:.80}",
            f"how this model's template writes calls is not known (its reply format is {parser.name!r})",
            'leave it out, or use "auto"',
        )
    thought = call_format.thought if call_format is not None else parser.reasoning
    special = {marker: tokenizer.to_token_id(marker) for marker in parser.markers if tokenizer.is_special(marker)}
    writer = ReplyGrammar(special, thought, is_thinking=parser.starts_in_reasoning(prompt))
    if call_format is None or chosen == "none" or not (is_required or call_format.is_free):
        return ReplyShape(writer, thought is not None)
    known = [_called(tool, index) for index, tool in enumerate(tools or ())]
    if is_required and chosen != "required":
        known = [tool for tool in known if tool.name == chosen]
    most = 1 if is_required and chosen != "required" else calls.MOST_CALLS
    return ReplyShape(writer, thought is not None, call_format, known, most, is_free=not is_required)


def check_choice(choice: ToolChoice, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """ "auto", "none", "required", or the name of the one tool. Raises OptionError: it is none of these."""
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in _CHOICES:
        mode = choice
    elif isinstance(choice, Mapping) and isinstance(name := _function(choice).get("name"), str):
        names = [str(_function(tool).get("name")) for tool in tools or ()]
        if name not in names:
            fix = did_you_mean(name, names, "name one of the tools")
            raise OptionError(f"tool_choice names {name!r:.80}", f"tools: {', '.join(names) or 'none'}"[:200], fix)
        return name
    else:
        raise OptionError(
            f"tool_choice = {choice!r:.80}",
            'it is "auto", "none", "required", or {"type": "function", "function": {"name": …}}',
            "write one of these",
        )
    if mode == "required" and not tools:
        raise OptionError("tool_choice = 'required'", "there are no tools", "pass tools, or leave it out")
    return mode


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function", tool)
    return inner if isinstance(inner, Mapping) else {}


def _schema_name(tool: str) -> str:
    """What messages call the parameters of a tool."""
    return f"the schema of tool {tool!r:.80}"


def _called(tool: Mapping[str, Any], index: int) -> CalledTool:
    function = _function(tool)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise GrammarError(f"tools[{index}] has no name", "calls name the tool", 'give its function a "name"')
    if parameters is not None and not isinstance(parameters, Mapping):
        raise GrammarError(
            f"the parameters of tool {name!r} are {kind_of(parameters)}",
            "they are a JSON schema", "pass an object",
        )  # fmt: skip
    schema = {"type": "object", **plain(parameters or {}, f"tools[{index}].parameters")}
    if not ends(schema):
        raise GrammarError(
            f"no call of tool {name!r} has an end", "its parameters hold themselves", "let some of them be optional"
        )
    hold_values(schema, _schema_name(name))
    # Schemas of tools often hold words that no compiler knows; only those that are strict must be obeyed to the letter.
    style = {**JSON_STYLE, "lenient": function.get("strict") is not True}
    return CalledTool(name, {**schema, "x-guidance": style})
