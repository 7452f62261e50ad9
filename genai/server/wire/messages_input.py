"""Requests of Anthropic's messages API: their conversation, tools and options, in the form of LLM.chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import RequestError
from ..fields import Fields
from ..sampling import check_strings, reasoning_variables, sampling_options, text_format
from ..serving import Server


class MessagesRequest(msgspec.Struct):
    """The fields of a request whose form this endpoint checks; the other fields are sampling options."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    timeout: float | None = None


def chat_options(server: Server, request: MessagesRequest, fields: Fields) -> dict[str, Any]:
    """Return the options of LLM.chat that a request asks for. Fields without effect are added to `fields.ignored`.

    Raises:
        RequestError: a field is wrong.
    """
    options = sampling_options(fields)
    if request.stop_sequences:
        options["stop"] = request.stop_sequences
        check_strings(options)
    if tools := _tools(request.tools or (), fields.ignored):
        options["tools"] = tools
    options |= _tool_choice(request.tool_choice, has_tools=bool(tools))
    settings = dict(request.output_config or {})
    effort, form = settings.pop("effort", None), settings.pop("format", None) or request.output_format
    fields.ignored += [f"output_config.{name}" for name in settings]
    if form is not None:
        options |= text_format(options, {"json_schema": _schema(form)}, "output_config.format", fields.ignored)
    template = {**_reasoning(server, request, effort, fields), **(request.chat_template_kwargs or {})}
    if template:
        options["template"] = template
    options["adapter"] = server.adapter_of(request.model)
    return options


def _tools(tools: Sequence[Mapping[str, Any]], ignored: list[str]) -> list[dict[str, Any]]:
    """Return the tools that clients define, in the form of OpenAI's API. Tools that Anthropic defines are ignored."""
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", None):
            ignored.append(f"tools[{index}] ({tool['type']!s:.40})")
            continue
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name or not isinstance(schema, Mapping):
            raise RequestError(
                400, f"tools[{index}] cannot be used", "a tool has a name and an input_schema, which is an object",
                "add the field that is missing", param="tools",
            )  # fmt: skip
        function = {"name": name, "description": tool.get("description"), "parameters": schema}
        function = {key: value for key, value in function.items() if value is not None}
        found.append({"type": "function", "function": function})
    return found


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _tool_choice(choice: Mapping[str, Any] | None, *, has_tools: bool) -> dict[str, Any]:
    if choice is None:
        return {}
    kind, options = choice.get("type"), dict[str, Any]()
    if kind == "tool" and isinstance(choice.get("name"), str):
        options["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif kind in _CHOICES:
        options["tool_choice"] = _CHOICES[kind]
    else:
        raise RequestError(
            400, f"tool_choice = {dict(choice)!r:.80}",
            'allowed: {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": …}',
            "use one of these forms", param="tool_choice",
        )  # fmt: skip
    if not has_tools and kind in ("auto", "none"):
        return {}
    if choice.get("disable_parallel_tool_use") is True:
        options["parallel_tool_calls"] = False
    return options


def _schema(form: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = form.get("schema") if isinstance(form, Mapping) else None
    if not isinstance(schema, Mapping) or form.get("type") != "json_schema":
        raise RequestError(
            400, f"output_config.format = {form!r:.80}", 'allowed: {"type": "json_schema", "schema": …}',
            "use this form", param="output_config",
        )  # fmt: skip
    return schema


_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def _reasoning(server: Server, request: MessagesRequest, effort: Any, fields: Fields) -> dict[str, Any]:
    """Return the variables of the chat template that set the reasoning."""
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(
            400, f"output_config.effort = {effort!r:.40}", f"allowed: {', '.join(_EFFORTS)}", "use one of these values",
            param="output_config",
        )  # fmt: skip
    level = _EFFORTS.get(effort, "medium")
    if request.thinking is None:
        found = None if effort is None else reasoning_variables(server, level, with_tools=bool(request.tools))
        # An effort alone does not switch the reasoning on.
        if effort is not None and (found is None or "reasoning_effort" not in found):
            fields.ignored.append("output_config.effort")
            return {}
        return found or {}
    settings = dict(request.thinking)
    kind = settings.pop("type", None)
    if kind not in _THINKING:
        raise RequestError(
            400, f"thinking.type = {kind!r:.40}", f"allowed: {', '.join(_THINKING)}", "use one of these values",
            param="thinking",
        )  # fmt: skip
    fields.ignored += [f"thinking.{name}" for name, value in settings.items() if value]
    is_off = kind == "disabled"
    found = reasoning_variables(server, "none" if is_off else level, with_tools=bool(request.tools))
    if found is None:
        fields.ignored.append("thinking")
    if effort is not None and (found is None or "reasoning_effort" not in found):
        fields.ignored.append("output_config.effort")
    return found or {}


# --- conversations -------------------------------------------------------------------------------------------------


def conversation(request: MessagesRequest, ignored: list[str]) -> list[dict[str, Any]]:
    """Return the conversation of a request in the form of OpenAI's chat API.

    Args:
        request: the request.
        ignored: receives the names of blocks without effect.

    Raises:
        RequestError: a message or a block is malformed, or is not text.
    """
    reader = _Reader(ignored)
    if request.system:
        reader.messages.append({"role": "system", "content": reader.texts(request.system, "system")})
    for index, message in enumerate(request.messages):
        reader.add(message, f"messages[{index}]")
    if request.messages and request.messages[-1].get("role") == "assistant":
        raise RequestError(
            400, "the last message is of the role assistant", "replies begin a new message",
            "end the conversation with a message of the role user", param="messages",
        )  # fmt: skip
    return reader.messages


class _Reader:
    """Reads messages one by one.

    Attributes:
        messages: the messages in the form of OpenAI's chat API.
    """

    def __init__(self, ignored: list[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._ignored = ignored
        self._names: dict[Any, str] = {}

    def add(self, message: Mapping[str, Any], where: str) -> None:
        """Add a message; the tool results in it become messages."""
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                400, f"{where}.role = {role!r:.40}", "allowed: user, assistant, system", "use one of these roles",
                param=where,
            )  # fmt: skip
        if not isinstance(content, str | list):
            raise RequestError(
                400, f"{where}.content is missing, or is not text or a list", "a message has text or blocks",
                "pass a string or a list of blocks", param=where,
            )  # fmt: skip
        if role == "assistant":
            self._add_assistant(content, f"{where}.content")
        elif role == "system":
            self.messages.append({"role": "system", "content": self.texts(content, f"{where}.content")})
        else:
            self._add_user(content, f"{where}.content")

    def texts(self, content: str | Sequence[Any], where: str) -> str | list[dict[str, Any]]:
        """Return content that has only text."""
        if isinstance(content, str):
            return content
        parts = [part for index, block in enumerate(content) for part in self._text(block, f"{where}[{index}]")]
        return parts[0]["text"] if len(parts) == 1 else parts

    def _add_user(self, content: str | Sequence[Any], where: str) -> None:
        if isinstance(content, str):
            self.messages.append({"role": "user", "content": content})
            return
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            if _kind(block, place) == "tool_result":
                self._add_parts(parts)
                self._add_result(block, place)
                parts = []
            else:
                parts += self._text(block, place)
        self._add_parts(parts)
        if not content:
            self.messages.append({"role": "user", "content": ""})

    def _add_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        if parts:
            self.messages.append({"role": "user", "content": parts[0]["text"] if len(parts) == 1 else [*parts]})

    def _add_result(self, block: Mapping[str, Any], where: str) -> None:
        identifier = block.get("tool_use_id")
        if not isinstance(identifier, str):
            raise RequestError(
                400, f"{where}.tool_use_id is missing", "a result names its call", "add the id of the tool_use block",
                param="messages",
            )  # fmt: skip
        content = block.get("content")
        result = self.texts(content if isinstance(content, str | list) else "", f"{where}.content")
        message = {"role": "tool", "tool_call_id": identifier, "content": result}
        if identifier in self._names:  # some templates write the name
            message["name"] = self._names[identifier]
        self.messages.append(message)

    def _add_assistant(self, content: str | Sequence[Any], where: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.messages.append(message)
        if isinstance(content, str):
            message["content"] = content
            return
        parts, reasoning, calls = [], [], []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            kind = _kind(block, place)
            if kind == "text":
                parts += self._text(block, place)
            elif kind == "thinking":
                reasoning.append(str(block.get("thinking") or ""))
            elif kind == "tool_use":
                calls.append(self._call(block, place))
            else:  # blocks of tools that only Anthropic's servers run, and encrypted reasoning
                self._ignored.append(f"{place} ({kind:.40})")
        if parts:
            message["content"] = parts[0]["text"] if len(parts) == 1 else parts
        if any(reasoning):
            message["reasoning_content"] = "\n".join(reasoning)
        if calls:
            message["tool_calls"] = calls

    def _call(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        identifier, name, arguments = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(identifier, str) or not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise RequestError(
                400, f"{where} cannot be used", "a tool_use block has an id, a name, and an input, which is an object",
                "send the blocks of a reply unchanged", param="messages",
            )  # fmt: skip
        self._names[identifier] = name
        return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _text(self, block: Any, where: str) -> list[dict[str, Any]]:
        """Return the text of a block that is not of an assistant."""
        kind = _kind(block, where)
        source = block.get("source")
        if kind == "text" and isinstance(block.get("text"), str):
            return [{"type": "text", "text": block["text"]}]
        if kind == "document" and isinstance(source, Mapping) and isinstance(source.get("data"), str):
            if source.get("type") == "text":
                title = block.get("title")
                return [{"type": "text", "text": f"{title}\n\n{source['data']}" if title else source["data"]}]
        elif kind == "search_result" and isinstance(block.get("content"), list):
            return [part for index, one in enumerate(block["content"])
                    for part in self._text(one, f"{where}.content[{index}]")]  # fmt: skip
        elif kind in ("tool_reference", "container_upload"):
            self._ignored.append(f"{where} ({kind})")
            return []
        why = "the model reads text only" if kind in ("image", "document") else "only text can be used here"
        raise RequestError(
            400, f"{where} is a block of type {kind!r:.40}" + " without text" * (kind == "text"), why,
            'pass {"type": "text", "text": …}, or remove the block', param=where.partition(".")[0],
        )  # fmt: skip


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(
            400, f"{where} is not a block", "a block is an object with a type", 'pass {"type": "text", "text": …}',
            param=where.partition(".")[0],
        )  # fmt: skip
    return kind
