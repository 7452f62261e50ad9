"""The slash-commands of a chat, one function each."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genai.common.paths import expanded
from genai.errors import GenaiError, InputError, OptionError, located

from ..options import FLAGS, Flag, find_flag, read_lora, read_setting
from ..places import with_settings_named
from ..template_args import thinking_now, thinking_of, value_of
from ..terminal import dump_prompt, footer
from ..wrapping import shortened, table, width_of
from .reply import say_problem

if TYPE_CHECKING:
    from genai.llm.chat import ChatSession

    from .loop import Loop  # commands change the loop that runs them


@dataclass(frozen=True)
class Command:
    """A slash-command: its function, the form of its argument, and its help text."""

    run: Callable[[Loop, str], None]
    argument: str
    help: str


def run_command(loop: Loop, text: str) -> None:
    """Run a typed slash-command."""
    name, _, argument = text.strip().partition(" ")
    command = COMMANDS.get("/bye" if name in _ALSO_BYE else name)
    if command is None:
        close = difflib.get_close_matches(name[1:], [known[1:] for known in (*COMMANDS, *_ALSO_BYE)], 1)
        near = _ELSEWHERE.get(name) or (f"did you mean /{close[0]}?" if close else "")
        hint = f"{near} /help lists the commands".lstrip()
        raise InputError(f"unknown command {name!r}", "messages that begin with a slash are commands", hint)
    argument = argument.strip()
    if command.argument and not command.argument.startswith("[") and not argument:
        raise InputError(
            f"{name} needs {command.argument}", "the argument is required", f"type {name} {command.argument}"
        )
    if argument and not command.argument:
        raise InputError(f"{name} {argument}: unexpected argument", f"{name} takes no argument", f"type {name} alone")
    command.run(loop, argument)


def _help(loop: Loop, argument: str) -> None:
    rows = [(f"{name} {command.argument}", command.help) for name, command in COMMANDS.items()]
    loop.voice.say(table(rows, width_of(sys.stderr)), exactly=True)
    loop.voice.say(_KEYS)


_KEYS = '''\
Alt-Enter adds a line; """ begins and ends multi-line text; Tab completes commands; Up recalls earlier input.
Ctrl-C stops a reply and keeps its text, or clears the line. Ctrl-D, or Ctrl-C twice on an empty line, exits.'''


def _set(loop: Loop, argument: str) -> None:
    if not argument:
        _show_settings(loop)
        return
    name, _, value = argument.partition(" ")
    value = value.strip()
    if not value:
        _show_setting(loop, name)
        return
    if name in _SWITCHES:
        if value not in ("on", "off"):
            raise OptionError(f"/set {name} {value}: invalid value", "on or off is expected", f"type /set {name} on")
        setattr(loop, _SWITCHES[name], value == "on")
    elif name == "on-overflow":
        from genai.llm.chat import OVERFLOWS

        if value not in OVERFLOWS:
            raise OptionError(
                f"/set {name} {value}: invalid value", f"allowed: {', '.join(OVERFLOWS)}", "use one of these values"
            )
        loop.session.on_overflow = value
    elif name == "literal":
        if value not in _LITERAL:
            raise OptionError(
                f"/set {name} {value}: invalid value", "on, off or default is expected", f"type /set {name} on"
            )
        loop.session.literal = _LITERAL[value]
    elif name == "think":
        loop.session.set_template(thinking_of(value, loop.template_variables()))
    elif name.startswith(_TEMPLATE):
        _set_variable(loop, name.removeprefix(_TEMPLATE), value)
    else:
        option, setting = read_setting(name, value)
        before = {flag: _value(loop, flag) for flag in FLAGS}
        loop.session.set_options({option: setting})
        changed = [flag for flag in FLAGS if flag.option != option and _value(loop, flag) != before[flag]]
        also = "".join(f"; {flag.setting} is {_value(loop, flag)} now" for flag in changed)
        loop.voice.say(f"({name} is {value}{also})")
        return
    loop.voice.say(f"({name} is {value})")


def _set_variable(loop: Loop, name: str, text: str) -> None:
    """Set a variable of the chat template."""
    value = None if text == "default" else value_of(text)
    try:
        loop.session.set_template({name: value})
    except OptionError as error:
        raise located(error, f"/set {_TEMPLATE}{name}") from None


def _show_settings(loop: Loop) -> None:
    ours = loop.session.options
    rows = [(f"{' *'[flag.option in ours]} {flag.setting}", _value(loop, flag)) for flag in FLAGS]
    rows += [(f"  {name}", shown) for name, shown in _own_settings(loop).items()]
    loop.voice.say(table(rows, width_of(sys.stderr)), exactly=True)
    loop.voice.say(
        "(* marks values set here or by a flag; other values are the model's defaults; - means none or no limit)"
    )
    if drawn := [flag.setting for flag in FLAGS if _is_drawn(loop, flag)]:
        loop.voice.say(
            f"({', '.join(drawn)}: defaults of genai chat, because the model's files name no sampling; "
            "/set temperature 0 always chooses the most likely token)"
        )


def _is_drawn(loop: Loop, flag: Flag) -> bool:
    """Return True if a setting has the default of `genai chat`, because the model's files name no sampling."""
    session = loop.session
    if not session.draws or flag.option not in session.llm.chat_defaults or flag.option in session.options:
        return False
    return bool(getattr(session.params, flag.option) == session.llm.chat_defaults[flag.option])


def _show_setting(loop: Loop, name: str) -> None:
    """Print one setting's value and meaning."""
    if name in (settings := _own_settings(loop)):
        loop.voice.say(f"({name} is {settings[name]})")
    else:
        flag = find_flag(name)
        source = ", the default of genai chat for this model" if _is_drawn(loop, flag) else ""
        meaning = flag.help.partition(" [default")[0].rstrip(".")
        if meaning[1:2].islower():  # not a name such as ID
            meaning = meaning[0].lower() + meaning[1:]
        loop.voice.say(f"({flag.setting} is {_value(loop, flag)}{source}: {meaning})")


def _own_settings(loop: Loop) -> dict[str, str]:
    """Return the settings that are not sampling options."""
    switches = {name: _shown(getattr(loop, attribute)) for name, attribute in _SWITCHES.items()}
    given = loop.session.template
    variables = {
        f"{_TEMPLATE}{name}": json.dumps(given[name], ensure_ascii=False) if name in given else "-"
        for name in dict.fromkeys([*loop.template_variables(), *given])
    }
    thinking = {} if (now := thinking_now(given, loop.template_variables())) is None else {"think": now}
    literal = loop.session.literal
    if literal is None:
        literal = loop.session.llm.tokenizer.is_literal
    own = {"on-overflow": loop.session.on_overflow, "literal": _shown(literal)}
    return {**switches, **own, **thinking, **variables}


# Prefix of the settings that are variables of the chat template.
_TEMPLATE = "template."
_LITERAL = {"on": True, "off": False, "default": None}
# Settings of the loop itself, and the attributes that store them.
_SWITCHES = {"markdown": "markdown", "stats": "show_stats", "prompts": "dump"}


def setting_values(variables: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the names of settings for `/set`, and the values that completion offers for each.

    Args:
        variables: the variables that the chat template reads.
    """
    from genai.llm.chat import OVERFLOWS

    more = {
        **dict.fromkeys(_SWITCHES, ("on", "off")),
        "on-overflow": OVERFLOWS,
        "literal": tuple(_LITERAL),
        "think": ("on", "off", "default"),
        **{f"{_TEMPLATE}{name}": ("true", "false", "default") for name in variables},
    }
    return {flag.setting: ("on", "off", "default") if flag.kind is bool else ("default",) for flag in FLAGS} | more


def in_words_of_chat(error: GenaiError) -> GenaiError:
    """Return an error that calls options by the commands that set them."""
    settings = {flag.option: flag.setting for flag in FLAGS}
    made = with_settings_named(error, {**settings, "on_overflow": "on-overflow"})
    made.what, made.fix = (part.replace("--lora ", "/lora ") for part in (made.what, made.fix))
    made.fix = made.fix.replace("such as --choice yes --choice no", "such as /set choice yes,no")
    return made


def _value(loop: Loop, flag: Flag) -> str:
    return _shown(getattr(loop.session.params, flag.option), "," if flag.repeated else "; ")


def _shown(value: object, separator: str = "") -> str:
    """Format a setting's value as it would be typed."""
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return separator.join(_part(part) for part in value)
    return str(value)


def _part(value: object) -> str:
    """Format one value of a setting that has several; a bias consists of token ids and a number."""
    if not isinstance(value, tuple):
        return str(value).encode("unicode_escape").decode("ascii")
    tokens, bias = value
    return f"{':'.join(map(str, tokens)) if isinstance(tokens, tuple) else tokens}={bias}"


def _system(loop: Loop, argument: str) -> None:
    if argument:
        loop.session.system = None if argument == "none" else argument
    loop.voice.say(f"(system: {loop.session.system or 'none'})")


def _model(loop: Loop, argument: str) -> None:
    if not argument:
        loop.voice.say(f"({loop.session.llm.model.folder})")
        return
    loop.switch_model(expanded(argument))


def _lora(loop: Loop, argument: str) -> None:
    session = loop.session
    if argument == "off":
        session.use_adapter(None)
    elif "=" in argument:
        name, path, scale = read_lora(argument)
        session.llm.load_adapter(path, name, scale)
        session.use_adapter(name)
    elif argument:
        _use_adapter(session, argument)
    used = session.adapter if isinstance(session.adapter, str) else ", ".join(session.adapter or ())
    loop.voice.say(f"(adapter: {used or 'none'}; loaded: {', '.join(session.llm.adapters.names) or 'none'})")


def _use_adapter(session: ChatSession, name: str) -> None:
    """Use an adapter that is loaded, or that lies beside the model."""
    from genai.hub.known import BUNDLED_MODEL, bundled_model
    from genai.lora.named import registered_adapters

    llm = session.llm
    beside = registered_adapters(BUNDLED_MODEL if llm.model.folder == bundled_model() else llm.model.folder)
    if name not in llm.adapters.names and name in beside:
        llm.load_adapter(beside[name], name)
    try:
        session.use_adapter(name)
    except OptionError as error:
        if beside:
            error.why += f"; adapters beside the model: {', '.join(beside)}"
        raise


def _clear(loop: Loop, argument: str) -> None:
    loop.session.clear()
    loop.voice.say("(conversation cleared)")


def _retry(loop: Loop, argument: str) -> None:
    loop.answer(loop.session.retry())


def _undo(loop: Loop, argument: str) -> None:
    loop.voice.say(f"(removed: {shortened(loop.session.undo())})")


def _edit(loop: Loop, argument: str) -> None:
    loop.edit(loop.session.undo())
    loop.voice.say("(the last message and its reply were removed; edit the message and press Enter)")


def _save(loop: Loop, argument: str) -> None:
    if expanded(argument).is_file() and not loop.confirm(f"{argument} exists. Overwrite it?"):
        loop.voice.say("(not saved)")
        return
    loop.session.save(argument)
    loop.voice.say(f"(saved {len(loop.session.messages)} messages to {argument})")


def _load(loop: Loop, argument: str) -> None:
    loop.session.load(argument)
    messages = loop.session.messages
    loop.voice.say(f"(loaded {len(messages)} messages from {argument})")
    say_problem(loop.session, loop.voice)
    for message in messages[-2:]:
        who = {"user": ">>> ", "assistant": ""}.get(message["role"], f"{message['role']}: ")
        loop.voice.say(f"{who}{shortened(str(message.get('content') or ''), 400)}")


def _stats(loop: Loop, argument: str) -> None:
    reply = loop.session.last_reply
    if reply is None:
        loop.voice.say("(there is no reply yet)")
        return
    loop.voice.say(footer(reply.completion, loop.session.llm.context_size, reply.completion.seed))


def _prompt(loop: Loop, argument: str) -> None:
    if loop.sent:
        loop.voice.say(loop.sent, exactly=True)
    else:
        loop.voice.say("(no prompt has been sent yet)")


def _tokens(loop: Loop, argument: str) -> None:
    if text := argument or loop.sent:
        dump_prompt(loop.session.llm, text, with_pieces=True)
    else:
        loop.voice.say("(no prompt has been sent yet)")


def _bye(loop: Loop, argument: str) -> None:
    loop.running = False


COMMANDS: Mapping[str, Command] = {
    "/help": Command(_help, "", "show this help"),
    "/set": Command(_set, "[NAME VALUE]", "show or change settings, such as /set temperature 0.7 or /set think off"),
    "/system": Command(_system, "[TEXT]", 'show or change the system message; "none" removes it'),
    "/model": Command(_model, "[FOLDER]", "show the model, or switch to another"),
    "/lora": Command(_lora, "[NAME|off|NAME=PATH]", "show, use or load an adapter; off disables adapters"),
    "/clear": Command(_clear, "", "clear the conversation"),
    "/retry": Command(_retry, "", "generate the last reply again"),
    "/undo": Command(_undo, "", "remove the last message and its reply"),
    "/edit": Command(_edit, "", "remove the last reply and edit its message"),
    "/save": Command(_save, "FILE", "save the conversation to a file"),
    "/load": Command(_load, "FILE", "load a saved conversation"),
    "/stats": Command(_stats, "", "show statistics of the last reply"),
    "/prompt": Command(_prompt, "", "show the exact prompt that was last sent to the model"),
    "/tokens": Command(_tokens, "[TEXT]", "show the tokens of TEXT, or of the last prompt"),
    "/bye": Command(_bye, "", "exit (also /exit, /quit, exit and Ctrl-D)"),
}
_ALSO_BYE = ("/exit", "/quit")
# Commands of other programs (Ollama, llama.cpp, Claude Code), and what to type here.
_ELSEWHERE = {
    "/?": "did you mean /help?",
    "/show": "/set shows the settings, /model the model, and /system the system message;",
    "/regen": "did you mean /retry?",
    "/new": "did you mean /clear?",
    "/reset": "did you mean /clear?",
    "/read": 'to send a file, use genai chat -p "…" < FILE;',
}
FILE_COMMANDS = ("/model", "/save", "/load")
