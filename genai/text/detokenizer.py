"""Incremental decoding of single tokens to whole characters. The pieces add up to exactly the full decoded text.

A tokenizer.json defines a chain of decoders. Each decoder becomes a stage with minimal state (the bytes of an
unfinished character, or a flag for the first token), so the cost per token does not depend on the length of the text.
The stages reimplement the decoders of the `tokenizers` library; tests compare both implementations for every kind of
decoder.
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
    """Remove spaces around English punctuation and contractions, with the rules in the order of transformers."""
    for old, new in rules:
        text = text.replace(old, new)
    return text


class Detokenizer:
    """Decodes a stream of vocabulary entries to text.

    Args:
        decoder: the "decoder" object of a tokenizer.json; None = tokens are joined with spaces.
        cleanup: True if `clean_up` applies to the text.

    Raises:
        TokenizerError: a decoder does not support incremental decoding.
    """

    def __init__(self, decoder: Mapping[str, Any] | None, *, cleanup: bool = False) -> None:
        self._decoder = decoder
        self._cleanup = cleanup
        self._stages = self._new_stages()

    def feed(self, token: str) -> str:
        """Return the text that later tokens cannot change, which is a number of whole characters, often 0."""
        return "".join(_run(self._stages, [token]))

    def proceed(self) -> None:
        """Treat the next token as the continuation of a text, without what decoders do at the start of a text."""
        for stage in self._stages:
            stage.proceed()

    @property
    def is_inside_character(self) -> bool:
        """True if the tokens so far end with the first bytes of a character."""
        return any(stage.is_inside_character for stage in self._stages)

    def flush(self) -> str:
        """Return the rest of the text, with U+FFFD for an unfinished character. The next token starts a new text."""
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
    """One decoder of a chain."""

    @property
    def is_inside_character(self) -> bool:
        """True if the tokens so far end with the first bytes of a character."""
        return False

    @abstractmethod
    def feed(self, token: str) -> Iterable[str]:
        """Process one token, and return those tokens for the next stage that later input cannot change."""

    def end(self) -> Iterable[str]:
        """Return the output that was held back. To be called after the last token."""
        return []

    def proceed(self) -> None:  # noqa: B027 - most decoders treat the start of a text like the rest
        """Treat the next token as the continuation of a text."""


class ByteLevel(Stage):
    """Decodes characters to bytes, and bytes to UTF-8.

    The alphabet is GPT-2's byte-level alphabet: printable Latin-1 characters represent their own bytes, and characters
    from U+0100 upwards represent the other bytes.
    """

    # A class attribute, because every request has its own chain of stages.
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
            # An added token may contain other characters, and represents itself.
            data = token.encode()
        return [self._utf8.decode(data)]

    def end(self) -> Iterable[str]:
        return [self._utf8.decode(b"", final=True)]

    @property
    def is_inside_character(self) -> bool:
        return bool(self._utf8.getstate()[0])


class ByteFallback(Stage):
    """Decodes a run of tokens like <0xE2>, when it ends, as UTF-8, or to one U+FFFD per byte if the run is invalid."""

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

    @property
    def is_inside_character(self) -> bool:
        utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            utf8.decode(bytes(self._run))
        except UnicodeDecodeError:
            return False
        return bool(utf8.getstate()[0])


@dataclass
class Metaspace(Stage):
    """Replaces a marker with a space; in the first token, with `first` ("" if the tokenizer prepends the marker)."""

    mark: str
    first: str

    def feed(self, token: str) -> Iterable[str]:
        text = token.replace(self.mark, self.first)
        self.first = " "
        return [text]

    def proceed(self) -> None:
        self.first = " "


@dataclass
class WordPiece(Stage):
    """Joins a token with the prefix to the previous word, and starts a new word with any other token. `cleanup` applies
    `clean_up` with the rules of WordPiece."""

    prefix: str
    cleanup: bool
    is_first: bool = True

    def feed(self, token: str) -> Iterable[str]:
        text = token
        if not self.is_first:
            text = token.removeprefix(self.prefix) if token.startswith(self.prefix) else f" {token}"
        self.is_first = False
        return [clean_up(text, _RULES_OF_WORD_PIECE) if self.cleanup else text]

    def proceed(self) -> None:
        self.is_first = False


class Replace(Stage):
    """Replaces a string or regular expression within each token, by the library because of its regex dialect."""

    def __init__(self, pattern: Mapping[str, str], content: str) -> None:
        from tokenizers import Regex, decoders

        self._decoder = decoders.Replace(Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"], content)

    def feed(self, token: str) -> Iterable[str]:
        return [self._decoder.decode([token])]

    def __deepcopy__(self, memo: object) -> Replace:
        # The stage has no state to copy, and the library's objects cannot be copied.
        return self


@dataclass
class Strip(Stage):
    """Strips up to `start` leading and `stop` trailing characters `content` from each token, or from the whole text."""

    content: str
    start: int
    stop: int
    whole: bool
    held: str = ""

    def feed(self, token: str) -> Iterable[str]:
        head = min(len(token) - len(token.lstrip(self.content)), self.start)
        token = token[head:]
        if self.whole:
            # Any other character ends the leading run.
            self.start = 0 if token else self.start - head
            token = self.held + token
        tail = len(token) - min(len(token) - len(token.rstrip(self.content)), self.stop)
        self.held = token[tail:]
        return [token[:tail]]

    def proceed(self) -> None:
        if self.whole:
            self.start = 0


@dataclass
class WordSuffix(Stage):
    """Replaces the suffix at the end of a word with a space, or with nothing in the last token. So a token is held back
    until the next token arrives."""

    suffix: str
    held: str | None = None

    def feed(self, token: str) -> Iterable[str]:
        held, self.held = self.held, token
        return [] if held is None else [held.replace(self.suffix, " ")]

    def end(self) -> Iterable[str]:
        return [] if self.held is None else [self.held.replace(self.suffix, "")]


@dataclass
class JoinWords(Stage):
    """Joins tokens as words, for tokenizers without a decoder."""

    separator: str = ""

    def feed(self, token: str) -> Iterable[str]:
        text = self.separator + token
        self.separator = " "
        return [text]

    def proceed(self) -> None:
        self.separator = " "


@dataclass
class ReplaceText(Stage):
    """Replaces a string in the whole text. The stage holds back an end of the text that may start an occurrence."""

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

# Every rule starts with a space, and only " ' " has a second space. So no rule crosses the boundary between a word and
# the space after it, unless the word ends in ' (the start of " ' ") or in n (" n ' t" first becomes " n't").
_CERTAIN = re.compile(r".*[^ 'n](?= )", re.DOTALL)


@dataclass
class CleanUp(Stage):
    """Applies `clean_up` to the text that no later rule can change, and holds back the rest."""

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
# After "Fuse" and "ByteLevel", the whole text is one token, which arrives at these stages in pieces.
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
                f"the decoder {kind!r} of tokenizer.json does not support incremental decoding",
                "the decoder needs the whole text" + (" after a decoder that joins tokens" if fused else ""),
                "pass the complete token list to decode() instead of streaming the tokens",
            )
        fused = fused or kind in _FUSING
    return stages


def decoder_parts(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the decoders of a chain in order."""
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from decoder_parts(part)
    else:
        yield decoder
