"""Selects the tokenizer format of a folder: tokenizer.json if it exists, else the first format with a matching file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...common.reading import file_bytes
from ...errors import TokenizerError
from ..files import TOKENIZER_NAME, FolderFacts
from .parts import Conversion, ModelFormatError
from .sentencepiece import convert_sentencepiece
from .tekken import convert_tekken
from .tiktoken import convert_tiktoken, is_tiktoken
from .vocab_merges import MERGES_NAME, convert_vocab_merges
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


SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v*")
_TIKTOKEN = TokenizerFormat("a tiktoken file", ("*.tiktoken", "tiktoken.model"), convert_tiktoken)
_SENTENCEPIECE = TokenizerFormat("a SentencePiece model", SENTENCEPIECE_NAMES, convert_sentencepiece)
FORMATS = (
    TokenizerFormat("a tekken file", ("tekken.json",), convert_tekken),
    _TIKTOKEN,
    _SENTENCEPIECE,
    TokenizerFormat("a byte-level vocabulary", ("vocab.json",), convert_vocab_merges),
    TokenizerFormat("a WordPiece vocabulary", ("vocab.txt",), convert_word_piece),
)
PATTERNS = (TOKENIZER_NAME, MERGES_NAME, *(pattern for format in FORMATS for pattern in format.patterns))
"""The names of all files from which tokenizers are loaded."""
_KNOWN = ", ".join(pattern for format in FORMATS for pattern in format.patterns)


def find_format(folder: Path) -> tuple[TokenizerFormat, Path] | None:
    """Return the format of a folder without tokenizer.json, and its file; None if there is none."""
    candidates = (
        (format, path) for format in FORMATS for pattern in format.patterns for path in sorted(folder.glob(pattern))
    )
    return next((candidate for candidate in candidates if candidate[1].is_file()), None)


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has a tokenizer in any format."""
    return (folder / TOKENIZER_NAME).is_file() or find_format(folder) is not None


def convert_folder(facts: FolderFacts) -> tuple[Path, Conversion]:
    """Return the file of a folder's tokenizer, and its conversion.

    Raises:
        TokenizerError: there is no tokenizer, or the tokenizer cannot be converted.
    """
    match = find_format(facts.folder)
    data = file_bytes(match[1], TokenizerError) if match is not None else None
    if match is None or data is None:
        raise TokenizerError(
            f"{facts.folder}: {TOKENIZER_NAME} is missing",
            f"to encode text, the toolkit needs this file or one of {_KNOWN}",
            "copy the file from the original model, or save it with save_pretrained() of transformers",
        )
    format, path = match
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
