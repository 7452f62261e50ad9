"""Tokens to text, one token at a time: whole characters only, and the pieces add up to the full decode exactly.

A tokenizer.json names a chain of decoders. Each becomes a stage that keeps just the state it needs (bytes of an
unfinished character, whether a token is the first), so a token costs the same however long the text is. The stages
state what the decoders of the `tokenizers` library do; tests compare the two on every kind.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from ..errors import TokenizerError


class Stage(Protocol):
    """One decoder of the chain."""

    def feed(self, token: str) -> Iterable[str]:
        """Take one token; give the tokens for the next stage that nothing later can change."""

    def end(self) -> Iterable[str]:
        """Give what was held back."""


class Detokenizer:
    """Turns a stream of vocabulary entries into text.

    Args:
        decoder: the "decoder" object of a tokenizer.json; None joins tokens with spaces.

    Raises:
        TokenizerError: a decoder that cannot work token by token.
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self._decoder = decoder
        self._stages = _build_stages(decoder)

    def feed(self, token: str) -> str:
        """The text that has become certain with this token: whole characters, often none."""
        return "".join(_run(self._stages, [token]))

    def flush(self) -> str:
        """The rest of the text (an unfinished character becomes U+FFFD); the next token starts a new text."""
        tokens: list[str] = []
        for index, stage in enumerate(self._stages):
            tokens += _run(self._stages[index + 1 :], stage.end())
        self._stages = _build_stages(self._decoder)
        return "".join(tokens)


def _run(stages: list[Stage], tokens: Iterable[str]) -> Iterable[str]:
    for stage in stages:
        tokens = [output for token in tokens for output in stage.feed(token)]
    return tokens


def _build_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    if decoder is None:
        return [_JoinWords()]
    stages: list[Stage] = []
    # Behind "Fuse" and "ByteLevel" the text is one single token, which arrives here in pieces.
    fused = False
    for part in _flatten(decoder):
        kind = part["type"]
        if kind == "ByteLevel" and not fused:
            stages.append(_ByteLevel())
        elif kind == "ByteFallback" and not fused:
            stages.append(_ByteFallback())
        elif kind == "Metaspace" and not fused:
            stages.append(_Metaspace(part["replacement"], part.get("prepend_scheme", "always") != "never"))
        elif kind == "WordPiece" and not fused:
            stages.append(_WordPiece(part["prefix"], part["cleanup"]))
        elif kind == "Replace" and (not fused or len(part["pattern"].get("String", "")) == 1):
            stages.append(_Replace(part["pattern"], part["content"]))
        elif kind == "Strip":
            strip = _StripText if fused else _StripToken
            stages.append(strip(part["content"], part["start"], part["stop"]))
        elif kind != "Fuse":
            raise TokenizerError(
                f"the decoder {kind!r} of tokenizer.json cannot work token by token",
                "it needs the whole text" + (" behind a decoder that joins tokens" if fused else ""),
                "decode() the complete token list instead of streaming it",
            )
        fused = fused or kind in ("Fuse", "ByteLevel")
    return stages


def _flatten(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _flatten(part)
    else:
        yield decoder


def byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


class _ByteLevel:
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


class _ByteFallback:
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


class _Metaspace:
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


class _WordPiece:
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


class _Replace:
    """Replaces a text or a regular expression inside each token; the library itself does it, for its regex dialect."""

    def __init__(self, pattern: Mapping[str, str], content: str) -> None:
        from tokenizers import Regex, decoders

        self._decoder = decoders.Replace(Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"], content)

    def feed(self, token: str) -> Iterable[str]:
        return [self._decoder.decode([token])]

    def end(self) -> Iterable[str]:
        return []


class _StripToken:
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


class _StripText:
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


class _JoinWords:
    """Without a decoder, tokens are words."""

    def __init__(self) -> None:
        self._separator = ""

    def feed(self, token: str) -> Iterable[str]:
        text = self._separator + token
        self._separator = " "
        return [text]

    def end(self) -> Iterable[str]:
        return []
