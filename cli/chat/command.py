"""`genai chat`: the command, and the single reply that it prints if stdin is not a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.atomic_files import alone_with
from genai.common.progress import task
from genai.errors import InputError, OptionError

from .. import options as opt, terminal
from ..options import sampling_flags
from ..reply_notes import empty_reply_reason, full_context_notes
from ..template_args import TemplateArgs, check_template_args, read_template_args
from ..terminal import Voice, say
from .offer import choose_model, on_terminal
from .reply import answer, say_problem
from .tools import read_functions

if TYPE_CHECKING:
    from genai.llm.chat import ChatSession
    from genai.llm.llm import LLM


@sampling_flags
@opt.flag_groups
def chat(
    model: opt.ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="Print the reply to this message, preceded by piped input, and exit."),
    ] = None,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System message.")] = None,
    template_args: TemplateArgs = None,
    literal: opt.Literal = None,
    greedy: opt.Greedy = False,
    on_overflow: Annotated[
        str,
        typer.Option(
            help="When the context is full: auto (drop old text and continue), error, truncate (omit old messages) "
            "or shift (omit old messages even during a reply)."
        ),
    ] = "auto",
    session_name: Annotated[
        str | None,
        typer.Option("--session", help="Name of a saved conversation to continue or to start; it is saved at exit."),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", help="Python file with functions that the model may call after confirmation."),
    ] = None,
    markdown: Annotated[
        bool, opt.output_option("--markdown/--no-markdown", help="Render replies as Markdown.")
    ] = False,
    *,
    flags: opt.TextFlags,
    sampling: dict[str, Any],
) -> None:
    """Chat with a model. Without a terminal, print the reply to the text from stdin and exit.

    Without MODEL on a terminal, offers models to choose from; Enter takes the bundled model.
    """
    model, flags = flags.with_adapter(model)
    if prompt is None and not sys.stdin.isatty():
        prompt = terminal.read_stdin()
    elif prompt is not None:
        (prompt,) = terminal.with_stdin([prompt])
    if prompt is not None and not prompt.strip() and (model is None or model.exists()):
        fix = 'ask a question: `genai chat -p "What is 12 + 7?"`; to chat, run the command on a terminal without -p'
        raise InputError("the question is empty", "neither -p nor stdin contains text", fix)
    if model is None and prompt is None and not flags.quiet and on_terminal():
        model, flags = flags.with_adapter(choose_model())
    from genai.llm.chat import ChatSession

    functions = None if tools is None else read_functions(tools)
    called = None if functions is None else functions.tools
    variables = read_template_args(template_args)
    sampling |= opt.greedy_options(sampling) if greedy else {}

    def load(folder: Path | None, *, alone: bool = False) -> LLM:
        llm = flags.load_llm(folder, alone=alone)
        try:
            terminal.need_chat_template(llm, called)
        except BaseException:
            llm.close()
            raise
        return llm

    if prompt is None:
        from .loop import Loop  # the line editor loads slowly, so it is loaded before the first message is printed

    session_path = None if session_name is None else session_file(session_name)
    session_options: dict[str, Any] = {
        "system": system,
        "tools": called,
        "on_overflow": on_overflow,
        "ctx_shift": flags.shift,
        "draws": True,
        "literal": literal,
    }
    session = ChatSession(load(model, alone=True), **session_options, **sampling)
    try:
        check_template_args(session.llm, variables, with_tools=bool(called))
        session.set_template(variables)
        session.use_adapter(flags.adapter)
        with _session_saved_to(session, session_path, flags.voice, system, sampling, variables):
            if prompt is None:
                loop_options = {"show_stats": flags.stats is not False, "markdown": markdown, "dump": flags.show_prompt}
                loop = Loop(session, flags.voice, load, session_path=session_path, **loop_options)
                loop.functions = functions
                loop.run()
            else:
                _answer_once(session, prompt, flags, markdown=markdown)
    finally:
        session.llm.close()


def _answer_once(session: ChatSession, prompt: str, flags: opt.TextFlags, *, markdown: bool) -> None:
    events = session.send(prompt)
    if flags.show_prompt:
        terminal.dump_prompt(session.llm, session.prompt())
    answer(session, events, flags.voice, markdown=markdown)
    if (reason := empty_reply_reason(session)) is not None:
        flags.voice.say(f"({reason})")
    if session.last_reply is not None and (gone := session.last_reply.completion.forgotten_tokens):
        flags.voice.say(f"(the context was full, so {gone:,} tokens were dropped)")
    if session.tools and session.last_reply is not None and session.last_reply.tool_calls:
        flags.voice.say(
            "(no function was called: calls need confirmation; to confirm them, chat on a terminal without -p)"
        )
    for note in full_context_notes(session, "--max-tokens"):
        flags.voice.say(note)
    if flags.stats and session.last_reply is not None:
        say(terminal.footer(session.last_reply.completion, session.llm.context_size, session.options.get("seed")))


@contextmanager
def _session_saved_to(
    session: ChatSession,
    session_path: Path | None,
    voice: Voice,
    system: str | None,
    sampling: dict[str, Any],
    variables: dict[str, Any],
) -> Iterator[None]:
    """Continue the conversation in a file, and save it there at the end, even after an error."""
    if session_path is None:
        yield
        return
    with _locked(session_path):
        if session_path.exists():
            with task(f"Loading the session {session_path.stem}"):
                literal = session.literal
                session.load(session_path)
                session.literal = session.literal if literal is None else literal
            session.set_options(**sampling)  # flags override the saved options
            session.set_template(variables)
            session.system = session.system if system is None else system
            voice.say(f"(session {session_path.stem}: {len(session.messages)} messages)")
            say_problem(session, voice)
        try:
            yield
        finally:
            if session.messages or session_path.exists():
                with task(f"Saving the session {session_path.stem}"):
                    session.save(session_path)


@contextmanager
def _locked(session_path: Path) -> Iterator[None]:
    """Lock a session, so that two chats do not overwrite each other's messages."""
    with ExitStack() as stack:
        try:
            is_ours = stack.enter_context(alone_with(session_path))
        except OSError as error:
            raise _cannot_save(session_path.stem, error) from error
        if not is_ours:
            raise InputError(
                f"--session {session_path.stem}: another chat is using this session",
                "both chats would overwrite the same file",
                "close that chat, or choose another name",
            )
        yield


def _cannot_save(name: str, error: Exception) -> InputError:
    return InputError(
        f"--session {name}: the session cannot be saved", str(error), "set XDG_STATE_HOME to a writable folder"
    )


def session_file(name: str) -> Path:
    """Return the file of a named conversation. Creates its folder, which only the user can access."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise OptionError(
            f"--session is {name!r:.120}",
            "a name has at most 100 letters, digits, underscores, dots and dashes, and begins with a letter or digit",
            "choose another name",
        )
    try:
        folder = terminal.state_folder() / "sessions"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise _cannot_save(name, error) from error
    return folder / f"{name}.json"
