"""Converts chat messages to prompt text: selects the folder's template, and renders it within limits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, ParamSpec, TypeVar

from ..errors import ChatTemplateError, DamagedTemplateError, GenaiError, InputError, OptionError, did_you_mean, kind_of
from ..models.side_files import CONFIG_NAME, NAMED_TEMPLATES, PROCESSOR_TEMPLATE_NAME, TEMPLATE_NAME, SideFiles
from . import template_messages
from .files import read_object, read_text, special_tokens
from .literal import MarkedText
from .literal_messages import ControlNames, ConversationMarker, LiteralCheck, take_flags
from .template_worker import SHARED, TemplateStopped

P = ParamSpec("P")
T = TypeVar("T")

_MAX_TEMPLATE_CHARACTERS = 2**20
# Variables of every template, which callers set with arguments and not as variables.
_OWN_VARIABLES = frozenset(("self", "messages", "tools", "add_generation_prompt"))


class RenderedText(str):
    """A prompt that a chat template wrote. It has all special tokens that the model needs, so encoding adds none.

    Attributes:
        marked: the text with marks in special tokens that are ordinary text; None if there are no such tokens.
    """

    __slots__ = ("marked",)
    marked: MarkedText | None

    def __new__(cls, text: str, marked: MarkedText | None = None) -> RenderedText:
        rendered = super().__new__(cls, text)
        rendered.marked = marked
        return rendered

    def prefix(self, length: int) -> RenderedText:
        """Return the first characters of the prompt."""
        return RenderedText(self[:length], None if self.marked is None else self.marked.prefix(length))

    def __add__(self, more: str) -> RenderedText:
        return RenderedText(super().__add__(more), None if self.marked is None else self.marked.followed_by(more))


def is_marked(text: str) -> bool:
    """Return True if a chat template wrote the text, and special tokens in parts of it are ordinary text."""
    return isinstance(text, RenderedText) and text.marked is not None


class ChatTemplates:
    """The chat templates of a folder, as they are when this object is created; see folder_templates for their sources.

    Args:
        source: the folder with the tokenizer files, or these files.
        special: the tokenizer's special tokens by role; the special tokens in the files take precedence.
        control: the names of the tokenizer's control tokens.
        added: the names of all added tokens that can be control tokens.

    Raises:
        TokenizerError: the files of the special tokens are malformed.
    """

    def __init__(
        self,
        source: Path | SideFiles,
        special: Mapping[str, str] | None = None,
        control: frozenset[str] = frozenset(),
        added: frozenset[str] = frozenset(),
    ) -> None:
        self._control, self._added = control, added
        files = SideFiles.of(source)
        self._folder = files.folder
        self._own_special = special_tokens(files)
        self._special = {**(special or {}), **self._own_special}
        # An error is raised when a template is needed.
        self._named = _attempt(folder_templates, files)
        self._reads: dict[str, tuple[str, ...] | None] = {}

    def render(self, messages: object, **arguments: Any) -> str:
        """Return the prompt text of a conversation; see Tokenizer.apply_chat_template (and chat_prompt for `complete`).

        Raises:
            InputError: messages, tools or variables are of a type that templates cannot read.
            OptionError: `complete` is set, and the template does not read one of the variables.
            ChatTemplateError: there is no template, or the template is invalid, rejected the messages, failed, or took
                too long.
        """
        return self._prepared(messages, **arguments).finished()

    def render_all(self, conversations: Sequence[Mapping[str, Any]]) -> list[str | GenaiError]:
        """Call `render` for several conversations, given as arguments of `render`. Return each prompt or error.

        Conversations with the same template are sent to the template process together. If that request fails, the cause
        is unknown, so each conversation is rendered again on its own.
        """
        prepared = [_attempt(self._prepared, **conversation) for conversation in conversations]
        groups: dict[TemplateSource, list[_Rendering]] = {}
        for rendering in prepared:
            if isinstance(rendering, _Rendering):
                groups.setdefault(rendering.source, []).append(rendering)
        for group in groups.values():
            _ask_together(group)
        return [
            rendering if isinstance(rendering, GenaiError) else _attempt(rendering.finished) for rendering in prepared
        ]

    def _prepared(
        self,
        messages: object,
        *,
        template_str: str | None = None,
        template_name: str | None = None,
        tools: object = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        variables: Mapping[str, Any] | None = None,
        complete: bool = False,
        literal: bool = False,
    ) -> _Rendering:
        field, begins_reply = template_messages.check_mode(continue_final_message, add_generation_prompt)
        try:
            conversation = template_messages.checked_messages(template_messages.from_json("messages", messages))
            tool_list = template_messages.checked_tools(template_messages.from_json("tools", tools))
            extra = {name: template_messages.plain(value, name) for name, value in (variables or {}).items()}
        except RecursionError as error:
            raise InputError("the messages or tools are nested too deeply", str(error), "reduce the nesting") from error
        flags = take_flags(conversation, literal)
        source = self.source(template_str, template_name, with_tools=tool_list is not None)
        if len(source.text) > _MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template ({source.origin}) has {len(source.text)} characters",
                f"the limit is {_MAX_TEMPLATE_CHARACTERS} characters",
                "check that the file is a chat template",
            )
        if complete and extra:
            self._check_reads(source, extra)
        values = {
            **self._special,
            "documents": None,
            **extra,
            "tools": tool_list,
            "add_generation_prompt": begins_reply,
        }
        objects = template_messages.with_object_arguments(conversation)
        check = None
        if literal or any(own.any for own in flags):
            names = ControlNames(self._control, self._written_by(source))
            marker = ConversationMarker(names, [source.text, json.dumps([values, objects], ensure_ascii=False)])
            values = marker.values(values) if literal else values
            conversation, objects = marker.messages(conversation, flags), marker.messages(objects, flags)
            has_marks = marker.mark in json.dumps([values, objects], ensure_ascii=False)
            check = LiteralCheck(marker.mark, marker.control, values, has_marks)
        rendering = _Rendering(source, values, conversation, objects, field, complete, check)
        if any(map(template_messages.has_parts, conversation)):
            marked = {"messages": template_messages.parts_marked(objects)}
            (seen,) = rendering.ask(values, [marked])
            rendering.conversation = template_messages.parts_as_read(objects, seen.get("text", ""))
        rendering.add_empty_contents()
        rendering.make_changes()
        return rendering

    def _written_by(self, source: TemplateSource) -> frozenset[str]:
        """Return the control tokens, and the other added tokens that a template writes, as in transformers."""
        return self._control | {name for name in self._added if name in source.text}

    def source(
        self, template_str: object = None, template_name: object = None, *, with_tools: bool = False
    ) -> TemplateSource:
        """Return `template_str`, the template named `template_name`, or the default.

        The default is "tool_use" if there are tools and the folder has that template, else "default".

        Raises:
            InputError: template_str or template_name is not a string, or both are given.
            ChatTemplateError: the folder has no such template, or its files are malformed.
        """
        for name, value in (("template_str", template_str), ("template_name", template_name)):
            if value is not None and not isinstance(value, str):
                raise InputError(f"{name} is {kind_of(value)}", "a string is expected", "pass a str")
        if isinstance(template_str, str):
            if template_name is not None:
                raise InputError(
                    f"template_str and template_name={template_name!r} are both set",
                    "only one template can be rendered",
                    "omit template_str or template_name",
                )
            return TemplateSource(template_str, "template_str")
        named = self._named
        if isinstance(named, GenaiError):
            raise named
        if template_name is None:
            template_name = TOOL_USE if with_tools and TOOL_USE in named else DEFAULT
        if template_name not in named:
            raise ChatTemplateError(
                f"{self._folder}: there is no chat template named {template_name!r}",
                f"the templates are {', '.join(sorted(named))}",
                "pass one of these names as template_name, or pass the text of a template as template_str",
            )
        return named[str(template_name)]

    def variables(self, *, with_tools: bool = False) -> tuple[str, ...]:
        """Return the names of the variables that the default template reads, as in Tokenizer.template_variables.

        Raises:
            ChatTemplateError: there is no template.
        """
        names = self._read_by(self.source(with_tools=with_tools)) or ()
        return tuple(name for name in names if name not in _OWN_VARIABLES and name not in self._special)

    def check_variables(self, variables: Iterable[str], *, with_tools: bool = False) -> None:
        """Raise OptionError if the default template does not read one of the variables, or if one is reserved."""
        names = list(variables)
        if reserved := [name for name in names if name in _OWN_VARIABLES]:
            raise OptionError(
                f"the variable {reserved[0]!r} of chat templates is reserved",
                "each conversation sets it",
                "choose another variable",
            )
        if names:
            self._check_reads(self.source(with_tools=with_tools), names)

    def _read_by(self, source: TemplateSource) -> tuple[str, ...] | None:
        """Return the names of all variables that a template reads; None if the template is invalid."""
        if source.text not in self._reads:
            try:
                names = SHARED.names(source.text)
            except TemplateStopped as error:
                raise _stopped(source.origin, str(error)) from error
            self._reads[source.text] = None if names is None else tuple(names)
        return self._reads[source.text]

    def _check_reads(self, source: TemplateSource, variables: Iterable[str]) -> None:
        names = self._read_by(source)
        unread = next((name for name in variables if names is not None and name not in names), None)
        if unread is None or names is None:
            return
        known = [name for name in names if name not in _OWN_VARIABLES and name not in self._special]
        raise OptionError(
            f"the chat template ({source.origin}) does not read the variable {unread!r}",
            f"it reads {', '.join(known) or 'only messages, tools and special tokens'}",
            did_you_mean(unread, known, "leave the variable out"),
        )

    def key(self) -> str:
        """Return a hash of the templates and special tokens, or of the error that the templates cause."""
        named = self._named
        contents: object = str(named)
        if not isinstance(named, GenaiError):
            contents = [{name: one.text for name, one in named.items()}, self._own_special]
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()

    def text(self) -> str:
        """Return the source of the template for conversations without tools; "" if there is no such template."""
        try:
            return self.source().text
        except ChatTemplateError:
            return ""


@dataclass
class _Rendering:
    """A conversation that is being rendered.

    Attributes:
        source: the template.
        values: the template's variables except the messages.
        originals: the messages that the caller passed.
        conversation: the messages in the form that the template reads.
        field: the field of the last message in which the prompt ends; None if the message is complete.
        complete: True if the template must write every message and the tools.
        literal: the check of literal texts; None if no text is literal.
        changes: changed variables of each rendering: first the prompt, then the checks for completeness.
        results: the template's result for each change; empty if the conversation is not rendered yet, or failed as part
            of a group.
    """

    source: TemplateSource
    values: Mapping[str, Any]
    originals: list[dict[str, Any]]
    conversation: list[dict[str, Any]]
    field: str | None
    complete: bool
    literal: LiteralCheck | None = None
    changes: Sequence[Mapping[str, Any]] = ()
    results: Sequence[Mapping[str, Any]] = ()
    _mark: str = ""

    def add_empty_contents(self) -> None:
        """Set missing contents to None, as in transformers, unless the template then fails or writes "None"."""
        messages = template_messages.with_empty_contents(self.conversation)
        if messages == self.conversation:
            return
        # One request for each, because a failure ends a request.
        without, empty = (
            self.ask(self.values, [{"messages": tried}])[0].get("text") for tried in (self.conversation, messages)
        )
        if empty is not None and (without is None or empty.count("None") <= without.count("None")):
            self.conversation = messages

    def make_changes(self) -> None:
        if self.field is not None:
            self.conversation, self._mark = template_messages.mark_final(self.conversation, self.field)
        self.changes = self._changes(self.conversation)

    def _changes(self, conversation: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
        others = template_messages.variations(conversation, self.values["tools"]) if self.complete else []
        literal = [] if self.literal is None else self.literal.variations(conversation)
        return [{"messages": conversation, **change} for change in [{}, *others, *literal]]

    def ask(self, values: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the template's result for each change."""
        try:
            return SHARED.render(self.source.text, values, changes)
        except TemplateStopped as error:
            raise _stopped(self.source.origin, str(error)) from error

    def finished(self) -> str:
        """Return the prompt."""
        results = self.results or self.ask(self.values, self.changes)
        first, *others = self._with_arguments_as_read(results)
        prompt = _text(first, self.source.origin)
        if self.literal is not None:
            number = self.literal.num_checks
            self.literal.check(prompt, others[len(others) - number :], self.source.origin)
            others = others[: len(others) - number]
        if self.complete:
            template_messages.check_heard(self.conversation, prompt, others, self.source.origin)
            template_messages.check_roles(self.conversation, self.source.text)
        if self.field is not None:
            prompt = template_messages.cut_at_mark(prompt, self._mark, self.source.origin)
        if self.literal is None:
            return RenderedText(prompt)
        marked = self.literal.marked(prompt)
        return RenderedText(marked.clean(), marked)

    def _with_arguments_as_read(self, results: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the results; if the template cannot read objects, render tool calls with their arguments as texts."""
        objects = template_messages.object_arguments(self.conversation)
        written = results[0].get("text")
        before = template_messages.count_python_forms(objects, written or "")
        if not objects or (written is not None and not before):
            return results
        conversation = template_messages.with_text_arguments(self.conversation, self.originals)
        again = self.ask(self.values, self._changes(conversation))
        # A user's message can contain the same Python syntax, which the template then writes both times.
        text = again[0].get("text")
        if text is None or (written is not None and template_messages.count_python_forms(objects, text) >= before):
            return results
        self.conversation = conversation
        return again


def _ask_together(group: Sequence[_Rendering]) -> None:
    """Render conversations with the same template in one request. If the request fails, their results stay empty."""
    changes = [{**rendering.values, **change} for rendering in group for change in rendering.changes]
    with suppress(InputError, ChatTemplateError):
        results = iter(group[0].ask({}, changes))
        for rendering in group:
            answers = list(islice(results, len(rendering.changes)))
            rendering.results = answers if len(answers) == len(rendering.changes) else ()


def _attempt(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | GenaiError:
    """Return the result of `work`, or the GenaiError that it raises."""
    try:
        return work(*arguments, **named)
    except GenaiError as error:
        return error


def _text(result: Mapping[str, Any], origin: str) -> str:
    """Return the prompt of a result, or raise its error."""
    if "text" in result:
        return str(result["text"])
    kind, message, line, it = result["kind"], result["message"], result["line"], f"the chat template ({origin})"
    if kind == "size":
        raise _stopped(origin, f"it wrote {message}")
    known = {
        "syntax": (
            f"{it} has an error in line {line}",
            message,
            "correct the template, or pass template_str in Python",
        ),
        "compile": (
            f"{it} cannot be compiled",
            message,
            "simplify the template, or pass template_str in Python",
        ),
        "refusal": (
            f"the chat template rejected these messages: {message}",
            f"a rule in {origin} forbids these messages",
            "change the messages to follow the rule",
        ),
    }
    fix = "check that the messages have the fields that the template reads, or pass template_str in Python"
    raise (DamagedTemplateError if kind in ("syntax", "compile") else ChatTemplateError)(
        *known.get(kind, (f"{it} failed: {message}", f"the template raised {kind} in line {line}", fix))
    )


def _stopped(origin: str, reason: str) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template ({origin}) was stopped: {reason}",
        "a template is untrusted code from a model folder, so its time and output are limited",
        "shorten the messages; if they are short, correct the template",
    )


DEFAULT, TOOL_USE = "default", "tool_use"


@dataclass(frozen=True)
class TemplateSource:
    """A template and its origin."""

    text: str
    origin: str


def folder_templates(files: SideFiles) -> dict[str, TemplateSource]:
    """Return all templates of a folder by name; a single template is named "default".

    Template files override the entry in tokenizer_config.json, which overrides the entry in chat_template.json.

    Raises:
        ChatTemplateError: there is no template, or the entry is malformed.
        TokenizerError: a file cannot be read.
    """
    named = _template_files(files) or _configured_templates(files, CONFIG_NAME)
    named = named or _configured_templates(files, PROCESSOR_TEMPLATE_NAME)
    if not named:
        raise ChatTemplateError(
            f"{files.folder}: there is no chat template",
            f"the folder has neither {TEMPLATE_NAME} nor a chat_template entry in {CONFIG_NAME} or "
            f"{PROCESSOR_TEMPLATE_NAME}; the model may be a base model",
            "pass template_str in Python, or pass the prompt as plain text instead of messages",
        )
    return named


def _template_files(files: SideFiles) -> dict[str, TemplateSource]:
    names = {DEFAULT: TEMPLATE_NAME} | {PurePath(name).stem: name for name in files.names(NAMED_TEMPLATES)}
    texts = {role: (read_text(files, name), str(files.path(name))) for role, name in names.items()}
    return {role: TemplateSource(text, origin) for role, (text, origin) in texts.items() if text is not None}


def _configured_templates(files: SideFiles, file: str) -> dict[str, TemplateSource]:
    path, template = files.path(file), read_object(files, file).get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {DEFAULT: TemplateSource(template, str(path))}
    named: dict[str, TemplateSource] = {}
    for entry in template if isinstance(template, list) else [template]:
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise ChatTemplateError(
                f"{path}: chat_template has an entry of type {type(entry).__name__} that is not a named template",
                "chat_template must be a string, or a list of objects with a name and a template",
                "correct the file, or pass template_str in Python",
            )
        named[name] = TemplateSource(text, f"{path}, template {name!r}")
    return named
