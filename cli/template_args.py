"""`--template-arg NAME=VALUE`: variables of the chat template, on the command line and in `/set`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from genai.errors import OptionError, located

if TYPE_CHECKING:
    from genai.llm.batch.cluster import Cluster
    from genai.llm.llm import LLM

TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        help="NAME=VALUE: set a variable of the chat template, such as enable_thinking=false; may be given several "
        "times.",
    ),
]
# Variables that turn reasoning on and off in the templates of Qwen3, DeepSeek-V3.1, Granite and others.
_SWITCHES = ("enable_thinking", "thinking")
# The variable with the amount of reasoning in the template of gpt-oss, and its values.
_EFFORT, _EFFORTS = "reasoning_effort", ("low", "medium", "high")


def read_template_args(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the variables in texts of the form NAME=VALUE."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(
                f"--template-arg is {text!r:.80}",
                "NAME=VALUE is expected, and a name has letters, digits and underscores",
                "for example, use --template-arg enable_thinking=false",
            )
        if name in found:
            raise OptionError(
                f"--template-arg {name} is given more than once", "a variable has one value", "keep only one of them"
            )
        found[name] = value_of(value)
    return found


def value_of(text: str) -> Any:
    """Return the value of a JSON text, or any other text unchanged."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are not JSON


def check_template_args(llm: LLM | Cluster, variables: Mapping[str, Any], *, with_tools: bool = False) -> None:
    """Raise OptionError if the model's chat template does not read one of the variables."""
    try:
        llm.tokenizer.check_template_variables(variables, with_tools=with_tools)
    except OptionError as error:
        raise located(error, "--template-arg") from None


def thinking_of(value: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the variable that `/set think VALUE` changes; None restores the template's default.

    Args:
        names: the variables that the template reads.
    """
    switch = next((name for name in _SWITCHES if name in names), None)
    allowed = {"on": True, "off": False} if switch is not None else {}
    effort = {level: level for level in _EFFORTS} if _EFFORT in names else {}
    if not allowed and not effort:
        raise OptionError(
            f"/set think {value}: the chat template has no switch for reasoning",
            f"it reads {', '.join(names) or 'only messages, tools and special tokens'}",
            "to hide reasoning, redirect stderr; to set another variable, type /set template.NAME VALUE",
        )
    if value == "default":
        return dict.fromkeys([switch] if switch is not None else [_EFFORT])
    if value in allowed and switch is not None:
        return {switch: allowed[value]}
    if value in effort:
        return {_EFFORT: value}
    known = ", ".join([*allowed, *effort, "default"])
    raise OptionError(f"/set think {value}: invalid value", f"allowed: {known}", "use one of these values")


def thinking_now(given: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the value that `/set think` shows: "-" for the template's default; None if there is no such variable."""
    name = next((name for name in (*_SWITCHES, _EFFORT) if name in names), None)
    if name is None:
        return None
    value = given.get(name, "-")
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
