"""What a template may read, in plain JSON types; and marks in messages, which show what a template makes of them.

A template that has no tools, or does not know a role, drops them without a word. So the conversation is rendered again
with a mark behind the last message of each role, and without its tools: a mark that does not appear, or a prompt that
stays the same, tells what was left out.

A prompt may end inside the last message, so that the model continues it (transformers' continue_final_message). That
message is rendered with a mark at its end, and the prompt is cut there. The mark ends in a space, which tells whether
the template trims: if it does, the space before the mark goes too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ChatTemplateError, InputError, kind_of

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def from_json(name: str, value: object) -> object:
    """The value itself, or what it is as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is a text that is not JSON", str(error), f"pass JSON, or {name} as a list") from error
    return parsed


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of the messages, with reasoning under each name that templates know; InputError if they cannot be read."""
    if not isinstance(messages, (list, tuple)):
        raise InputError(
            f"messages is {kind_of(messages)}",
            "a list of messages, or its JSON text, is expected",
            'for example [{"role": "user", "content": "Hello"}]',
        )
    if not messages:
        raise InputError("messages is empty", "a conversation has at least one message", "add a user message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    """A copy without keys whose value is None: templates ask whether a key is there."""
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {kind_of(message)}", "an object is expected", 'with "role" and "content"')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(
            f"{where} has the role {role!r}", "a role is a text", 'add a "role", such as "user" or "assistant"'
        )
    content = message.get("content")
    if content is None and not any(message.get(name) for name in ("tool_calls", *REASONING_NAMES)):
        raise InputError(
            f"{where} has no content", "only a message with tool_calls or reasoning may lack it", 'add a "content"'
        )
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise InputError(
            f"{where} has {kind_of(content)} as its content",
            "a text, or a list of parts, is expected",
            "convert it to a str",
        )
    for index, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InputError(
                f"{where}.content[{index}] is a part of type {kind!r}" + " without a text" * (kind == "text"),
                "the model reads text only",
                'pass {"type": "text", "text": …}, or leave it out',
            )
    copy = {name: value for name, value in plain(message, where).items() if value is not None}
    reasoning = next((copy[name] for name in REASONING_NAMES if name in copy), None)
    # Servers and templates disagree about the name: every template finds the one it reads.
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def checked_tools(tools: object) -> list[Any] | None:
    """Copies of the tools. Raises InputError: they are not a list of objects."""
    if tools is None:
        return None
    if isinstance(tools, (list, tuple)):
        for index, tool in enumerate(tools):
            if not isinstance(tool, Mapping):
                raise InputError(
                    f"tools[{index}] is {kind_of(tool)}",
                    "a tool is an object with a name and the JSON schema of its parameters",
                    'for example {"type": "function", "function": {"name": …}}',
                )
    else:
        raise InputError(
            f"tools is {kind_of(tools)}",
            "a list of objects (JSON schemas), or its JSON text, is expected",
            'for example [{"type": "function", "function": {"name": …}}]',
        )
    return [plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def plain(value: object, where: str) -> Any:
    """A copy made of plain JSON types: an untrusted template must not meet objects with methods of their own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}", "keys are texts", "convert the key to a str")
            copy[str(key)] = plain(item, f"{where}.{key}")
        return copy
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    # Subclasses (enumerations, numpy.float64) become the plain type; str() would call a method of theirs.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise InputError(
        f"{where} holds {kind_of(value)}",
        "a template reads JSON types only",
        "convert it to text, number or list",
    )


# Digits survive trimming, JSON and changes of case.
_HEARD = "8305172964{:03d}1726394850"


def variations(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """What to change for the further renderings: the messages marked; tool calls and tools left out where some are."""
    marked = list(messages)
    for index in _last_of_each_role(messages):
        marked[index] = _with_mark(messages[index], _HEARD.format(index)) or messages[index]
    silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    calls = [{"messages": silent}] if any(message.get("tool_calls") for message in messages) else []
    return [{"messages": marked}, *calls, *([{"tools": None}] if tools else [])]


def check_heard(
    messages: Sequence[Mapping[str, Any]], prompt: str, others: Sequence[Mapping[str, Any]], origin: str
) -> None:
    """Check the further renderings (`others`, of `variations`) beside the prompt of the unmarked conversation.

    One that failed says that the template looked at what was changed.

    Raises:
        ChatTemplateError: something was left out.
    """
    marked, *without = others
    for index in _last_of_each_role(messages) if "text" in marked else []:
        if _HEARD.format(index) not in marked["text"]:
            raise ChatTemplateError(
                f"the chat template leaves out messages[{index}], whose role is {messages[index]['role']!r}",
                f"{origin} writes nothing of it, so the model would never see it",
                "use a role that the template knows, such as user, in a place where it reads it",
            )
    if any(result.get("text") == prompt for result in without):
        raise ChatTemplateError(
            "the chat template leaves out the tools or their calls",
            f"{origin} gives the same prompt without them, so the model would never see them",
            "leave tools and tool_calls out, describe them in a message, or use a model whose template has tools",
        )


def _last_of_each_role(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where texts stand that must appear. Beside tool calls many templates leave the text out."""
    last = {
        message["role"]: index
        for index, message in enumerate(messages)
        if not message.get("tool_calls") and _with_mark(message, "") is not None
    }
    return list(last.values())


def _with_mark(message: Mapping[str, Any], mark: str, field: str = "content") -> dict[str, Any] | None:
    """The message with a mark behind its text, or the last part of it; None if it has no text."""
    value = message.get(field)
    if isinstance(value, str):
        return {**message, field: value + mark}
    if field != "content" or not value:
        return None
    return {**message, field: [*value[:-1], {**value[-1], "text": value[-1]["text"] + mark}]}


# Its quotes change where a list of parts is written as it is, as Python or JSON does.
_READ = _HEARD + "'\""


def has_parts(message: Mapping[str, Any]) -> bool:
    """Whether its content is a list."""
    return isinstance(message.get("content"), list)


def parts_marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with marks in their texts, for `parts_as_read`."""
    return [_with_mark(message, _READ.format(index)) or message for index, message in enumerate(messages)]


def parts_as_read(messages: Sequence[dict[str, Any]], seen: str) -> list[dict[str, Any]]:
    """The messages with lists of parts joined to texts, but for those that the template wrote part by part.

    Args:
        seen: what it made of parts_marked; "" if it failed.
    """
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if has_parts(message) and _READ.format(index) not in seen
        else message
        for index, message in enumerate(messages)
    ]


MARK = "CONTINUE_FROM_HERE_MARK "


def mark_final(messages: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark behind the last one's `field`, and the text to continue; InputError if it has none."""
    final = messages[-1]
    marked = _with_mark(final, MARK, field)
    if marked is None:
        raise InputError(
            f"continue_final_message: the last message has no text in {field!r}",
            "that is the text to continue",
            f"end the messages with one that has a {field!r}, or pass the name of another field",
        )
    value = final[field]
    copies = {name: marked[field] for name in REASONING_NAMES if final.get(name) == value}
    return [*messages[:-1], {**marked, **copies}], value if isinstance(value, str) else value[-1]["text"]


def cut_at_mark(prompt: str, text: str, origin: str) -> str:
    """The prompt up to the end of the text to continue; ChatTemplateError if the template left it out or changed it."""
    mark = MARK.strip()
    if mark not in prompt or text.strip() not in prompt:
        raise ChatTemplateError(
            "continue_final_message: the last message does not appear in the prompt",
            f"{origin} drops or changes it",
            "continue another message, or write the prompt yourself",
        )
    start = prompt.rindex(mark)
    beginning = prompt[:start]
    return beginning if prompt.startswith(MARK, start) else beginning.rstrip()


def check_mode(continue_final_message: object, add_generation_prompt: object) -> tuple[str | None, bool]:
    """The field to continue (or None), and whether a new reply is begun; InputError if these are wrong or both."""
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
            f"add_generation_prompt = {add_generation_prompt!r}", "True or False is expected", "pass a bool"
        )
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt are both set",
            "the prompt ends inside the last message or begins a new one",
            "leave one of them out",
        )
    field = "content" if continue_final_message is True else continue_final_message
    return field or None, add_generation_prompt
