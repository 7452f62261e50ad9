"""Prompts that end inside the last message, so that the model continues it (transformers' continue_final_message).

The message is rendered with a mark at its end, and the prompt is cut there. The mark ends in a space, which tells
whether the template trims: if it does, the space before the mark goes too.
"""

from __future__ import annotations

from typing import Any

from ..errors import ChatTemplateError, InputError
from .template_messages import REASONING_NAMES

MARK = "CONTINUE_FROM_HERE_MARK "


def mark_final(messages: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark behind the last one's `field`, and the text that is to be continued.

    Raises:
        InputError: the last message has no such text.
    """
    final = dict(messages[-1])
    value = final.get(field)
    if isinstance(value, list):
        parts = [dict(part) if isinstance(part, dict) else part for part in value]
        block = next((part for part in reversed(parts) if isinstance(part, dict) and "text" in part), None)
        if block is not None and isinstance(block["text"], str):
            text = block["text"]
            block["text"] = text + MARK
            return [*messages[:-1], {**final, field: parts}], text
    if not isinstance(value, str):
        raise InputError(
            f"continue_final_message: the last message has no text in {field!r}",
            "that is the text to continue",
            f"end the messages with one that has a {field!r}, or pass the name of another field",
        )
    copies = REASONING_NAMES if field in REASONING_NAMES else (field,)
    return [*messages[:-1], {**final, **{name: value + MARK for name in copies if final.get(name) == value}}], value


def cut_at_mark(prompt: str, text: str, origin: str) -> str:
    """The prompt up to the end of the text to continue.

    Raises:
        ChatTemplateError: the template left the text out, or changed it.
    """
    mark = MARK.strip()
    if mark not in prompt or text.strip() not in prompt:
        raise ChatTemplateError(
            "continue_final_message: the last message does not appear in the prompt",
            f"{origin} drops or changes it",
            "continue another message, or write the prompt yourself",
        )
    start = prompt.rindex(mark)
    kept = prompt[:start]
    return kept if prompt.startswith(MARK, start) else kept.rstrip()


def check_mode(continue_final_message: object, add_generation_prompt: object) -> tuple[str | None, bool]:
    """The field to continue (or None), and whether a new reply is begun.

    Raises:
        InputError: neither is what it should be, or both are asked for.
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
