"""Texts, pairs of texts and token ids to the token sequences of an encoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import ContextOverflowError, InputError, kind_of
from ..models.encoder import TokenSequence
from ..models.folders import folder_errors
from ..text.backend import Encoder as BackendEncoder, library_errors, load_tokenizer

# A longer text is cut before it is encoded, so that encoding takes a bounded time. The first prefix has this number of
# characters per token of the limit; it grows until it has this number of times as many tokens as the limit.
_CHARACTERS, _GROWTH, _MARGIN = 32, 4, 2
# A prefix with too few tokens can be a part of an endless word, for which WordPiece has a single token, or of endless
# spaces. These are cut to this number of characters, or this number per token of the limit, which is more than a token
# of text has.
_WORD_CHARACTERS, _WORD_CHARACTERS_PER_TOKEN = 1 << 16, 128
Value = TypeVar("Value")


class TextEncoder:
    """Encodes texts with the special tokens of the tokenizer, and truncates them.

    Args:
        folder: folder of the tokenizer.
        max_length: maximum number of tokens, special tokens included.
        lower_case: True to convert texts to lower case, except for special tokens.
        keeps_end: True to remove the first tokens of a text that is too long, instead of the last ones.
        has_types: False if all token types are 0.

    Raises:
        TokenizerError: the tokenizer is missing or cannot be used.
    """

    def __init__(
        self, folder: Path, max_length: int, *, lower_case: bool = False, keeps_end: bool = False,
        has_types: bool = True,
    ) -> None:  # fmt: skip
        self.max_length, self.keeps_end, self._has_types = max_length, keeps_end, has_types
        with folder_errors(folder):
            loaded = load_tokenizer(folder)
            self._backend = loaded.backend
            self._backend.encode_special_tokens = loaded.splits
            if lower_case:
                self._backend.normalizer = _lowered(self._backend.normalizer)
            self._encoder = BackendEncoder(self._backend)
            self.special_ids = {id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}
            self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)

    def encode(
        self, texts: Sequence[str], *, truncate: bool = True, indices: Sequence[int] | None = None
    ) -> list[TokenSequence]:
        """Return the tokens of each text.

        Args:
            indices: the numbers by which errors name the texts [default: from 0].

        Raises:
            InputError: a text is not valid Unicode or has no tokens, or is too long and `truncate` is False.
            TokenizerError: the tokenizer takes too long.
        """
        names = range(len(texts)) if indices is None else indices
        kept = [self.bounded(text, name) for name, text in zip(names, texts, strict=True)]
        return self._encoded(kept, [str(name) for name in names], truncate)

    def encode_pairs(self, query: str, documents: Sequence[str], *, truncate: bool = True) -> list[TokenSequence]:
        """Return the tokens of a query followed by each document. If a pair is too long, its longer text is cut.

        Raises:
            InputError, TokenizerError: see `encode`.
        """
        first = self.bounded(query, "query")
        kept = [(first, self.bounded(text, index)) for index, text in enumerate(documents)]
        return self._encoded(kept, [str(index) for index in range(len(documents))], truncate)

    def sequence_of(self, ids: Any, index: int, *, truncate: bool = True) -> TokenSequence:
        """Return token ids that the caller gives, unchanged.

        Raises:
            InputError: an id is outside the vocabulary, or there are no ids or too many.
        """
        try:
            array = np.asarray(ids)
        except ValueError:  # lists of different lengths
            array = np.array(None)
        if array.ndim == 1 and not array.size:
            raise InputError(f"text {index} has no tokens", "at least one is needed", "leave the text out")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(
                f"text {index} is {kind_of(ids)}",
                "a text or a list of token ids (whole numbers) is expected",
                "pass texts, or ids of this model's tokenizer",
            )
        bad = array[(array < 0) | (array >= self.vocab_size)]
        if len(bad):
            raise InputError(
                f"text {index} has the token id {bad[0]}",
                f"ids are 0 to {self.vocab_size - 1}",
                "pass ids of this model's tokenizer",
            )
        self.check_length(len(array), index, truncate)
        return TokenSequence(array[: self.max_length].astype(np.int64))

    def content(self) -> str:
        """Return the tokenizer as JSON, for its identification."""
        text: str = self._backend.to_str()
        return text

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, special tokens included, after truncation."""
        (sequence,) = self.encode([text])
        return len(sequence)

    def _encoded(self, texts: Sequence[Any], names: Sequence[str], truncate: bool) -> list[TokenSequence]:
        pairs = bool(texts) and isinstance(texts[0], tuple)
        with library_errors("the texts cannot be encoded"):
            encodings = self._encoder.encodings(texts, add_special_tokens=True)
        found = []
        for name, encoding in zip(names, encodings, strict=True):
            self.check_length(len(encoding), name, truncate)
            ids, types = encoding.ids, encoding.type_ids
            if len(ids) > self.max_length:
                ids, types = self._truncated(encoding, pairs)
            if not ids:
                raise InputError(f"text {name} has no tokens", "the tokenizer adds none", "leave the text out")
            has_types = self._has_types and any(types)
            found.append(TokenSequence(np.array(ids, np.int64), np.array(types, np.int64) if has_types else None))
        return found

    def _truncated(self, encoding: Any, pairs: bool) -> tuple[list[int], list[int]]:
        """Return the ids and types of a text that is too long, with its special tokens."""
        ids, types, parts = encoding.ids, encoding.type_ids, encoding.sequence_ids
        lengths = [parts.count(number) for number in (0, 1)]
        keep = max(self.max_length - parts.count(None), 0)
        limits = _longest_first(lengths, keep) if pairs else [keep, 0]
        first = [length - limit if self.keeps_end else 0 for length, limit in zip(lengths, limits, strict=True)]
        seen, kept = [0, 0], []
        for index, part in enumerate(parts):
            if part is None:  # a special token of the tokenizer
                kept.append(index)
                continue
            if first[part] <= seen[part] < first[part] + limits[part]:
                kept.append(index)
            seen[part] += 1
        kept = kept[: self.max_length]
        return [ids[index] for index in kept], [types[index] for index in kept]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts that have all special tokens already. Raises TokenizerError."""
        with library_errors("the texts cannot be encoded"):
            return self._encoder.encode_all(texts, add_special_tokens=False)

    def check_length(self, length: int, name: object, truncate: bool) -> None:
        """Raise ContextOverflowError if a text is too long and may not be truncated."""
        if length > self.max_length and not truncate:
            raise ContextOverflowError(
                f"text {name} has {length} tokens or more",
                f"the limit is {self.max_length}",
                "shorten the text, or let it be truncated (truncate=True)",
            )

    def bounded(self, text: Any, name: object) -> str:
        """Return a text that is cut so far that it is encoded quickly, and still has more tokens than the limit."""
        if not isinstance(text, str):
            raise InputError(f"text {name} is {kind_of(text)}", "a text is expected", "pass a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"text {name} is not valid Unicode: character {error.start} is a lone surrogate",
                "a lone surrogate is half of a character",
                'remove it, for example with text.encode("utf-8", "replace").decode()',
            ) from error
        size = _CHARACTERS * self.max_length
        while len(text) > size:
            part: str = text[-size:] if self.keeps_end else text[:size]
            with library_errors("the texts cannot be encoded"):
                (encoding,) = self._encoder.encodings([part], add_special_tokens=False)
            if len(encoding) > _MARGIN * self.max_length:
                return part
            if size == _CHARACTERS * self.max_length:
                text = self._with_short_words(text)
            size *= _GROWTH
        return str(text)

    def _with_short_words(self, text: str) -> str:
        """Return a text whose words and runs of spaces are cut to a size that is more than enough for all tokens."""
        most = max(_WORD_CHARACTERS, _WORD_CHARACTERS_PER_TOKEN * self.max_length)
        for kind in (r"\S", r"\s"):
            run, rest = f"({kind}{{{most}}})", f"{kind}+"
            text = re.sub(rest + run if self.keeps_end else run + rest, r"\1", text)
        return text


def each_of(values: Iterable[Value], name: str) -> Iterator[Value]:
    """Return an iterator over texts. Raises InputError if `values` is no iterable, is one text, or has no order."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | bytearray | Mapping | Set):
        raise InputError(f"{name} is {kind_of(values)}", "a list of texts is expected", "pass a list")
    return iter(values)


def is_whole(value: object) -> bool:
    """Return True for a whole number of Python or NumPy, and False for a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _lowered(normalizer: Any) -> Any:
    """Return a normalizer that converts a text to lower case first. Special tokens are found before it runs."""
    from tokenizers import normalizers

    steps = [normalizers.Lowercase(), *([] if normalizer is None else [normalizer])]
    return normalizers.Sequence(steps)


def _longest_first(lengths: list[int], keep: int) -> list[int]:
    """Return the numbers of tokens of two texts that remain if tokens are removed from the longer text first."""
    first, second = lengths
    if first + second <= keep:
        return lengths
    shorter = min(first, second, keep // 2)
    return [shorter, keep - shorter] if first <= second else [keep - shorter, shorter]
