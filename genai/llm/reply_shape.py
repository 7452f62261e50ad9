"""The allowed shape of a chat reply: reasoning, tool calls, and text or output that follows the request's grammar."""

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
"""The tool_choice option. "auto" (also None): the model decides. "none": no calls, and the prompt lists no tools.
"required": at least one call. {"type": "function", "function": {"name": …}}: exactly one call, to that tool."""
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ReplyShape:
    """The parts of a reply that surround or replace the request's own grammar.

    Attributes:
        writer: creates the grammars of replies to this prompt.
        has_thought: True if reasoning may precede the reply.
        call_format: the syntax of tool calls; None if calls cannot be constrained.
        tools: the tools that may be called.
        most: the maximum number of calls.
        is_free: True if the reply need not contain a call.
    """

    writer: ReplyGrammar
    has_thought: bool
    call_format: CallFormat | None = None
    tools: Sequence[CalledTool] = ()
    most: int = 1
    is_free: bool = True

    def around(self, grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of the whole reply, given the request's own grammar (or None)."""
        if self.call_format is None or not self.tools:
            return grammar if grammar is None or not self.has_thought else self._with_body(grammar)
        if not self.is_free and grammar is not None:
            raise OptionError(
                f"{grammar.option} contradicts tool_choice",
                "the reply consists of tool calls only",
                "leave one of the two out",
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
    parallel: bool | None = None,
) -> ReplyShape:
    """Return the shape of replies to a rendered prompt. `parallel` is False if a reply may have one call at most.

    Raises:
        OptionError: `choice` or `parallel` is invalid, or cannot be enforced because there are no tools or the call
            format in the model's template is unknown.
        GrammarError: a tool has no name, or its parameters are not a JSON schema.
    """
    chosen = check_choice(choice, tools)
    check_parallel(parallel)
    call_format = parser.calls(tokenizer.template_text(with_tools=True)) if tools and parser.calls is not None else None
    is_required = chosen not in ("auto", "none")
    if is_required and call_format is None:
        raise OptionError(
            f"tool_choice = {choice!r:.80}",
            f"the format of tool calls in this model's template is unknown (its reply format is {parser.name!r})",
            'leave tool_choice out, or use "auto"',
        )
    if parallel is False and tools and chosen == "auto" and not (call_format is not None and call_format.is_free):
        raise OptionError(
            "parallel_tool_calls = False",
            f"this model's tool calls cannot be limited unless tool_choice requires one (its reply format is"
            f" {parser.name!r})",
            "leave it out, or use a tool_choice that requires a call",
        )
    thought = call_format.thought if call_format is not None else parser.reasoning
    special = {marker: tokenizer.to_token_id(marker) for marker in parser.markers if tokenizer.is_special(marker)}
    writer = ReplyGrammar(special, thought, is_thinking=parser.starts_in_reasoning(prompt))
    if call_format is None or chosen == "none" or not (is_required or call_format.is_free):
        return ReplyShape(writer, thought is not None)
    known = [_called(tool, index) for index, tool in enumerate(tools or ())]
    if is_required and chosen != "required":
        known = [tool for tool in known if tool.name == chosen]
    most = 1 if parallel is False or (is_required and chosen != "required") else calls.MOST_CALLS
    return ReplyShape(writer, thought is not None, call_format, known, most, is_free=not is_required)


def check_choice(choice: ToolChoice, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return "auto", "none", "required", or the name of the only tool that may be called.

    Raises:
        OptionError: the choice is invalid.
    """
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in _CHOICES:
        mode = choice
    elif isinstance(choice, Mapping) and isinstance(name := _function(choice).get("name"), str):
        names = [str(_function(tool).get("name")) for tool in tools or ()]
        if name not in names:
            fix = did_you_mean(name, names, "use the name of one of the tools")
            raise OptionError(
                f"tool_choice is the function {name!r:.80}", f"tools: {', '.join(names) or 'none'}"[:200], fix
            )
        return name
    else:
        raise OptionError(
            f"tool_choice = {choice!r:.80}",
            'allowed: "auto", "none", "required", or {"type": "function", "function": {"name": …}}',
            "use one of these values",
        )
    if mode == "required" and not tools:
        raise OptionError("tool_choice = 'required'", "there are no tools", "pass tools, or leave tool_choice out")
    return mode


def check_parallel(parallel: object) -> None:
    """Raise OptionError unless `parallel` is a value of parallel_tool_calls."""
    if parallel is not None and not isinstance(parallel, bool):
        raise OptionError(
            f"parallel_tool_calls = {parallel!r:.80}",
            "allowed: True (several calls in a reply) and False (at most one)",
            "pass a bool, or leave it out",
        )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function", tool)
    return inner if isinstance(inner, Mapping) else {}


def _schema_name(tool: str) -> str:
    """Return the name that messages use for a tool's parameters."""
    return f"the schema of tool {tool!r:.80}"


def _called(tool: Mapping[str, Any], index: int) -> CalledTool:
    function = _function(tool)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise GrammarError(
            f"tools[{index}] has no name", "calls refer to tools by name", 'add a "name" to its function'
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise GrammarError(
            f"the parameters of tool {name!r} are {kind_of(parameters)}",
            "parameters must be a JSON schema", "pass an object",
        )  # fmt: skip
    # Tool schemas often contain keywords that no compiler supports. Only strict tools must match their schema exactly.
    style = {**JSON_STYLE, "lenient": function.get("strict") is not True}
    # As in OpenAI's API, a tool without "parameters" takes no arguments.
    known = plain(parameters, f"tools[{index}].parameters") if parameters else {"additionalProperties": False}
    schema = {"type": "object", **known, "x-guidance": style}
    if not ends(schema):
        raise GrammarError(
            f"the schema of tool {name!r} is recursive without an optional exit",
            "every valid call would be infinitely long",
            "make some of the recursive properties optional",
        )
    hold_values(schema, _schema_name(name))
    return CalledTool(name, schema)
