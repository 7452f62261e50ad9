"""Which chat template a folder has: chat_template.jinja and additional_chat_templates/, or tokenizer_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ChatTemplateError, InputError
from .files import CONFIG_NAME, read_object, read_text

TEMPLATE_NAME = "chat_template.jinja"
NAMED_FOLDER = "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"


@dataclass(frozen=True)
class TemplateSource:
    """A template and where it came from."""

    text: str
    origin: str


def choose_template(
    folder: Path, *, template_str: object = None, template_name: object = None, with_tools: bool = False
) -> TemplateSource:
    """The template given, the one asked for by name, "tool_use" where there are tools and it exists, else "default".

    Raises:
        InputError: template_str or template_name is not a text, or both are given.
        ChatTemplateError: the folder has no such template, or its files are malformed.
    """
    for name, value in (("template_str", template_str), ("template_name", template_name)):
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name} is a {type(value).__name__}", "a text is expected", "pass a str")
    if isinstance(template_str, str):
        if template_name is not None:
            raise InputError(
                f"template_str and template_name = {template_name!r}", "one template is rendered", "leave one out"
            )
        return TemplateSource(template_str, "template_str")
    named = folder_templates(folder)
    if template_name is None:
        template_name = TOOL_USE if with_tools and TOOL_USE in named else DEFAULT
    if template_name not in named:
        raise ChatTemplateError(
            f"{folder}: there is no chat template named {template_name!r}",
            f"its names are {', '.join(sorted(named))}",
            "pass one of them as template_name, or a template's text as template_str",
        )
    return named[str(template_name)]


def folder_templates(folder: Path) -> dict[str, TemplateSource]:
    """All templates of a folder by name; a single one is named "default".

    Template files, where there are any, replace the entry of tokenizer_config.json.

    Raises:
        ChatTemplateError: there is none, or the entry is malformed.
        TokenizerError: a file cannot be read.
    """
    named = _template_files(folder) or _configured_templates(folder / CONFIG_NAME)
    if not named:
        raise ChatTemplateError(
            f"{folder}: there is no chat template",
            f"neither {TEMPLATE_NAME} nor chat_template in {CONFIG_NAME} exists; the model may be a base model",
            "pass template_str, or format the prompt yourself and encode() it",
        )
    return named


def _template_files(folder: Path) -> dict[str, TemplateSource]:
    paths = {DEFAULT: folder / TEMPLATE_NAME}
    paths |= {path.stem: path for path in sorted((folder / NAMED_FOLDER).glob("*.jinja"))}
    texts = {name: (read_text(path), str(path)) for name, path in paths.items()}
    return {name: TemplateSource(text, origin) for name, (text, origin) in texts.items() if text is not None}


def _configured_templates(path: Path) -> dict[str, TemplateSource]:
    template = read_object(path).get("chat_template")
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
                "a text, or a list of objects with name and template, is expected",
                "correct the file, or pass template_str",
            )
        named[name] = TemplateSource(text, f"{path}, template {name!r}")
    return named
