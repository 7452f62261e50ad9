"""Encodes text in which some occurrences of control tokens are ordinary text.

A mark, a character that occurs nowhere else in the text, is put inside each control token that is ordinary text. A chat
template can then render the text as usual, and the tokenizer no longer finds the token. To remove the marks without a
change to any other token, the text is encoded twice:

1. with the marks, to find the control tokens that remain;
2. without the marks, by a copy of the tokenizer in which every control token has a name that texts cannot contain. The
   control tokens that remain are replaced with these names.

So the tokenizer's own rules (normaliser, prefix space, flags of added tokens) apply to the text as a whole, and text
without control tokens has the same ids as before. Renaming the token in the model's vocabulary as well is necessary,
because some models (Unigram, WordLevel) find a token's name in ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.progress import task
from ..errors import InputError, TokenizerError
from .backend import Encoder

if TYPE_CHECKING:
    import tokenizers

# The signs of the Phaistos Disc are printable, and neither JSON nor changes of case alter them.
_MARKS = tuple(map(chr, range(0x101D0, 0x101FD)))
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def free_mark(texts: Iterable[str]) -> str:
    """Return a character that occurs in none of the texts. Raise InputError if there is none."""
    used = {mark for text in texts for mark in _MARKS if mark in text}
    free = next((mark for mark in _MARKS if mark not in used), None)
    if free is None:
        raise InputError(
            "the text contains every sign of the Phaistos Disc (U+101D0 to U+101FC)",
            "literal text is marked with one of these characters, which must not occur in the text",
            "remove one of these characters from the text",
        )
    return free


@dataclass(frozen=True)
class MarkedText:
    """A text with marks in those control tokens that are ordinary text.

    Attributes:
        text: the text with the marks.
        mark: the character; "" if the whole text is ordinary text.
        control: the names of the control tokens.
    """

    text: str
    mark: str
    control: frozenset[str]

    def clean(self) -> str:
        """Return the text without the marks."""
        return self.text.replace(self.mark, "")

    def prefix(self, length: int) -> MarkedText:
        """Return the marked form of the first `length` characters of clean()."""
        end = count = 0
        while count < length and end < len(self.text):
            count += self.text[end] != self.mark
            end += 1
        return MarkedText(self.text[:end], self.mark, self.control)

    def followed_by(self, more: str) -> MarkedText:
        """Return the text followed by another text, whose special tokens are special tokens."""
        mark = self.mark if self.mark not in more else free_mark([self.text, more])
        return MarkedText(self.text.replace(self.mark, mark) + more, mark, self.control)


class Marker:
    """Puts marks into texts.

    Args:
        control: the names of the control tokens.
        mark: the character.
    """

    def __init__(self, control: Collection[str], mark: str) -> None:
        self.mark = mark
        # A mark after the first character of each token, including tokens that overlap.
        self._starts = re.compile(f"(?={'|'.join(map(re.escape, control))}).", re.DOTALL) if control else None
        self._prefixes = {name[:size] for name in control for size in range(1, len(name))}
        self._suffixes = {name[size:] for name in control for size in range(1, len(name))}
        self._names, self._longest = "\0".join(control), max(map(len, control), default=0)

    def inside(self, text: str) -> str:
        """Return the text with a mark in each control token."""
        return text if self._starts is None else self._starts.sub(rf"\g<0>{self.mark}", text)

    def whole(self, text: str) -> str:
        """Return the text with marks that also separate it from the text around it.

        Otherwise, a part of a control token could become a token when a template joins texts.
        """
        return self._separated(text, with_words=True)

    def edges(self, text: str) -> str:
        """Return the text with marks that separate it from texts before and after it, if the template joins them.

        In contrast to `whole`, words inside the name of a control token, such as "text", have no marks. Templates may
        compare such words with constants.
        """
        return self._separated(text, with_words=False)

    def _separated(self, text: str, *, with_words: bool) -> str:
        text = self.inside(text)
        content = text.strip()
        if not content:
            return text
        sizes = range(1, min(self._longest, len(content)) + 1)
        is_part = with_words and content in self._names
        begins = is_part or any(content[:size] in self._suffixes for size in sizes)
        ends = is_part or any(content[-size:] in self._prefixes for size in sizes)
        marked = self.mark * begins + content + self.mark * ends
        start = text.index(content)
        return text[:start] + marked + text[start + len(content) :]


def added_control_tokens(backend: tokenizers.Tokenizer, special_ids: Collection[int | None]) -> frozenset[str]:
    """Return the names of the special tokens, and of the added tokens with one of the special ids.

    White space, single characters and the tokens of single bytes are parts of ordinary text.
    """
    return frozenset(
        token.content
        for id_, token in backend.get_added_tokens_decoder().items()
        if (token.special or id_ in special_ids) and can_be_control(token.content)
    )


def can_be_control(name: str) -> bool:
    """Return False for white space, single characters and the tokens of single bytes."""
    return len(name) > 1 and not name.isspace() and _BYTE.fullmatch(name) is None


class LiteralEncoder:
    """Encodes marked texts.

    Args:
        backend: the tokenizer.
        encoder: encodes with the tokenizer.
        control: the names of the control tokens.

    Raises:
        TokenizerError: the tokens cannot be renamed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, encoder: Encoder, control: frozenset[str]) -> None:
        from tokenizers import Tokenizer as Backend

        self._whole = encoder
        ids = {name: backend.token_to_id(name) for name in control}
        self._names = {id_: name for name, id_ in ids.items() if id_ is not None}
        with task("Preparing the tokenizer for literal text"):
            state = json.loads(backend.to_str())
            unknown = _unknown_id(state["model"])
            self._counted = {id_ for id_ in self._names if id_ != unknown}
            _rename(state, {name: _placeholder(id_) for id_, name in self._names.items()}, backend.normalizer)
            try:
                renamed = Backend.from_str(json.dumps(state))
            except Exception as error:  # the library raises plain Exceptions
                raise _not_renamed(str(error)) from error
        for id_, name in self._names.items():
            if renamed.token_to_id(_placeholder(id_)) != id_:
                raise _not_renamed(f"the token {name!r} does not keep its id {id_}")
        self._renamed = Encoder(renamed)

    def encode(self, marked: MarkedText) -> list[int]:
        """Return the ids of a marked text, without added special tokens.

        Raises:
            TokenizerError: encoding takes too long, or a control token of the text would be lost.
            BaseException: any exception of the tokenizers library.
        """
        if not marked.mark:
            return self._renamed.encode(marked.text, add_special_tokens=False)
        text, mark, end = marked.text, marked.mark, 0
        (found,) = self._whole.encodings([text], add_special_tokens=False)
        pieces: list[str] = []
        expected: list[int] = []
        for id_, (start, stop) in zip(found.ids, found.offsets, strict=True):
            name = self._names.get(id_)
            if name is None or text[start:stop].strip() != name:
                continue
            start = text.index(name, start)
            pieces += [text[end:start].replace(mark, ""), _placeholder(id_)]
            expected.append(id_)
            end = start + len(name)
        pieces.append(text[end:].replace(mark, ""))
        ids = self._renamed.encode("".join(pieces), add_special_tokens=False)
        if [id_ for id_ in ids if id_ in self._counted] != [id_ for id_ in expected if id_ in self._counted]:
            raise TokenizerError(
                "the special tokens around literal text cannot be kept apart from it",
                "the tokenizer finds different special tokens in the text with and without marks",
                "leave out the option literal",
            )
        return ids


def _not_renamed(why: str) -> TokenizerError:
    return TokenizerError(
        "literal text cannot be encoded with this tokenizer",
        f"the special tokens cannot be separated from the vocabulary: {why}",
        "leave out the option literal",
    )


def _placeholder(id_: int) -> str:
    """Return the name of a control token in the copy of the tokenizer. Texts cannot contain NUL."""
    return f"\0{id_}\0"


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """Return the id of characters without a token, which ordinary text may contain."""
    if isinstance(model["vocab"], dict):
        unknown: int | None = model["vocab"].get(model.get("unk_token"))
        return unknown
    number: int | None = model.get("unk_id")
    return number


def _rename(state: dict[str, Any], names: Mapping[str, str], normalizer: Any) -> None:
    """Rename tokens in the JSON form of a tokenizer."""
    state["post_processor"] = None  # refers to tokens by name, and does not apply to the text
    for token in state["added_tokens"]:
        token["content"] = name = names.get(token["content"], token["content"])
        if "\0" in name and normalizer is not None and name not in normalizer.normalize_str(name):
            token["normalized"] = False
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if not {left, right, left + right.removeprefix(prefix)} & names.keys()
        ]
