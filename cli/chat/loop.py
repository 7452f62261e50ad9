"""The loop of an interactive chat: read input, print a reply or run a command, and handle interrupts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from genai.errors import GenaiError
from genai.hub.built import name_without_hash

from ..reply_notes import empty_reply_reason, full_context_notes
from ..terminal import Voice, dump_prompt, footer, say
from ..wrapping import printable, shortened
from .commands import COMMANDS, FILE_COMMANDS, in_words_of_chat, run_command, setting_values
from .editor import LineEditor, TypedText
from .reply import answer

if TYPE_CHECKING:
    from genai.llm.chat import ChatSession
    from genai.llm.llm import LLM
    from genai.text.parsing import Event, ToolCall

    from .tools import ToolFunctions

# Share of the context at which the chat warns that it is nearly full.
_NEARLY_FULL = 0.85
# The result that the model receives for a call that the user refused.
_REFUSED = "Error: the user did not allow this call"
# Inputs that end the chat, in addition to the commands.
_FAREWELLS = ("exit", "quit", "exit()", "quit()", ":q")


class Loop:
    """An interactive chat.

    Args:
        load: function that loads another model, for `/model`.
        session_path: file that stores the conversation; None = do not save it.

    Attributes:
        session: the conversation.
        voice: writer of messages other than replies.
        show_stats: True to print a footer after each reply.
        markdown: True to render replies as Markdown.
        dump: True to print prompts.
        pending: text that the next line starts with; `/edit` sets it.
        sent: the exact prompt that was last sent to the model; "" = none yet.
        running: False after `/bye`.
        functions: functions that the model may call, with the user's permission.
    """

    def __init__(
        self,
        session: ChatSession,
        voice: Voice,
        load: Callable[[Path], LLM],
        *,
        show_stats: bool,
        markdown: bool,
        dump: bool,
        session_path: Path | None = None,
    ) -> None:
        self.session = session
        self._load, self._session_path = load, session_path
        self.voice = voice
        self.show_stats, self.markdown, self.dump = show_stats, markdown, dump
        self.pending = self.sent = ""
        self.running = True
        self._was_full = False
        self.functions: ToolFunctions | None = None
        self._editor = LineEditor(
            tuple(COMMANDS),
            FILE_COMMANDS,
            setting_values(self.template_variables()),
            lambda: ["off", *self.session.llm.adapters.names],
            voice,
        )

    def run(self) -> None:
        """Run until /bye, Ctrl-D, or Ctrl-C twice."""
        self._greet()
        interrupted = False
        while self.running:
            try:
                typed, self.pending = self._editor.read(self.pending), ""
                self._obey(typed)
                interrupted = False
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted and not self._editor.was_used:
                    return
                interrupted = True
                self.voice.say("(to exit, press Ctrl-C again or Ctrl-D, or type /bye)")

    def _greet(self) -> None:
        llm = self.session.llm
        context = f"context {llm.context_size:,} tokens"
        self.voice.say(f"{name_without_hash(llm.model.folder)} · {context} · /help for commands, Ctrl-D to exit")

    def switch_model(self, folder: Path) -> None:
        """Switch to another model and keep the messages. If the model cannot be loaded, nothing changes."""
        before, llm = self.session.llm, self._load(folder)
        try:
            self.session.switch(llm)
        except BaseException:
            llm.close()
            raise
        before.close()
        self._greet()

    def template_variables(self) -> tuple[str, ...]:
        """Return the names of the variables that the chat template reads."""
        return self.session.llm.tokenizer.template_variables(with_tools=bool(self.session.tools))

    def confirm(self, question: str) -> bool:
        """Ask a question; anything other than yes means no."""
        say(question)
        try:
            return self._editor.ask("[y/N] ").strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            return False

    def edit(self, message: str) -> None:
        """Put a message on the next line for editing, in quotes if it would otherwise be a command."""
        self.pending = TypedText(message, _is_farewell(message) or message.startswith("/")).line

    def _obey(self, typed: TypedText) -> None:
        text, quoted = typed
        try:
            if not quoted and _is_farewell(text):
                self.running = False
            elif not quoted and text.startswith("/"):
                run_command(self, text)
            elif text.strip():
                self.answer(self.session.send(text))
        except GenaiError as error:
            self.voice.error(in_words_of_chat(error))

    def _results(self) -> list[tuple[ToolCall, str]]:
        """Run the functions that the last reply calls, with the user's permission; [] if no call was permitted.

        If the user refuses only some of the calls, the model receives the refusals and the results of the other calls.
        """
        reply, functions = self.session.last_reply, self.functions
        if reply is None or functions is None:
            return []
        results, ran = [], False
        for call in reply.tool_calls:
            text = _REFUSED
            if self.confirm(f"Run {call.name}({printable(call.arguments_text)})?"):
                text, ran = functions.call(call.name, call.arguments), True
                self.voice.say(f"{call.name} → {printable(shortened(text, 200))}")
            results.append((call, text))
        return results if ran else []

    def answer(self, events: Iterator[Event]) -> None:
        """Show a reply, and the replies to the results of functions that it calls."""
        self._answer(events)
        try:
            while results := self._results():
                self._answer(self.session.give_results(results))
        except KeyboardInterrupt:  # in a function; replies have a separate handler
            self.voice.say("(stopped)")

    def _answer(self, events: Iterator[Event]) -> None:
        """Show a reply. Ctrl-C stops it and keeps the text so far."""
        before = self.session.num_left_out
        if self.dump:
            dump_prompt(self.session.llm, self.session.prompt())
        with _interrupts(self.session) as interrupted:
            answer(self.session, events, self.voice, markdown=self.markdown, is_loop=True)
        self.sent = self._prompt_of_reply() or self.sent
        if interrupted:
            self.voice.say("(stopped)")
        self._report(before)
        if self._session_path is not None:
            self.session.save(self._session_path, with_state=False)

    def _prompt_of_reply(self) -> str:
        """Return the prompt of the last reply; "" if there is none."""
        session = self.session
        if session.last_reply is None:
            return ""
        reply = session.messages.pop()
        try:
            return session.prompt()
        finally:
            session.messages.append(reply)

    def _report(self, left_out_before: int) -> None:
        session, limit = self.session, self.session.llm.context_size
        if session.last_reply is None:
            return
        if self.show_stats:
            self.voice.say(footer(session.last_reply.completion, limit, session.options.get("seed")))
        if (reason := empty_reply_reason(session)) is not None:
            self.voice.say(f"({reason})")
        gone = session.last_reply.completion.forgotten_tokens
        omitted = session.num_left_out if session.num_left_out > left_out_before else 0
        if session.on_overflow == "auto":
            self._say_once_that_the_context_is_full(gone, omitted)
        else:
            if gone:
                self.voice.say(f"(the context was full, so {gone:,} tokens were dropped)")
            if omitted:
                self.voice.say(f"(the context is full, so the first {omitted} messages are omitted)")
        for note in full_context_notes(session, "/set max-tokens", "; /clear starts over"):
            self.voice.say(note)
        if session.on_overflow == "auto" or session.was_cut or omitted:
            return
        if session.context_used > _NEARLY_FULL * limit:
            used = f"{session.context_used} of {limit} tokens"
            self.voice.say(f"(the context is nearly full: {used}; {_ADVICE[session.on_overflow]})")

    def _say_once_that_the_context_is_full(self, dropped: int, omitted: int) -> None:
        if (dropped or omitted) and not self._was_full:
            self._was_full = True
            how = f"{dropped:,} tokens of this reply's context" if dropped else f"the first {omitted} messages"
            self.voice.say(
                f"(the context is full: {how} were dropped, and old text will be dropped from now on; "
                "/clear starts over, /set on-overflow error stops instead)"
            )


def _is_farewell(text: str) -> bool:
    return text.strip().lower() in _FAREWELLS


@contextmanager
def _interrupts(session: ChatSession) -> Iterator[list[int]]:
    """Make Ctrl-C cancel the reply instead of raising at an arbitrary point. Yields the list of received signals."""
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        # There is nothing to cancel yet, or the reply does not stop: raise as usual.
        if not session.cancel() or len(came) > 1:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, stop)
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


_ADVICE = {
    "error": "/clear starts over; /set on-overflow truncate omits old messages",
    "truncate": "old messages will be omitted",
    "shift": "old messages will be omitted",
}
