"""Errors in the words of the place where the user is: options on the command line, `/set NAME VALUE` in a chat.

The library calls options by the names of their arguments in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, TypeVar

from genai.errors import (
    ChatTemplateError,
    ContextOverflowError,
    DeadlineError,
    GenaiError,
    InputError,
    ModelFolderError,
    OptionError,
    UnsupportedModelError,
)

from .variables import is_from_variable, python_name

_ABOUT_OPTIONS = (OptionError, ContextOverflowError, DeadlineError, UnsupportedModelError)
# The commands that have -p, and so the only commands whose errors name it.
_TAKE_QUESTIONS = {
    "chat": 'use -p to ask a question: `genai chat -p "…"`',
    "generate": 'use -p to ask a question: `genai generate -p "…"`',
}
# The maximum length of a file name on most systems. A longer MODEL is more likely a question than a path.
_LONGEST_NAME = 255
_Error = TypeVar("_Error", bound=GenaiError)


def with_flags_named(error: GenaiError, ctx: Any) -> None:
    """Make an error call the options of a command by their flags: max_tokens = 0 becomes --max-tokens 0.

    Options that environment variables set keep their names, because the user did not type their flags.
    """
    draft = ctx.params.get("draft")
    if isinstance(error, ModelFolderError) and draft and error.what.startswith(f"{draft}: "):
        error.what = f"--draft {error.what}"
    elif isinstance(error, ModelFolderError) and ctx.command.name in _TAKE_QUESTIONS:
        _name_prompt(error, ctx)
    if isinstance(error, ChatTemplateError) and ctx.params.get("tools"):
        error.fix = error.fix.replace("omit tools and tool_calls", "remove --tools")
    if ctx.command.name == "quantize":
        _name_quantize_onnx(error)
    if isinstance(error, _ABOUT_OPTIONS) or (isinstance(error, InputError) and re.match(r"\w+ = ", error.what)):
        flags = {
            python_name(parameter.name): max(parameter.opts, key=len)
            for parameter in ctx.command.params
            if _is_typed(parameter) and not is_from_variable(ctx, parameter)
        }
        _rename(error, flags, _command_line)


def with_settings_named(error: _Error, settings: Mapping[str, str]) -> _Error:
    """Return an error that calls options as they are typed in a chat: max_tokens = 0 becomes /set max-tokens 0.

    Args:
        settings: the names in `/set` of the options.
    """
    made = copy(error)
    if isinstance(made, _ABOUT_OPTIONS):
        _rename(made, settings, _in_chat)
    return made


def _is_typed(parameter: Any) -> bool:
    """Return True for an option that the help shows. Hidden options are earlier names."""
    return parameter.param_type_name == "option" and not parameter.hidden


def _name_prompt(error: ModelFolderError, ctx: Any) -> None:
    """Add the option for a question to the error for a MODEL that resembles no model."""
    from genai.models.folders import ASK_FOR_MODEL

    hint, text = _TAKE_QUESTIONS[ctx.command.name], str(ctx.params.get("model") or "")
    if "looks like a question" in error.why:
        error.fix = hint.replace("…", f"{text:.60}")
    elif (error.fix == ASK_FOR_MODEL and not any(map(ctx.params.get, ("prompt", "prompts")))) or len(
        text
    ) > _LONGEST_NAME:
        error.fix += f"; {hint}"


def _name_quantize_onnx(error: GenaiError) -> None:
    """Add the way to quantise a model that generates no text to the error for such a model."""
    if error.about == "encoder":
        error.fix = "use `genai embed` or `genai rerank`, which take quantised weights with --precision int8 or int4"
    elif error.about == "graph":
        error.fix += "; to quantise the graph, use `genai quantize-onnx`"


def _command_line(text: str, name: str, flag: str, part: str) -> str:
    text = re.sub(rf"{_word(name)} = ", f"{flag} ", text)
    return re.sub(_mention(name), flag, text)


def _in_chat(text: str, name: str, setting: str, part: str) -> str:
    if part == "fix":
        text = re.sub(rf"\b(remove|leave out) {_word(name)}", f"type /set {setting} default", text)
        text = re.sub(rf"\bleave {_word(name)} out( for the default)?", f"type /set {setting} default", text)
        text = re.sub(rf"\b(set|pass) {_word(name)}(?! =)", f"type /set {setting} VALUE", text)
        return re.sub(_mention(name), setting, re.sub(rf"{_word(name)} = ", f"/set {setting} ", text))
    if part == "what" and re.match(rf"{re.escape(name)}(?![\w])", text):
        text = re.sub(rf"^{re.escape(name)}( =)?", f"/set {setting}", text)
    return re.sub(_mention(name), setting, re.sub(rf"{_word(name)} = ", f"{setting} ", text))


def _word(name: str) -> str:
    """Return the pattern of a whole word that is no part of a flag, a path or a quoted text."""
    return rf"(?<![\w'\"./-])(?<!/set ){re.escape(name)}(?![\w'\"./-])"


def _mention(name: str) -> str:
    """Return the pattern of a mention of an option.

    A name such as "stop" is also an ordinary word, so it counts only at the beginning or after certain words.
    """
    if "_" in name:
        return _word(name)
    begins = rf"^{re.escape(name)}(?= (?:contains|contradicts|is|cannot|keeps|'|\"|\())"
    after = "|".join(f"(?<={verb} )" for verb in ("contradicts", "remove", "raise", "leave"))
    return rf"{begins}|(?:{after}){_word(name)}"


def _rename(error: GenaiError, names: Mapping[str, str], rename: Callable[[str, str, str, str], str]) -> None:
    """Rename options in all parts of an error, and write values as they are typed."""
    subject = next((new for name, new in names.items() if re.match(_word(name), error.what)), None)
    # The names of samplers are values of an option, and not options themselves.
    parts = ("what",) if error.what.startswith("samplers") else ("what", "why", "fix")
    for part in parts:
        text = getattr(error, part)
        for name, new in names.items():
            text = rename(text, name, new, part)
        setattr(error, part, _typed(text))
    if rename is _in_chat and subject is not None:
        error.fix = error.fix.replace("remove the option", f"type /set {subject} default")


def _typed(text: str) -> str:
    """Replace Python's notation: None, tuples with one value, and lists of texts."""
    text = text.replace(", or LLM.load_adapter)", ")")
    text = re.sub(r", or None \(([^()]*)\)", r"; default: \1", text)
    text = text.replace(", raise the priority,", ",")  # no command has this option
    text = text.replace(", or None,", "").replace(" (truncate=True)", " (--truncate)")
    text = re.sub(r"\(('[^']*'|-?[\w.]+),\)", r"\1", text)
    return text.replace('pass a list such as ["yes", "no"]', "give each allowed text, such as --choice yes --choice no")
