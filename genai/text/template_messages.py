"""Converts messages to plain JSON types for templates, and adds marks that reveal which parts a template writes.

A template that does not support tools or a role silently drops the tools or the messages of that role. So the
conversation is rendered again with a mark after the last message of each role, and without its tools. A missing mark or
an unchanged prompt reveals the parts that the template left out.

A prompt may end inside the last message, so that the model continues it (continue_final_message in transformers). That
message is rendered with a mark at its end, and the prompt is cut off there. The mark ends in a space, which reveals
whether the template trims messages: if it does, the space before the mark is also removed.

The arguments of a tool call are JSON text in OpenAI's API, and an object in most templates, which write it with
`tojson` or item by item. So texts are parsed first, as in vLLM. A few templates (DeepSeek's) concatenate the text: they
fail for an object or write it in Python syntax. Such a conversation is rendered again with texts, as in llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ChatTemplateError, InputError, did_you_mean, kind_of
from .tool_functions import as_tools

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API."""

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def from_json(name: str, value: object) -> object:
    """Return the value; if the value is a string, parse it as JSON."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{name} is a string that is not JSON", str(error), f"pass valid JSON, or pass {name} as a list"
        ) from error
    return parsed


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Return copies of the messages, with reasoning under every name that templates use. Raise InputError if a message
    is malformed.
    """
    if not isinstance(messages, (list, tuple)):
        raise InputError(
            f"messages is {kind_of(messages)}",
            "a list of messages, or the same list as JSON, is expected",
            'pass a list such as [{"role": "user", "content": "Hello"}]',
        )
    if not messages:
        raise InputError("messages is empty", "a conversation has at least one message", "add a user message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_roles(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Raise InputError if a role is unknown. Many templates write any role, so that a typo would not be noticed."""
    for index, message in enumerate(messages):
        if is_unknown_role(role := message["role"], template):
            raise InputError(
                f"messages[{index}] has the role {role!r:.40}",
                f"the chat template does not mention this role; allowed: {', '.join(ROLES)}",
                did_you_mean(role, ROLES, "use one of these roles"),
            )


def is_unknown_role(role: str, template: str) -> bool:
    """Return True if a role is neither one of OpenAI's API nor mentioned in the chat template."""
    return role not in ROLES and role not in template


def _checked_message(message: object, where: str) -> dict[str, Any]:
    """Return a copy without the keys whose value is None, because templates test whether a key exists."""
    if not isinstance(message, Mapping):
        raise InputError(
            f"{where} is {kind_of(message)}", "an object is expected", 'pass an object with "role" and "content"'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(
            f"{where} has the role {role!r}",
            "a role must be a non-empty string",
            'set "role" to a value such as "user" or "assistant"',
        )
    content = message.get("content")
    if content is None and not any(message.get(name) for name in ("tool_calls", *REASONING_NAMES)):
        raise InputError(
            f"{where} has no content",
            "only messages with tool_calls or reasoning can omit the content",
            'add a "content"',
        )
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise InputError(
            f"{where} has {kind_of(content)} as its content",
            "the content must be a string or a list of parts",
            "convert the content to a string",
        )
    for index, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InputError(
                f"{where}.content[{index}] is a part of type {kind!r}" + " without text" * (kind == "text"),
                "the model accepts only text",
                'pass {"type": "text", "text": …}, or remove the part',
            )
    copy = {name: value for name, value in plain(message, where).items() if value is not None}
    if isinstance(copy.get("tool_calls"), list):
        copy["tool_calls"] = [_checked_call(call, where) for call in copy["tool_calls"]]
    reasoning = next((copy[name] for name in REASONING_NAMES if name in copy), None)
    # Servers and templates use different names, so all names are set, and every template finds the name that it reads.
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _checked_call(call: Any, where: str) -> Any:
    """Return a tool call whose arguments are not missing: {} stands for null, "" and no arguments."""
    if not isinstance(call, dict):
        raise InputError(
            f"{where} has {kind_of(call)} in its tool_calls",
            "a tool call is an object with a function",
            'for example {"type": "function", "function": {"name": "clock", "arguments": "{}"}}',
        )
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_any_arguments(call["function"])}
    return _with_any_arguments(call) if "name" in call else call


def _with_any_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    missing = arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null"))
    return {**function, "arguments": {} if missing else arguments}


def with_object_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as objects. Texts that hold no JSON object stay texts."""
    return _with_arguments(messages, _parsed_arguments)


def with_text_arguments(
    messages: Sequence[dict[str, Any]], originals: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as JSON texts; texts of `originals` are used unchanged."""
    as_text = _with_arguments(originals, _json_text)
    return [
        {**message, "tool_calls": original["tool_calls"]} if "tool_calls" in message else message
        for message, original in zip(messages, as_text, strict=True)
    ]


def object_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return those arguments of tool calls that are objects."""
    found: list[dict[str, Any]] = []

    def note(arguments: object) -> object:
        if isinstance(arguments, dict):
            found.append(arguments)
        return arguments

    _with_arguments(messages, note)
    return found


def count_python_forms(objects: Sequence[Mapping[str, Any]], prompt: str) -> int:
    """Return how often the prompt contains one of the objects in Python syntax."""
    return sum(prompt.count(str(item)) for item in objects if str(item) != _json_text(item))


def _parsed_arguments(arguments: object) -> object:
    """Return the JSON object of a text, or the value itself."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _json_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(messages: Sequence[Mapping[str, Any]], change: Callable[[object], object]) -> list[dict[str, Any]]:
    """Return the messages with changed arguments of tool calls."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def checked_tools(tools: object) -> list[Any] | None:
    """Return copies of the tools. Raise InputError if they are not a list of objects and functions."""
    if tools is None:
        return None
    if isinstance(tools, (list, tuple)):
        tools = as_tools(tools) or ()
        for index, tool in enumerate(tools):
            if not isinstance(tool, Mapping):
                raise InputError(
                    f"tools[{index}] is {kind_of(tool)}",
                    "a tool is a function, or an object with a name and the JSON schema of its parameters",
                    'pass a function, or an object such as {"type": "function", "function": {"name": …}}',
                )
    else:
        raise InputError(
            f"tools is {kind_of(tools)}",
            "a list of functions and objects (JSON schemas), or a list of objects as JSON, is expected",
            'pass a list of functions, or a list such as [{"type": "function", "function": {"name": …}}]',
        )
    return [plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def plain(value: object, where: str) -> Any:
    """Return a copy in plain JSON types, because an untrusted template must not get objects with custom methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}", "keys must be strings", "convert the key to a str")
            copy[str(key)] = plain(item, f"{where}.{key}")
        return copy
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    # Instances of subclasses (enumerations, numpy.float64) are converted to the plain type. str() would call their own
    # method.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise InputError(
        f"{where} contains {kind_of(value)}",
        "templates support only JSON types",
        "convert the value to a string, a number or a list",
    )


# Digits survive trimming, JSON and changes of case.
_HEARD = "8305172964{:03d}1726394850"


def variations(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return the changes for further renderings: marked messages and, if any, messages without tool calls or tools."""
    marked = list(messages)
    for index in _last_of_each_role(messages):
        marked[index] = _with_mark(messages[index], _HEARD.format(index)) or messages[index]
    silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    calls = [{"messages": silent}] if any(message.get("tool_calls") for message in messages) else []
    return [{"messages": marked}, *calls, *([{"tools": None}] if tools else [])]


def check_heard(
    messages: Sequence[Mapping[str, Any]], prompt: str, others: Sequence[Mapping[str, Any]], origin: str
) -> None:
    """Compare further renderings (`others`, from `variations`) with the prompt of the unmarked conversation.

    A rendering that failed shows that the template read the changed part.

    Raises:
        ChatTemplateError: the template left out a message, the tools or their calls.
    """
    marked, *without = others
    for index in _last_of_each_role(messages) if "text" in marked else []:
        if _HEARD.format(index) not in marked["text"]:
            raise ChatTemplateError(
                f"the chat template omits messages[{index}], whose role is {messages[index]['role']!r}",
                f"{origin} does not write this message into the prompt, so the model would not receive it",
                "use a role that the template supports, such as user, in a supported position",
            )
    if any(result.get("text") == prompt for result in without):
        raise ChatTemplateError(
            "the chat template omits the tools or their calls",
            f"{origin} writes the same prompt without the tools and calls, so the model would not receive them",
            "omit tools and tool_calls, describe the tools in a message, or use a model whose template supports tools",
        )


def _last_of_each_role(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of messages that must appear. Many templates omit the text of a message with tool calls."""
    last = {
        message["role"]: index
        for index, message in enumerate(messages)
        if not message.get("tool_calls") and _with_mark(message, "") is not None
    }
    return list(last.values())


def _with_mark(message: Mapping[str, Any], mark: str, field: str = "content") -> dict[str, Any] | None:
    """Return the message with a mark after its text or its last part; None if it has no text."""
    value = message.get(field)
    if isinstance(value, str):
        return {**message, field: value + mark}
    if field != "content" or not value:
        return None
    return {**message, field: [*value[:-1], {**value[-1], "text": value[-1]["text"] + mark}]}


# The quotes are escaped if a template writes a list of parts as a whole, in Python or JSON syntax.
_READ = _HEARD + "'\""


def has_parts(message: Mapping[str, Any]) -> bool:
    """Return True if the message's content is a list of parts."""
    return isinstance(message.get("content"), list)


def parts_marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with marks in their texts, for `parts_as_read`."""
    return [_with_mark(message, _READ.format(index)) or message for index, message in enumerate(messages)]


def parts_as_read(messages: Sequence[dict[str, Any]], seen: str) -> list[dict[str, Any]]:
    """Return the messages with each list of parts joined into one text, unless the template writes it part by part.

    Args:
        messages: the messages.
        seen: the template's output for parts_marked(messages); "" if the template failed.
    """
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if has_parts(message) and _READ.format(index) not in seen
        else message
        for index, message in enumerate(messages)
    ]


def with_empty_contents(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with None as the content of those that have no content."""
    return [message if "content" in message else {**message, "content": None} for message in messages]


MARK = "CONTINUE_FROM_HERE_MARK "


def mark_final(messages: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with a mark after the `field` of the last message, and the text to continue. Raise InputError
    if the field has no text.
    """
    final = messages[-1]
    marked = _with_mark(final, MARK, field)
    if marked is None:
        raise InputError(
            f"continue_final_message: the last message has no text in {field!r}",
            "this field must hold the text to continue",
            f"end with a message that has a {field!r}, or pass the name of another field",
        )
    value = final[field]
    copies = {name: marked[field] for name in REASONING_NAMES if final.get(name) == value}
    return [*messages[:-1], {**marked, **copies}], value if isinstance(value, str) else value[-1]["text"]


def cut_at_mark(prompt: str, text: str, origin: str) -> str:
    """Return the prompt up to the end of the text to continue. Raise ChatTemplateError if the template changed it."""
    mark = MARK.strip()
    if mark not in prompt or text.strip() not in prompt:
        raise ChatTemplateError(
            "continue_final_message: the last message does not appear in the prompt",
            f"{origin} drops or changes the message",
            "continue another message, or build the prompt text yourself",
        )
    start = prompt.rindex(mark)
    beginning = prompt[:start]
    return beginning if prompt.startswith(MARK, start) else beginning.rstrip()


def check_mode(continue_final_message: object, add_generation_prompt: object) -> tuple[str | None, bool]:
    """Return the field to continue or None, and True to start a new reply. Raise InputError if an argument is invalid
    or both are set.
    """
    if not isinstance(continue_final_message, (bool, str)) or continue_final_message == "":
        raise InputError(
            f"continue_final_message = {continue_final_message!r}",
            "True, False or the name of a message's field is expected",
            'pass True to continue "content"',
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if not isinstance(add_generation_prompt, bool):
        raise InputError(
            f"add_generation_prompt = {add_generation_prompt!r}", "True or False is expected", "pass True or False"
        )
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt are both set",
            "the prompt either ends inside the last message or starts a new one",
            "set only one of the two arguments",
        )
    field = "content" if continue_final_message is True else continue_final_message
    return field or None, add_generation_prompt
