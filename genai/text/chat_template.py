"""Chat messages to prompt text: which template a folder has, what messages must look like, and the rendering."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ChatTemplateError, InputError
from .files import CONFIG_NAME, read_object, read_text, special_tokens

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_NAME = "chat_template.jinja"
_MAX_TEMPLATE_CHARACTERS = 2**20


@dataclass(frozen=True)
class TemplateSource:
    """A template and where it came from."""

    text: str
    origin: str


class ChatTemplates:
    """The chat templates of a folder.

    A folder's template is in chat_template.jinja, or else in tokenizer_config.json under "chat_template": one text, or
    a list of {"name", "template"} of which "tool_use" serves conversations with tools and "default" all others.

    Args:
        folder: where the tokenizer files are; read when first needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: object,
        *,
        template_str: str | None = None,
        tools: object = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; see Tokenizer.apply_chat_template.

        Raises:
            InputError: messages, tools or variables are not what a template can read.
            ChatTemplateError: there is no template, or it is invalid, refused the messages, failed, or ran too long.
        """
        try:
            conversation = _checked_messages(_from_json("messages", messages))
            tool_list = _checked_tools(_from_json("tools", tools))
            extra = {name: _plain(value, name) for name, value in (variables or {}).items()}
        except RecursionError as error:
            raise InputError("the messages or tools are nested too deeply", str(error), "flatten them") from error
        if not isinstance(add_generation_prompt, bool):
            raise InputError(
                f"add_generation_prompt = {add_generation_prompt!r}", "True or False is expected", "pass a bool"
            )
        source = self._source(template_str, tool_list is not None)
        values = {
            **special_tokens(self._folder),
            "documents": None,
            **extra,
            "messages": conversation,
            "tools": tool_list,
            "add_generation_prompt": add_generation_prompt,
        }
        return _render(self._template(source), values, source.origin)

    def _source(self, template_str: object, with_tools: bool) -> TemplateSource:
        if template_str is not None:
            if not isinstance(template_str, str):
                raise InputError(
                    f"template_str is a {type(template_str).__name__}", "a template text is expected", "pass a str"
                )
            return TemplateSource(template_str, "template_str")
        path = self._folder / TEMPLATE_NAME
        text = read_text(path)
        if text is not None:
            return TemplateSource(text, str(path))
        return self._configured_source(with_tools)

    def _configured_source(self, with_tools: bool) -> TemplateSource:
        path = self._folder / CONFIG_NAME
        template = read_object(path).get("chat_template")
        if isinstance(template, str):
            return TemplateSource(template, str(path))
        if template is None:
            raise ChatTemplateError(
                f"{self._folder}: there is no chat template",
                f"neither {TEMPLATE_NAME} nor chat_template in {CONFIG_NAME} exists; the model may be a base model",
                "pass template_str, or format the prompt yourself and encode() it",
            )
        named = _named_templates(template, path)
        name = "tool_use" if with_tools and "tool_use" in named else "default"
        if name not in named:
            raise ChatTemplateError(
                f"{path}: chat_template has no template named {name!r}",
                f"its names are {', '.join(sorted(named)) or 'none'}",
                "pass the text of one of them as template_str",
            )
        return TemplateSource(named[name], f"{path}, template {name!r}")

    def _template(self, source: TemplateSource) -> Template:
        template = self._compiled.get(source.text)
        if template is None:
            template = _compile(source)
            if source.origin != "template_str":
                self._compiled[source.text] = template
        return template


def _named_templates(template: object, path: Path) -> dict[str, str]:
    entries = template if isinstance(template, list) else [template]
    named: dict[str, str] = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise ChatTemplateError(
                f"{path}: chat_template has an entry of type {type(entry).__name__} that is not a named template",
                "a text, or a list of objects with name and template, is expected",
                "correct the file, or pass template_str",
            )
        named[name] = text
    return named


def _compile(source: TemplateSource) -> Template:
    from jinja2 import TemplateSyntaxError

    from .template_sandbox import compile_template

    if len(source.text) > _MAX_TEMPLATE_CHARACTERS:
        raise ChatTemplateError(
            f"the chat template ({source.origin}) has {len(source.text)} characters",
            f"at most {_MAX_TEMPLATE_CHARACTERS} are allowed",
            "check that the file is a chat template",
        )
    try:
        return compile_template(source.text)
    except TemplateSyntaxError as error:
        what = f"the chat template ({source.origin}) is not valid in line {error.lineno}"
        raise ChatTemplateError(what, error.message or "", "correct the template, or pass template_str") from error
    except Exception as error:  # the parser and Python's compiler have limits of their own
        raise ChatTemplateError(
            f"the chat template ({source.origin}) cannot be compiled",
            f"{type(error).__name__}: {error}",
            "simplify the template, or pass template_str",
        ) from error


def _render(template: Template, values: Mapping[str, Any], origin: str) -> str:
    from .template_limits import LimitExceeded
    from .template_sandbox import TemplateRefusal, render

    try:
        return render(template, values)
    except TemplateRefusal as error:
        what = f"the chat template refused these messages: {error}"
        raise ChatTemplateError(what, f"a rule of {origin}", "change the messages as it says") from error
    except LimitExceeded as error:
        raise ChatTemplateError(
            f"the chat template ({origin}) was stopped: {error}",
            "a template comes with a model, so it may not run or grow without end",
            "shorten the messages; if they are short, correct the template",
        ) from error
    except Exception as error:  # an expression in a template can raise anything
        raise ChatTemplateError(
            f"the chat template ({origin}) failed: {error}",
            f"{type(error).__name__} in line {_failed_line(error)}",
            "check that the messages have the fields it reads, or pass template_str",
        ) from error


def _failed_line(error: BaseException) -> int | str:
    """The template's line in a traceback; jinja2 puts the template there as a file of its own."""
    line: int | str = "unknown"
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _from_json(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is a text that is not JSON", str(error), f"pass JSON, or {name} as a list") from error
    return parsed


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)):
        raise InputError(
            f"messages is a {type(messages).__name__}",
            "a list of messages, or its JSON text, is expected",
            'for example [{"role": "user", "content": "Hello"}]',
        )
    if not messages:
        raise InputError("messages is empty", "a conversation has at least one message", "add a user message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    """A copy without keys whose value is None: templates ask whether a key is there."""
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is a {type(message).__name__}", "an object is expected", 'with "role" and "content"')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(
            f"{where} has the role {role!r}", "a role is a text", 'add a "role", such as "user" or "assistant"'
        )
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InputError(f"{where} has no content", "only a message with tool_calls may lack it", 'add a "content"')
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise InputError(
            f"{where} has content of type {type(content).__name__}",
            "a text, or a list of parts, is expected",
            "convert it to a str",
        )
    plain: dict[str, Any] = _plain(message, where)
    return {name: value for name, value in plain.items() if value is not None}


def _checked_tools(tools: object) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(
            f"tools is a {type(tools).__name__}",
            "a list of objects (JSON schemas), or its JSON text, is expected",
            'for example [{"type": "function", "function": {"name": …}}]',
        )
    return [_plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _plain(value: object, where: str) -> Any:
    """A copy made of plain JSON types: an untrusted template must not meet objects with methods of their own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return dict(_plain_items(value, where))
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    # Subclasses (enumerations, numpy.float64) become the plain type; str() would call a method of theirs.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise InputError(
        f"{where} holds a {type(value).__name__}",
        "a template reads JSON types only",
        "convert it to text, number or list",
    )


def _plain_items(value: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if not isinstance(key, str):
            raise InputError(f"{where} has the key {key!r}", "keys are texts", "convert the key to a str")
        yield str(key), _plain(item, f"{where}.{key}")
