"""`genai chat`: talk with a model; one question and answer when stdin is not a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .terminal import emit, footer, read_stdin, say

if TYPE_CHECKING:
    from genai.chat import ChatSession

HELP = """\
/help        this text
/clear       forget the conversation
/bye         leave (also Ctrl-D)
Ctrl-C stops a reply and keeps what was said; twice at the prompt it leaves."""


def chat(
    model: opt.ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Ask this, print the answer and end.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System message.", show_default=False)] = None,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = None,
    repeat_penalty: opt.RepeatPenalty = None,
    build: opt.Build = True,
    threads: opt.Threads = None,
    accuracy: opt.Accuracy = "auto",
    kv_type: opt.KvType = "auto",
    stats: opt.Stats = None,
) -> None:
    """Chat with a model. Without a terminal, answers what comes from stdin and ends."""
    search = opt.search_options(temperature, top_k, top_p, seed, repeat_penalty)
    interactive = prompt is None and sys.stdin.isatty()
    if prompt is None and not interactive:
        prompt = read_stdin()
    from genai.chat import ChatSession
    from genai.tokenizer import Tokenizer

    loaded = opt.load(model, threads, accuracy, kv_type, build)
    session = ChatSession(loaded, Tokenizer(loaded), system=system, max_tokens=max_tokens, **search)
    if prompt is not None:
        _answer(session, prompt)
        if stats:
            say(footer(session.stats, seed=seed))
        return
    say(f"{loaded.folder.name} · /help for commands, Ctrl-D to leave")
    _converse(session, show_stats=stats is not False, seed=seed)


def _answer(session: ChatSession, text: str) -> None:
    """Stream one reply to stdout, ending with a newline whatever happens."""
    try:
        for piece in session.send(text):
            emit(piece)
    finally:
        emit("\n")


def _converse(session: ChatSession, *, show_stats: bool, seed: int | None) -> None:
    from genai.errors import GenaiError

    interrupted = False
    while True:
        try:
            text = input(">>> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            if interrupted:
                say("")
                return
            say("\n(Ctrl-C again, Ctrl-D or /bye to leave)")
            interrupted = True
            continue
        interrupted = False
        if text.strip() == "/bye":
            return
        if text.startswith("/"):
            _command(session, text.strip())
            continue
        if not text.strip():
            continue
        try:
            _answer(session, text)
        except KeyboardInterrupt:
            say("(stopped)")
        except GenaiError as error:
            say(f"error: {error}")
            continue
        if show_stats:
            say(footer(session.stats, seed=seed))


def _command(session: ChatSession, text: str) -> None:
    if text == "/clear":
        session.clear()
        say("(forgotten)")
    elif text == "/help":
        say(HELP)
    else:
        say(f"unknown command {text.split()[0]!r}; /help lists them")
