"""The line editor of a chat: history, multi-line input, pasting, completion of slash-commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from ..terminal import Voice, state_folder, typed_line

_QUOTES = '"""'
# Values of TERM for terminals that can only print characters.
_WITHOUT_ABILITIES = ("dumb", "unknown")


class TypedText(NamedTuple):
    """Text that the user typed. If `quoted`, the text was in triple quotes and is always a message, never a command."""

    text: str
    quoted: bool

    @property
    def line(self) -> str:
        """The text as it would be typed."""
        return f"{_QUOTES}{self.text}{_QUOTES}" if self.quoted else self.text


class LineEditor:
    """Reads the user's input. The prompt is shown on stderr, so that stdout carries only the model's text.

    Enter sends the text. Alt-Enter adds a line, and so does Enter inside an open triple quote. Pasted line breaks are
    kept. Lines that were typed before the prompt appears are sent one after the other.

    Args:
        commands: slash-commands to complete.
        file_commands: the slash-commands that take a path.
        settings: names to complete after `/set`, and the values of each.
        adapters: function that returns the names to complete after `/lora`.
        voice: writer of messages.
    """

    def __init__(
        self,
        commands: Sequence[str],
        file_commands: Sequence[str],
        settings: Mapping[str, Sequence[str]],
        adapters: Callable[[], Sequence[str]],
        voice: Voice,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(voice),
            completer=_Commands(commands, file_commands, settings, adapters),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_bindings(),
            prompt_continuation=lambda width, line, wrapped: "... ",
            output=create_output(stdout=sys.stderr),
            enable_open_in_editor=True,
        )
        self.was_used = False
        self._is_plain = os.environ.get("TERM") in _WITHOUT_ABILITIES
        self._session.default_buffer.on_text_changed += self._note_use

    def _note_use(self, buffer: Buffer) -> None:
        self.was_used = True

    def ask(self, question: str) -> str:
        """Return a line typed in reply to a question. The line is not added to the history."""
        if self._is_plain:
            return _plain_line(question)
        session: PromptSession[str] = PromptSession(output=self._session.output)
        return session.prompt(question)

    def read(self, default: str = "") -> TypedText:
        """Read one message or command. Ctrl-C clears the line.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C on an empty line; `was_used` is True if text was typed before.
        """
        self.was_used = False
        text = self._read_plain(default) if self._is_plain else self._session.prompt(">>> ", default=default)
        stripped = text.strip()
        if len(stripped) >= 2 * len(_QUOTES) and stripped.startswith(_QUOTES) and stripped.endswith(_QUOTES):
            return TypedText(stripped.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n"), True)
        return TypedText(text, False)

    def _read_plain(self, default: str) -> str:
        """Read input on a terminal that cannot draw. It shows the text to edit; an empty line accepts it unchanged."""
        text = _plain_line(f"{default}\n>>> " if default else ">>> ") or default
        while _is_open(text):
            text += "\n" + _plain_line("... ")
        return text


def _plain_line(prompt: str) -> str:
    line = typed_line(prompt)
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    # Enter pressed while a reply is shown arrives as Ctrl-J, because the terminal was in its normal mode then.
    @bindings.add("enter")
    @bindings.add("c-j")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def add_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def clear_or_interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


def _is_open(text: str) -> bool:
    """Return True if a triple quote at the start is not closed yet."""
    stripped = text.strip()
    return stripped.startswith(_QUOTES) and (len(stripped) < 2 * len(_QUOTES) or not stripped.endswith(_QUOTES))


class _Commands(Completer):
    """Completes slash-commands and their arguments: paths, settings and adapters."""

    def __init__(
        self,
        commands: Sequence[str],
        file_commands: Sequence[str],
        settings: Mapping[str, Sequence[str]],
        adapters: Callable[[], Sequence[str]],
    ) -> None:
        self._commands, self._adapters = commands, adapters
        self._file_commands = file_commands
        self._settings = settings
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, space, argument = text.partition(" ")
        if not space:
            for name in self._commands:
                if name.startswith(command):
                    yield Completion(name, start_position=-len(command))
        elif command == "/set":
            name, space, value = argument.partition(" ")
            for word in self._settings.get(name, ()) if space else self._settings:
                if word.startswith(value if space else name):
                    yield Completion(word, start_position=-len(value if space else name))
        elif command == "/lora":
            name, equals, path = argument.partition("=")
            if equals:
                yield from self._paths.get_completions(Document(path), complete_event)
            else:
                for word in self._adapters():
                    if word.startswith(name):
                        yield Completion(word, start_position=-len(name))
        elif command in self._file_commands:
            yield from self._paths.get_completions(Document(argument), complete_event)


def _history(voice: Voice) -> History:
    """Return the history of earlier chats, in a file that only the user can read; in memory if writing it fails."""
    try:
        folder = state_folder()
        path = folder / "chat_history"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with path.open("ab"):
            pass
    except (OSError, RuntimeError) as error:
        voice.detail(f"the history is not saved: {error}")
        return InMemoryHistory()
    return FileHistory(str(path))
