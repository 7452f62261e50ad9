"""Conversion of a line's fields to an item of LLM.map."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...errors import InputError, OptionError, did_you_mean
from ...lora.store import AdapterChoice
from .lines import Lines
from .openai_format import OPTIONS, read_body, with_token_ids

# Fields that only lines with messages can have.
_PROMPTS = ("prompt", "text", "messages")
_WITH_MESSAGES = ("tools", "tool_choice", "parallel_tool_calls", "template")
_PART = re.compile(r"\{\{|\}\}|\{(\w[\w .-]*)\}|([{}])")


@dataclass(frozen=True)
class PromptTemplate:
    """A text with fields, such as "Summarise: {text}". Literal braces are written {{ and }}.

    Raises:
        OptionError: the text has an unmatched brace, or no fields.
    """

    text: str

    def __post_init__(self) -> None:
        wrong = next((match for match in _PART.finditer(self.text) if match[2]), None)
        if wrong is not None:
            raise OptionError(
                f"template {self.text!r:.200} has an unmatched {wrong[2]} at character {wrong.start() + 1}",
                "a field is written as {name}",
                "write {{ and }} for literal braces",
            )
        if not self.names:
            raise OptionError(
                f"template {self.text!r:.200} has no field",
                "without a field, every line would have the same prompt",
                "add a field, for example {text}",
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The field names, each once."""
        return tuple(dict.fromkeys(match[1] for match in _PART.finditer(self.text) if match[1]))

    def fill(self, fields: Mapping[str, Any]) -> str:
        """Return the text for a line. Raise InputError if the line lacks a field."""
        for name in self.names:
            if name not in fields:
                known = ", ".join(map(str, fields))[:200]
                raise InputError(
                    f"the line has no field {name!r}",
                    f"its fields are {known}",
                    did_you_mean(name, fields, "add the field to the line"),
                )
        return _PART.sub(lambda match: _written(match[1], fields[match[1]]) if match[1] else match[0][0], self.text)


def _written(name: str, value: Any) -> str:
    if value is None or value != value:  # NaN, which many tables use for missing values
        raise InputError(
            f"the field {name!r} is {'null' if value is None else 'NaN'}",
            "this word would become part of the prompt",
            "set a value, or an empty text",
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class PromptFormat:
    """The rules for converting lines to prompts.

    Attributes:
        template: creates the prompt from the line's fields, which then have no other meaning.
        as_chat: True if prompts become user messages, except prompts in bodies of OpenAI's format.
        adapter: adapters, with weights, for lines that name no adapter.
        variables: variables of the chat template for lines that become conversations; a line's variables override them.
    """

    template: PromptTemplate | None = None
    as_chat: bool = False
    adapter: AdapterChoice = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def custom_id(self, fields: Mapping[str, Any], number: int) -> str:
        """Return the line's ID in the output. Raise InputError if the ID is not a string."""
        custom_id = fields.get("custom_id")
        if isinstance(custom_id, int) and not isinstance(custom_id, bool):
            custom_id = str(custom_id)
        if custom_id is None or custom_id == "":
            return f"line-{number}"
        if not isinstance(custom_id, str):
            raise InputError(
                f"custom_id = {custom_id!r:.80}", "a string is expected", "write a unique string for each line"
            )
        return custom_id

    def check_columns(self, lines: Lines) -> None:
        """Check the columns of a table, so that a wrong name is one error instead of an error for each line.

        Raises:
            InputError: a table has no column for a field of the template, or none for the prompt.
            OptionError: a column of a table without a template is not an option.
        """
        if self.template is not None:
            for name in self.template.names:
                lines.check_column(name, "the template")
            return
        columns = lines.columns() if lines.is_table else None
        if columns is not None and "body" not in columns:
            self._check_names(lines.name, columns)

    @staticmethod
    def _check_names(table: str, columns: tuple[str, ...]) -> None:
        listed = f"the columns are {', '.join(columns)}"[:500]
        if not {"prompt", "messages", "text"} & set(columns):
            raise InputError(
                f"{table}: there is no column for the prompt",
                f"{listed}; without a template, a column named prompt, text or messages is needed",
                "pass a template that contains the prompt's column, such as {question}",
            )
        known = ("custom_id", "prompt", "messages", "text", *_WITH_MESSAGES, "chat_template_kwargs", *OPTIONS)
        unknown = [name for name in columns if name not in known]
        if unknown:
            raise OptionError(
                f"{table}: unknown column{'s' * (len(unknown) > 1)} {', '.join(map(repr, unknown))}"[:300],
                f"{listed}; without a template, the columns must be the prompt or messages, and options",
                did_you_mean(
                    unknown[0], known, "leave the column out, or use a template, which treats columns as data"
                ),
            )

    def item(
        self, fields: Mapping[str, Any], *, are_cells: bool = False, is_table: bool = False
    ) -> tuple[Mapping[str, Any], str]:
        """Return a line's fields as an item of LLM.map, and the name of the line's model or "".

        Args:
            fields: the line's fields.
            are_cells: True if all values are text, as in CSV files. Option values are then parsed as JSON.
            is_table: True if null stands for a missing field. In other lines, a null for "adapter" selects the base
                model, as None does in Python; a null for another option stands for its default.

        Raises:
            InputError: the fields contain no prompt.
            OptionError: an option is unknown or unsupported.
        """
        item, model = self._item(fields, are_cells=are_cells, is_table=is_table)
        if self.variables and "messages" in item:
            own = item.get("template") or {}
            item = {**item, "template": {**self.variables, **own} if isinstance(own, Mapping) else own}
        return (item if self.adapter is None else {"adapter": self.adapter, **item}), model

    def _item(self, fields: Mapping[str, Any], *, are_cells: bool, is_table: bool) -> tuple[Mapping[str, Any], str]:
        if self.template is not None:
            return self._prompt(self.template.fill(fields)), ""
        if "body" in fields:
            return read_body(fields)
        item = {
            name: value
            for name, value in fields.items()
            if name != "custom_id" and (value is not None or (name == "adapter" and not is_table))
        }
        if "text" in item and not {"prompt", "messages"} & set(item):
            item["prompt"] = item.pop("text")
        if are_cells:
            item = {name: _from_cell(name, value) for name, value in item.items() if value != ""}
        item = with_token_ids(item)
        if ("prompt" in item) == ("messages" in item):
            close = [did_you_mean(str(name), _PROMPTS) for name in item if name not in (*_PROMPTS, *OPTIONS)]
            raise InputError(
                f"the line has the fields {', '.join(map(str, fields)):.200}" if fields else "the line has no fields",
                "a line needs a field named prompt, text or messages",
                next(filter(None, close), "pass a template that contains the prompt's field, such as {question}"),
            )
        if "messages" in item and "chat_template_kwargs" in item:
            item["template"] = item.pop("chat_template_kwargs")
        with_messages = _WITH_MESSAGES if "messages" in item else ()
        for name in item:
            if name not in ("prompt", "messages", *with_messages, *OPTIONS):
                raise OptionError(
                    f"the line has a field {name!r}",
                    "without a template, the fields must be the prompt or messages, and options",
                    did_you_mean(name, OPTIONS, "leave the field out, or use a template, which treats fields as data"),
                )
        if "prompt" in item:
            item = {**self._prompt(item.pop("prompt")), **item}
        return item, ""

    def _prompt(self, text: Any) -> dict[str, Any]:
        if not self.as_chat:
            return {"prompt": text}
        if not isinstance(text, str):
            raise InputError(f"the prompt is {text!r:.80}", "a user message is a string", "pass a string, or messages")
        return {"messages": [{"role": "user", "content": text}]}


Asking = PromptFormat
"""The former name of PromptFormat."""

_TEXTS = frozenset(
    ("prompt", "adapter", "stop", "banned_strings", "samplers", "dry_sequence_breakers", "regex", "grammar")
)


def _from_cell(name: str, value: Any) -> Any:
    """Return the value of an option from a cell. The cell is parsed as JSON, unless the option is text."""
    if name in _TEXTS or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise InputError(
            f"{name} = {value!r:.80}", "the value is not valid JSON", "write a number, for example"
        ) from None
