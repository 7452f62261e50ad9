"""`genai chat`: talk with a model; one question and answer when stdin is not a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options as opt
from ..flag_groups import flag_groups
from ..sampling_flags import sampling_flags
from ..terminal import Voice, dump_prompt, footer, need_chat_template, read_stdin, say
from .replies import show_reply

if TYPE_CHECKING:
    from genai.chat import ChatSession
    from genai.llm import LLM


@sampling_flags
@flag_groups
def chat(
    model: opt.ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Ask this, print the answer and end.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System message.", show_default=False)] = None,
    on_overflow: Annotated[
        str,
        typer.Option(
            help="When the context is full: error, truncate (leave out old messages) or shift (also within a reply)."
        ),
    ] = "error",
    markdown: Annotated[bool, typer.Option("--markdown/--no-markdown", help="Render replies as Markdown.")] = False,
    *,
    flags: opt.TextFlags,
    sampling: dict[str, Any],
) -> None:
    """Chat with a model. Without a terminal, answers what comes from stdin and ends."""
    interactive = prompt is None and sys.stdin.isatty()
    if prompt is None and not interactive:
        prompt = read_stdin()
    from genai.chat import ChatSession

    def load(folder: Path | None, *, alone: bool = False) -> LLM:
        llm = flags.load_llm(folder, alone=alone)
        try:
            need_chat_template(llm)
        except BaseException:
            llm.close()
            raise
        return llm

    voice, shown = flags.voice, {"markdown": markdown, "dump": flags.show_prompt}
    session = ChatSession(load(model, alone=True), system=system, on_overflow=on_overflow, **sampling)
    try:
        if prompt is None:
            from .loop import Loop

            Loop(session, voice, load, show_stats=flags.stats is not False, **shown).run()
        else:
            _answer_once(session, voice, prompt, show_stats=bool(flags.stats), **shown)
    finally:
        session.llm.close()


def _answer_once(
    session: ChatSession, voice: Voice, prompt: str, *, markdown: bool, dump: bool, show_stats: bool
) -> None:
    events = session.send(prompt)
    if dump:
        dump_prompt(session.llm, session.prompt())
    show_reply(events, voice, markdown=markdown)
    if show_stats and session.last_reply is not None:
        say(footer(session.last_reply.completion, session.llm.context_size, session.options.get("seed")))
