"""Tokens to text, one token at a time: whole characters only, and the pieces add up to the full decode exactly.

A tokenizer.json names a chain of decoders. Each becomes a stage that keeps just the state it needs (bytes of an
unfinished character, whether a token is the first), so a token costs the same however long the text is. The stages
state what the decoders of the `tokenizers` library do; tests compare the two on every kind.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ..errors import TokenizerError

Rules: TypeAlias = tuple[tuple[str, str], ...]
RULES: Rules = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_RULES_OF_WORD_PIECE: Rules = (*RULES[:7], (" do not", " don't"), *RULES[7:])


def clean_up(text: str, rules: Rules = RULES) -> str:
    """The text without the spaces English does not want; the rules act one after the other, as in transformers."""
    for old, new in rules:
        text = text.replace(old, new)
    return text


class Detokenizer:
    """Turns a stream of vocabulary entries into text.

    Args:
        decoder: the "decoder" object of a tokenizer.json; None joins tokens with spaces.
        cleanup: whether the text is cleaned up as `clean_up` does it.

    Raises:
        TokenizerError: a decoder that cannot work token by token.
    """

    def __init__(self, decoder: Mapping[str, Any] | None, *, cleanup: bool = False) -> None:
        self._decoder = decoder
        self._cleanup = cleanup
        self._stages = self._new_stages()

    def feed(self, token: str) -> str:
        """The text that has become certain with this token: whole characters, often none."""
        return "".join(_run(self._stages, [token]))

    def flush(self) -> str:
        """The rest of the text (an unfinished character becomes U+FFFD); the next token starts a new text."""
        tokens: list[str] = []
        for index, stage in enumerate(self._stages):
            tokens += _run(self._stages[index + 1 :], stage.end())
        self._stages = self._new_stages()
        return "".join(tokens)

    def _new_stages(self) -> list[Stage]:
        return [*_build_stages(self._decoder), *([CleanUp()] if self._cleanup else [])]


def _run(stages: list[Stage], tokens: Iterable[str]) -> Iterable[str]:
    for stage in stages:
        tokens = [output for token in tokens for output in stage.feed(token)]
    return tokens


class Stage(ABC):
    """One decoder of the chain."""

    @abstractmethod
    def feed(self, token: str) -> Iterable[str]:
        """Take one token; give the tokens for the next stage that nothing later can change."""

    def end(self) -> Iterable[str]:
        """Give what was held back; nothing is fed afterwards."""
        return []


class ByteLevel(Stage):
    """Characters stand for bytes, bytes for UTF-8.

    GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest for U+0100 onwards.
    """

    # One table for all: every request has a chain of its own.
    _PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    BYTES: ClassVar[dict[str, int]] = {chr(byte): byte for byte in _PRINTABLE} | {
        chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(256)).difference(_PRINTABLE)))
    }

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: str) -> Iterable[str]:
        try:
            data = bytes([self.BYTES[character] for character in token])
        except KeyError:
            # An added token with other characters stands for itself.
            data = token.encode()
        return [self._utf8.decode(data)]

    def end(self) -> Iterable[str]:
        return [self._utf8.decode(b"", final=True)]


class ByteFallback(Stage):
    """A run of tokens like <0xE2> is UTF-8 as a whole, or else one U+FFFD per byte: it must end to become text."""

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, token: str) -> Iterable[str]:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                self._run.append(int(token[3:5], 16))
                return []
            except ValueError:
                pass
        return [*self.end(), token]

    def end(self) -> Iterable[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


@dataclass
class Metaspace(Stage):
    """A mark stands for a space; in the first token, for `first`: nothing where it is the prepended one."""

    mark: str
    first: str

    def feed(self, token: str) -> Iterable[str]:
        text = token.replace(self.mark, self.first)
        self.first = " "
        return [text]


@dataclass
class WordPiece(Stage):
    """Tokens with the prefix continue a word, others start one; cleanup removes the spaces English does not want."""

    prefix: str
    cleanup: bool
    is_first: bool = True

    def feed(self, token: str) -> Iterable[str]:
        text = token
        if not self.is_first:
            text = token.removeprefix(self.prefix) if token.startswith(self.prefix) else f" {token}"
        self.is_first = False
        return [clean_up(text, _RULES_OF_WORD_PIECE) if self.cleanup else text]


class Replace(Stage):
    """Replaces a text or a regular expression inside each token; the library itself does it, for its regex dialect."""

    def __init__(self, pattern: Mapping[str, str], content: str) -> None:
        from tokenizers import Regex, decoders

        self._decoder = decoders.Replace(Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"], content)

    def feed(self, token: str) -> Iterable[str]:
        return [self._decoder.decode([token])]

    def __deepcopy__(self, memo: object) -> Replace:
        # Without state there is nothing to copy, and the library's objects cannot be.
        return self


@dataclass
class Strip(Stage):
    """Takes up to `start` and `stop` characters like `content` off the ends of each token, or of the whole text."""

    content: str
    start: int
    stop: int
    whole: bool
    held: str = ""

    def feed(self, token: str) -> Iterable[str]:
        head = min(len(token) - len(token.lstrip(self.content)), self.start)
        token = token[head:]
        if self.whole:
            # Any other character ends the head.
            self.start = 0 if token else self.start - head
            token = self.held + token
        tail = len(token) - min(len(token) - len(token.rstrip(self.content)), self.stop)
        self.held = token[tail:]
        return [token[:tail]]


@dataclass
class WordSuffix(Stage):
    """A suffix ends a word: it stands for a space, except in the last token, which is therefore held back."""

    suffix: str
    held: str | None = None

    def feed(self, token: str) -> Iterable[str]:
        held, self.held = self.held, token
        return [] if held is None else [held.replace(self.suffix, " ")]

    def end(self) -> Iterable[str]:
        return [] if self.held is None else [self.held.replace(self.suffix, "")]


@dataclass
class JoinWords(Stage):
    """Without a decoder, tokens are words."""

    separator: str = ""

    def feed(self, token: str) -> Iterable[str]:
        text = self.separator + token
        self.separator = " "
        return [text]


@dataclass
class ReplaceText(Stage):
    """Replaces a text wherever it stands in the whole text; what may begin it at the end is held back."""

    old: str
    new: str
    held: str = ""

    def feed(self, token: str) -> Iterable[str]:
        *parts, tail = (self.held + token).split(self.old)
        lengths = range(min(len(tail), len(self.old) - 1), 0, -1)
        held = next((length for length in lengths if self.old.startswith(tail[-length:])), 0)
        self.held = tail[len(tail) - held :]
        return [self.new.join([*parts, tail[: len(tail) - held]])]

    def end(self) -> Iterable[str]:
        return [self.held]


_LONGEST_RULE = 4

# A rule begins with a space, and no rule but " ' " holds another. So no rule, nor one that acts on the result of
# another, reaches across the end of a word in front of a space, unless the word ends like a rule goes on behind it.
_CERTAIN = re.compile(r".*[^ 'n](?= )", re.DOTALL)


@dataclass
class CleanUp(Stage):
    """Cleans up what no rule can reach any more, and holds the rest back."""

    held: str = ""

    def feed(self, token: str) -> Iterable[str]:
        text = self.held + token
        if len(text) >= _LONGEST_RULE and " " not in text[-_LONGEST_RULE:]:
            end = len(text)
        else:
            certain = _CERTAIN.match(text)
            end = certain.end() if certain else 0
        self.held = text[end:]
        return [clean_up(text[:end])]

    def end(self) -> Iterable[str]:
        return [clean_up(self.held)]


_STAGES: Mapping[str, Callable[[Mapping[str, Any]], Stage]] = {
    "ByteLevel": lambda part: ByteLevel(),
    "ByteFallback": lambda part: ByteFallback(),
    "Metaspace": lambda part: Metaspace(part["replacement"], " " if part.get("prepend_scheme") == "never" else ""),
    "WordPiece": lambda part: WordPiece(part["prefix"], part["cleanup"]),
    "BPEDecoder": lambda part: WordSuffix(part["suffix"]),
    "Replace": lambda part: Replace(part["pattern"], part["content"]),
    "Strip": lambda part: Strip(part["content"], part["start"], part["stop"], whole=False),
}
# Behind "Fuse" and "ByteLevel" the text is one single token, which arrives here in pieces.
_FUSING = ("Fuse", "ByteLevel")
_STAGES_BEHIND: Mapping[str, Callable[[Mapping[str, Any]], Stage | None]] = {
    "Replace": lambda part: (
        ReplaceText(part["pattern"]["String"], part["content"]) if part["pattern"].get("String") else None
    ),
    "Strip": lambda part: Strip(part["content"], part["start"], part["stop"], whole=True),
}


def _build_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    if decoder is None:
        return [JoinWords()]
    stages: list[Stage] = []
    fused = False
    for part in decoder_parts(decoder):
        kind = part["type"]
        make = (_STAGES_BEHIND if fused else _STAGES).get(kind)
        stage = make(part) if make is not None else None
        if stage is not None:
            stages.append(stage)
        elif kind != "Fuse":
            raise TokenizerError(
                f"the decoder {kind!r} of tokenizer.json cannot work token by token",
                "it needs the whole text" + (" behind a decoder that joins tokens" if fused else ""),
                "decode() the complete token list instead of streaming it",
            )
        fused = fused or kind in _FUSING
    return stages


def decoder_parts(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The decoders of a chain, in order."""
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from decoder_parts(part)
    else:
        yield decoder
