"""Tokens to text, one token at a time: whole characters only, and the pieces add up to the full decode exactly.

A tokenizer.json names a chain of decoders. Each becomes a stage that keeps just the state it needs (bytes of an
unfinished character, whether a token is the first), so a token costs the same however long the text is. The stages
state what the decoders of the `tokenizers` library do; tests compare the two on every kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import TokenizerError
from .cleanup import CleanUp
from .decoder_stages import (
    ByteFallback,
    ByteLevel,
    JoinWords,
    Metaspace,
    Replace,
    ReplaceText,
    Stage,
    StripText,
    StripToken,
    WordPiece,
    WordSuffix,
)


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


def _build_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    if decoder is None:
        return [JoinWords()]
    stages: list[Stage] = []
    # Behind "Fuse" and "ByteLevel" the text is one single token, which arrives here in pieces.
    fused = False
    for part in _flatten(decoder):
        kind = part["type"]
        if kind == "ByteLevel" and not fused:
            stages.append(ByteLevel())
        elif kind == "ByteFallback" and not fused:
            stages.append(ByteFallback())
        elif kind == "Metaspace" and not fused:
            stages.append(Metaspace(part["replacement"], part.get("prepend_scheme", "always") != "never"))
        elif kind == "WordPiece" and not fused:
            stages.append(WordPiece(part["prefix"], part["cleanup"]))
        elif kind == "BPEDecoder" and not fused:
            stages.append(WordSuffix(part["suffix"]))
        elif kind == "Replace" and not fused:
            stages.append(Replace(part["pattern"], part["content"]))
        elif kind == "Replace" and part["pattern"].get("String"):
            stages.append(ReplaceText(part["pattern"]["String"], part["content"]))
        elif kind == "Strip":
            strip = StripText if fused else StripToken
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
