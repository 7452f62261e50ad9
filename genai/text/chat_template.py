"""Chat messages to prompt text: the template is chosen, compiled, and rendered within limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ChatTemplateError, InputError
from .files import special_tokens
from .template_continuation import check_mode, cut_at_mark, mark_final
from .template_messages import checked_messages, checked_tools, from_json, plain
from .template_sources import TemplateSource, choose_template

if TYPE_CHECKING:
    from jinja2 import Template

_MAX_TEMPLATE_CHARACTERS = 2**20


class ChatTemplates:
    """The chat templates of a folder, compiled when first used; see template_sources for where they come from.

    Args:
        folder: where the tokenizer files are; read when first needed.
        special: the tokenizer's special tokens by role; what the files name comes first.
    """

    def __init__(self, folder: Path, special: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._special = dict(special or {})
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: object,
        *,
        template_str: str | None = None,
        template_name: str | None = None,
        tools: object = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; see Tokenizer.apply_chat_template.

        Raises:
            InputError: messages, tools or variables are not what a template can read.
            ChatTemplateError: there is no template, or it is invalid, refused the messages, failed, or ran too long.
        """
        field, begins_reply = check_mode(continue_final_message, add_generation_prompt)
        try:
            conversation = checked_messages(from_json("messages", messages))
            tool_list = checked_tools(from_json("tools", tools))
            extra = {name: plain(value, name) for name, value in (variables or {}).items()}
        except RecursionError as error:
            raise InputError("the messages or tools are nested too deeply", str(error), "flatten them") from error
        text = ""
        if field is not None:
            conversation, text = mark_final(conversation, field)
        source = self.source(template_str, template_name, with_tools=tool_list is not None)
        values = {
            **self._special,
            **special_tokens(self._folder),
            "documents": None,
            **extra,
            "messages": conversation,
            "tools": tool_list,
            "add_generation_prompt": begins_reply,
        }
        prompt = _render(self._template(source), values, source.origin)
        return prompt if field is None else cut_at_mark(prompt, text, source.origin)

    def source(
        self, template_str: object = None, template_name: object = None, *, with_tools: bool = False
    ) -> TemplateSource:
        """The template that `render` would use.

        Raises:
            InputError: template_str or template_name is not a text, or both are given.
            ChatTemplateError: there is no such template.
        """
        return choose_template(
            self._folder, template_str=template_str, template_name=template_name, with_tools=with_tools
        )

    def text(self) -> str:
        """The source of the template for conversations without tools; "" if there is none."""
        try:
            return self.source().text
        except ChatTemplateError:
            return ""

    def _template(self, source: TemplateSource) -> Template:
        template = self._compiled.get(source.text)
        if template is None:
            template = _compile(source)
            if source.origin != "template_str":
                self._compiled[source.text] = template
        return template


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
