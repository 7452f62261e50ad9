"""Which format of a tokenizer a folder has: the first of these. Where there is a tokenizer.json, that is the one."""

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
    """A format of tokenizers: in words, as patterns of file names, and what reads such a file."""

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
"""Names of all files that tokenizers are read from."""
_KNOWN = ", ".join(pattern for format in FORMATS for pattern in format.patterns)


def find_format(folder: Path) -> tuple[TokenizerFormat, Path] | None:
    """The format of a folder that has no tokenizer.json, and its file; None if it has none."""
    candidates = (
        (format, path) for format in FORMATS for pattern in format.patterns for path in sorted(folder.glob(pattern))
    )
    return next((candidate for candidate in candidates if candidate[1].is_file()), None)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer in any format."""
    return (folder / TOKENIZER_NAME).is_file() or find_format(folder) is not None


def convert_folder(facts: FolderFacts) -> tuple[Path, Conversion]:
    """The file of a folder's tokenizer, and what it becomes.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    match = find_format(facts.folder)
    data = file_bytes(match[1], TokenizerError) if match is not None else None
    if match is None or data is None:
        raise TokenizerError(
            f"{facts.folder}: {TOKENIZER_NAME} is missing",
            f"text is encoded with that file, or with one of {_KNOWN}",
            "copy it from the original model, or save it with transformers' save_pretrained()",
        )
    format, path = match
    if format is _SENTENCEPIECE and is_tiktoken(data):
        format = _TIKTOKEN
    try:
        return path, format.convert(path, data, facts)
    except ModelFormatError as error:
        raise TokenizerError(
            f"{path}: is not {format.title} that can be used",
            str(error),
            f"copy it again, or save {TOKENIZER_NAME} with transformers' save_pretrained()",
        ) from error
