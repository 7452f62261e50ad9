"""What a line asks: its fields become an item of LLM.map."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import InputError, OptionError, did_you_mean
from .openai_format import OPTIONS, read_body, with_token_ids

_PART = re.compile(r"\{\{|\}\}|\{(\w[\w .-]*)\}|([{}])")


@dataclass(frozen=True)
class PromptTemplate:
    """A text with fields: "Summarise: {text}"; {{ and }} are braces.

    Raises:
        OptionError: a brace that is neither, or no field at all.
    """

    text: str

    def __post_init__(self) -> None:
        wrong = next((match for match in _PART.finditer(self.text) if match[2]), None)
        if wrong is not None:
            raise OptionError(
                f"template {self.text!r:.200} has a {wrong[2]} at place {wrong.start() + 1}",
                "a field is written {name}",
                "write {{ and }} for braces of the text",
            )
        if not self.names:
            raise OptionError(
                f"template {self.text!r:.200} has no field", "every line would ask the same", "put {text} into it, say"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The fields, each once."""
        return tuple(dict.fromkeys(match[1] for match in _PART.finditer(self.text) if match[1]))

    def fill(self, fields: Mapping[str, Any]) -> str:
        """The text for one line. Raises InputError: a field that it does not have."""
        for name in self.names:
            if name not in fields:
                known = ", ".join(map(str, fields))[:200]
                raise InputError(
                    f"the line has no field {name!r}", f"it has {known}", did_you_mean(name, fields, "give it one")
                )
        return _PART.sub(lambda match: _written(match[1], fields[match[1]]) if match[1] else match[0][0], self.text)


def _written(name: str, value: Any) -> str:
    if value is None or value != value:  # NaN, which many tables have for nothing
        raise InputError(
            f"the field {name!r} is {'null' if value is None else 'NaN'}",
            "the template would ask about that word",
            "give it a value, or an empty text",
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class PromptFormat:
    """How lines are asked.

    Attributes:
        template: makes the prompt of a line; the line's fields are then nothing but data.
        as_chat: a prompt that is not part of a body in OpenAI's format is a user message.
        adapter: what lines go through that name no adapters themselves: names with weights.
    """

    template: PromptTemplate | None = None
    as_chat: bool = False
    adapter: Mapping[str, float] | None = None

    def custom_id(self, fields: Mapping[str, Any], number: int) -> str:
        """What names a line in the output. Raises InputError: it is no text."""
        custom_id = fields.get("custom_id")
        if isinstance(custom_id, int) and not isinstance(custom_id, bool):
            custom_id = str(custom_id)
        if custom_id is None or custom_id == "":
            return f"line-{number}"
        if not isinstance(custom_id, str):
            raise InputError(f"custom_id = {custom_id!r:.80}", "a text is expected", "give each line a name of its own")
        return custom_id

    def item(self, fields: Mapping[str, Any], *, are_cells: bool = False) -> tuple[Mapping[str, Any], str]:
        """What the fields of a line ask of LLM.map, and the model that they name, "" for none.

        Args:
            are_cells: all values are texts, as in CSV files; those of options are then read as JSON.

        Raises:
            InputError: they ask nothing.
            OptionError: an option that is not known, or not obeyed here.
        """
        item, model = self._item(fields, are_cells=are_cells)
        return (item if self.adapter is None else {"adapter": self.adapter, **item}), model

    def _item(self, fields: Mapping[str, Any], *, are_cells: bool) -> tuple[Mapping[str, Any], str]:
        if self.template is not None:
            return self._prompt(self.template.fill(fields)), ""
        if "body" in fields:
            return read_body(fields)
        item = {name: value for name, value in fields.items() if name != "custom_id" and value is not None}
        if "text" in item and not {"prompt", "messages"} & set(item):
            item["prompt"] = item.pop("text")
        if are_cells:
            item = {name: _from_cell(name, value) for name, value in item.items() if value != ""}
        item = with_token_ids(item)
        if ("prompt" in item) == ("messages" in item):
            raise InputError(
                f"the line has the fields {', '.join(map(str, fields)):.200}",
                "it needs either a prompt (or text) or messages",
                "name the field that is the prompt in a template, such as {question}",
            )
        with_messages = ("tools", "tool_choice", "template") if "messages" in item else ()
        for name in item:
            if name not in ("prompt", "messages", *with_messages, *OPTIONS):
                raise OptionError(
                    f"the line has a field {name!r}",
                    "without a template, fields are the prompt or messages and options",
                    did_you_mean(name, OPTIONS, "leave it out, or use a template: then fields are data"),
                )
        if "prompt" in item:
            item = {**self._prompt(item.pop("prompt")), **item}
        return item, ""

    def _prompt(self, text: Any) -> dict[str, Any]:
        if not self.as_chat:
            return {"prompt": text}
        if not isinstance(text, str):
            raise InputError(f"the prompt is {text!r:.80}", "a user message is a text", "give a text, or messages")
        return {"messages": [{"role": "user", "content": text}]}


Asking = PromptFormat
"""Its earlier name."""

_TEXTS = frozenset(
    ("prompt", "adapter", "stop", "banned_strings", "samplers", "dry_sequence_breakers", "regex", "grammar")
)


def _from_cell(name: str, value: Any) -> Any:
    """The value of an option that a cell holds: a number, or what else JSON writes; texts are what they are."""
    if name in _TEXTS or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise InputError(
            f"{name} = {value!r:.80}", "it is not a value as JSON writes it", "give a number, say"
        ) from None
