"""The decoders of a tokenizer.json, one token at a time: each stage keeps just the state it needs."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Protocol


class Stage(Protocol):
    """One decoder of the chain."""

    def feed(self, token: str) -> Iterable[str]:
        """Take one token; give the tokens for the next stage that nothing later can change."""

    def end(self) -> Iterable[str]:
        """Give what was held back."""


def byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


class ByteLevel:
    """Characters stand for bytes, bytes for UTF-8."""

    def __init__(self) -> None:
        self._bytes = byte_of_character()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: str) -> Iterable[str]:
        try:
            data = bytes([self._bytes[character] for character in token])
        except KeyError:
            # An added token with other characters stands for itself.
            data = token.encode()
        return [self._utf8.decode(data)]

    def end(self) -> Iterable[str]:
        return [self._utf8.decode(b"", final=True)]


class ByteFallback:
    """A run of tokens like <0xE2> is UTF-8 as a whole, or else one U+FFFD per byte: it must end to become text."""

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, token: str) -> Iterable[str]:
        byte = _byte_value(token)
        if byte is not None:
            self._run.append(byte)
            return []
        return [*self.end(), token]

    def end(self) -> Iterable[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


def _byte_value(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class Metaspace:
    """A mark stands for a space; in the first token it stands for the prepended one, which is dropped."""

    def __init__(self, mark: str, prepended: bool) -> None:
        self._mark = mark
        self._space = "" if prepended else " "

    def feed(self, token: str) -> Iterable[str]:
        text = token.replace(self._mark, self._space)
        self._space = " "
        return [text]

    def end(self) -> Iterable[str]:
        return []


class WordPiece:
    """Tokens with the prefix continue a word, others start one; cleanup removes the spaces English does not want."""

    CLEANUP = (
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" do not", " don't"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    )

    def __init__(self, prefix: str, cleanup: bool) -> None:
        self._prefix = prefix
        self._cleanup = cleanup
        self._first = True

    def feed(self, token: str) -> Iterable[str]:
        text = token
        if not self._first:
            text = token.removeprefix(self._prefix) if token.startswith(self._prefix) else f" {token}"
        self._first = False
        if self._cleanup:
            for old, new in self.CLEANUP:
                text = text.replace(old, new)
        return [text]

    def end(self) -> Iterable[str]:
        return []


class Replace:
    """Replaces a text or a regular expression inside each token; the library itself does it, for its regex dialect."""

    def __init__(self, pattern: Mapping[str, str], content: str) -> None:
        from tokenizers import Regex, decoders

        self._decoder = decoders.Replace(Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"], content)

    def feed(self, token: str) -> Iterable[str]:
        return [self._decoder.decode([token])]

    def end(self) -> Iterable[str]:
        return []

    def __deepcopy__(self, memo: object) -> Replace:
        # Without state there is nothing to copy, and the library's objects cannot be.
        return self


class StripToken:
    """Takes up to `start` and `stop` characters like `content` off the ends of each token."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop

    def feed(self, token: str) -> Iterable[str]:
        _, token = _split_head(token, self._content, self._start)
        tail = min(len(token) - len(token.rstrip(self._content)), self._stop)
        return [token[: len(token) - tail]]

    def end(self) -> Iterable[str]:
        return []


class StripText:
    """Takes up to `start` and `stop` characters like `content` off the ends of the whole text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def feed(self, token: str) -> Iterable[str]:
        if self._start:
            head, token = _split_head(token, self._content, self._start)
            # Any other character ends the head.
            self._start = 0 if token else self._start - len(head)
        text = self._held + token
        tail = min(len(text) - len(text.rstrip(self._content)), self._stop)
        self._held = text[len(text) - tail :]
        return [text[: len(text) - tail]]

    def end(self) -> Iterable[str]:
        return []


def _split_head(text: str, content: str, most: int) -> tuple[str, str]:
    """Up to `most` characters like `content` at the start, and the rest."""
    length = min(len(text) - len(text.lstrip(content)), most)
    return text[:length], text[length:]


class WordSuffix:
    """A suffix ends a word: it stands for a space, except in the last token, which is therefore held back."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def feed(self, token: str) -> Iterable[str]:
        held, self._held = self._held, token
        return [] if held is None else [held.replace(self._suffix, " ")]

    def end(self) -> Iterable[str]:
        held, self._held = self._held, None
        return [] if held is None else [held.replace(self._suffix, "")]


class JoinWords:
    """Without a decoder, tokens are words."""

    def __init__(self) -> None:
        self._separator = ""

    def feed(self, token: str) -> Iterable[str]:
        text = self._separator + token
        self._separator = " "
        return [text]

    def end(self) -> Iterable[str]:
        return []


class ReplaceText:
    """Replaces a text wherever it stands in the whole text; what may begin it at the end is held back."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def feed(self, token: str) -> Iterable[str]:
        *parts, tail = (self._held + token).split(self._old)
        lengths = range(min(len(tail), len(self._old) - 1), 0, -1)
        held = next((length for length in lengths if self._old.startswith(tail[-length:])), 0)
        self._held = tail[len(tail) - held :]
        return [self._new.join([*parts, tail[: len(tail) - held]])]

    def end(self) -> Iterable[str]:
        held, self._held = self._held, ""
        return [held]
