"""Requests of OpenAI's Responses API: their items, tools and options, in the form of LLM.chat."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import RequestError
from ..fields import Fields
from ..sampling import reasoning_variables, response_format, sampling_options, text_format
from ..serving import Server
from .chat import usable_messages


class ResponsesRequest(msgspec.Struct):
    """The fields of a request whose form this endpoint checks; the other fields are sampling options."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    timeout: float | None = None


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_MOST_ALTERNATIVES = 20


def chat_options(server: Server, request: ResponsesRequest, fields: Fields) -> dict[str, Any]:
    """Return the options of LLM.chat that a request asks for. Fields without effect are added to `fields.ignored`.

    Raises:
        RequestError: a field is wrong.
    """
    options = sampling_options(fields)
    if request.max_output_tokens is not None:
        options["max_tokens"] = request.max_output_tokens
    options |= _tool_options(request, fields.ignored)
    text = dict(request.text or {})
    if (form := text.pop("format", None)) is not None:
        options |= text_format(options, response_format(form), "text.format", fields.ignored)
    fields.ignored += [f"text.{name}" for name, value in text.items() if value is not None]
    include = request.include or []
    fields.ignored += [f"include ({name:.60})" for name in include if name not in (LOGPROBS, ENCRYPTED)]
    if LOGPROBS in include or request.top_logprobs:
        number = request.top_logprobs or 0
        if not 0 <= number <= _MOST_ALTERNATIVES:
            raise _wrong("top_logprobs", f"top_logprobs = {number}", f"0 to {_MOST_ALTERNATIVES} are possible",
                         "use a number in this range")  # fmt: skip
        options["logprobs"] = number
    template = {**_reasoning(server, request, fields), **(request.chat_template_kwargs or {})}
    if template:
        options["template"] = template
    options["adapter"] = server.adapter_of(request.model)
    return options


def _wrong(param: str, what: str, why: str, fix: str) -> RequestError:
    return RequestError(400, what, why, fix, param=param)


def _reasoning(server: Server, request: ResponsesRequest, fields: Fields) -> dict[str, Any]:
    settings = dict(request.reasoning or {})
    effort = settings.pop("effort", None)
    fields.ignored += [f"reasoning.{name}" for name, value in settings.items() if value is not None]
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise _wrong("reasoning", f"reasoning.effort = {effort!r:.40}", "it is a text", 'pass a text such as "low"')
    found = reasoning_variables(server, effort, with_tools=bool(request.tools))
    if found is None:
        fields.ignored.append("reasoning.effort")
    return found or {}


def _tool_options(request: ResponsesRequest, ignored: list[str]) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(request.tools or ()):
        if tool.get("type") != "function":  # agents also send tools that only OpenAI's servers run
            ignored.append(f"tools[{index}] ({tool.get('type')!s:.40})")
            continue
        if not isinstance(tool.get("name"), str):
            raise _wrong("tools", f"tools[{index}] has no name", "functions are called by name", "add a name")
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    choice, allowed = _choice(request.tool_choice)
    if allowed is not None:
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    options: dict[str, Any] = {}
    if tools:
        options = {"tools": tools, "tool_choice": choice}
        if request.parallel_tool_calls is False:  # True is the default
            options["parallel_tool_calls"] = False
    elif choice not in (None, "auto", "none"):
        options["tool_choice"] = choice
    return options


def _choice(choice: str | Mapping[str, Any] | None) -> tuple[Any, set[str] | None]:
    """Return the choice in the form of OpenAI's chat API, and the names of the allowed tools; None for all tools."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice, None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and kind == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, None
    if isinstance(choice, Mapping) and kind == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        tools = choice.get("tools")
        if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools):
            return choice["mode"], {str(tool.get("name")) for tool in tools}
    raise _wrong(
        "tool_choice", f"tool_choice = {choice!r:.80}",
        'allowed: "auto", "none", "required", {"type": "function", "name": …}, '
        '{"type": "allowed_tools", "mode": …, "tools": …}',
        "use one of these forms",
    )  # fmt: skip


# --- items ---------------------------------------------------------------------------------------------------------


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as items."""
    if request.input is None:
        return []
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def conversation(
    server: Server, instructions: str | None, items: Sequence[Mapping[str, Any]], ignored: list[str]
) -> list[dict[str, Any]]:
    """Return items as a conversation in the form of OpenAI's chat API.

    Args:
        server: the server.
        instructions: the system message, or None.
        items: the items.
        ignored: receives the names of items without effect.

    Raises:
        RequestError: an item is malformed, or is not text.
    """
    reader = _Reader(ignored)
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        reader.add(item, f"input[{index}]")
    return _with_one_system_message(usable_messages(server, reader.messages))


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first system messages are joined: many templates accept only one, at the beginning."""
    count = next((index for index, one in enumerate(messages) if one.get("role") != "system"), len(messages))
    if count < 2:
        return messages
    texts = [part["text"] if isinstance(part, Mapping) else part for one in messages[:count]
             for part in (one["content"] if isinstance(one["content"], list) else [one["content"]])]  # fmt: skip
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[count:]]


class _Reader:
    """Reads items one by one. The reasoning, the text and the calls of one turn become one message.

    Attributes:
        messages: the messages in the form of OpenAI's chat API.
    """

    def __init__(self, ignored: list[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._ignored = ignored
        self._names: dict[str, str] = {}

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add an item."""
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(item, where, "input" if kind == "custom_tool_call" else "arguments")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            identifier = _text_of(item, "call_id", where)
            message = {"role": "tool", "tool_call_id": identifier, "content": _content(item, "output", where)}
            if identifier in self._names:  # some templates write the name
                message["name"] = self._names[identifier]
            self.messages.append(message)
        elif kind == "reasoning":
            if text := _reasoning_text(item):
                self._turn("reasoning_content")["reasoning_content"] = text
        elif kind == "item_reference":
            raise _wrong("input", f"{where} is a reference", "the server stores no items by their id",
                         "send the item, or use previous_response_id")  # fmt: skip
        else:  # calls of tools that only OpenAI's servers run
            self._ignored.append(f"{where} ({kind!s:.40})")

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise _wrong("input", f"{where}.role = {role!r:.40}", "allowed: user, assistant, system, developer",
                         "use one of these roles")  # fmt: skip
        content = _content(item, "content", where)
        if role == "assistant":
            self._turn("content")["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _add_call(self, item: Mapping[str, Any], where: str, name_of_arguments: str) -> None:
        arguments = _text_of(item, name_of_arguments, where)
        name, identifier = _text_of(item, "name", where), _text_of(item, "call_id", where)
        self._names[identifier] = name
        found: Any = {"input": arguments} if name_of_arguments == "input" else arguments
        call = {"id": identifier, "type": "function", "function": {"name": name, "arguments": found}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, part: str = "") -> dict[str, Any]:
        """Return the message of the assistant's current turn, in which nothing follows `part`."""
        last = self.messages[-1] if self.messages else {}
        order = ["reasoning_content", "content", "tool_calls"]
        if last.get("role") != "assistant" or (part and any(name in last for name in order[order.index(part) :])):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _text_of(item: Mapping[str, Any], name: str, where: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise _wrong("input", f"{where}.{name} is missing, or is not text", "the field is required",
                     "send the items of a reply unchanged")  # fmt: skip
    return found


_TEXTS = ("input_text", "output_text", "text")


def _content(item: Mapping[str, Any], name: str, where: str) -> str | list[dict[str, Any]]:
    """Return the content of an item, which is a text or a list of texts."""
    content = item.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(
            "input", f"{where}.{name} is missing, or is not text or a list", "a message has text, or parts with text",
            'pass a text, or {"type": "input_text", "text": …}',
        )  # fmt: skip
    found = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
            raise _wrong(
                "input", f"{where}.{name}[{index}] is a part of type {kind!r:.40}", "the model reads text only",
                'pass {"type": "input_text", "text": …}, or remove the part',
            )  # fmt: skip
        found.append({"type": "text", "text": text})
    return found[0]["text"] if len(found) == 1 else found


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, its encrypted content, or its summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        if text := "".join(text for text in texts if isinstance(text, str)):
            return text
        if name == "content" and (text := _opened(item.get("encrypted_content"))):
            return text
    return ""


_SEAL = "genai1:"


def sealed(reasoning: str) -> str:
    """Return reasoning in the form of the field encrypted_content. The text is encoded, not encrypted."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def _opened(content: Any) -> str:
    """Return the text of `sealed`; "" for the content of other servers."""
    if not isinstance(content, str) or not content.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(content[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
