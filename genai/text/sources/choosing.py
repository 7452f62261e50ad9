"""Selects the tokenizer format of a folder: tokenizer.json if it exists, else the first format with a matching file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import TokenizerError
from ...models.side_files import (
    OTHER_FORMATS,
    SENTENCEPIECE_NAMES,
    TEKKEN_NAMES,
    TIKTOKEN_NAMES,
    TOKENIZER_NAME,
    VOCAB_NAMES,
    WORD_PIECE_NAMES,
    SideFiles,
)
from ..files import FolderFacts
from .parts import Conversion, ModelFormatError
from .sentencepiece import convert_sentencepiece
from .tekken import convert_tekken
from .tiktoken import convert_tiktoken, is_tiktoken
from .vocab_merges import convert_vocab_merges
from .word_piece import convert_word_piece


@dataclass(frozen=True)
class TokenizerFormat:
    """A tokenizer format.

    Attributes:
        title: the format's name in messages.
        patterns: patterns of file names.
        convert: function that converts a file's contents.
    """

    title: str
    patterns: tuple[str, ...]
    convert: Callable[[Path, bytes, FolderFacts], Conversion]


_TIKTOKEN = TokenizerFormat("a tiktoken file", TIKTOKEN_NAMES, convert_tiktoken)
_SENTENCEPIECE = TokenizerFormat("a SentencePiece model", SENTENCEPIECE_NAMES, convert_sentencepiece)
FORMATS = (
    TokenizerFormat("a tekken file", TEKKEN_NAMES, convert_tekken),
    _TIKTOKEN,
    _SENTENCEPIECE,
    TokenizerFormat("a byte-level vocabulary", VOCAB_NAMES, convert_vocab_merges),
    TokenizerFormat("a WordPiece vocabulary", WORD_PIECE_NAMES, convert_word_piece),
)
PATTERNS = (TOKENIZER_NAME, *OTHER_FORMATS)
"""The names of all files from which tokenizers are loaded."""
_KNOWN = ", ".join(pattern for format in FORMATS for pattern in format.patterns)


def find_format(files: SideFiles) -> tuple[TokenizerFormat, str] | None:
    """Return the format of a folder without tokenizer.json, and the name of its file; None if there is none."""
    candidates = ((format, name) for format in FORMATS for pattern in format.patterns for name in files.names(pattern))
    return next((candidate for candidate in candidates if files.is_file(candidate[1])), None)


def has_tokenizer(source: Path | SideFiles) -> bool:
    """Return True if a folder has a tokenizer in any format."""
    files = SideFiles.of(source)
    return files.is_file(TOKENIZER_NAME) or find_format(files) is not None


def convert_folder(facts: FolderFacts) -> tuple[Path, Conversion]:
    """Return the file of a folder's tokenizer, and its conversion.

    Raises:
        TokenizerError: there is no tokenizer, or the tokenizer cannot be converted.
    """
    match = find_format(facts.files)
    data = facts.files.data(match[1]) if match is not None else None
    if match is None or data is None:
        raise TokenizerError(
            f"{facts.files.folder}: {TOKENIZER_NAME} is missing",
            f"to encode text, the toolkit needs this file or one of {_KNOWN}",
            "copy the file from the original model, or save it with save_pretrained() of transformers",
        )
    format, path = match[0], facts.files.path(match[1])
    if format is _SENTENCEPIECE and is_tiktoken(data):
        format = _TIKTOKEN
    try:
        return path, format.convert(path, data, facts)
    except ModelFormatError as error:
        raise TokenizerError(
            f"{path}: the file is not {format.title} that can be read",
            str(error),
            f"copy the file again, or save {TOKENIZER_NAME} with save_pretrained() of transformers",
        ) from error
