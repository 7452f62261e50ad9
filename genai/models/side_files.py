"""The files of a model folder other than its configuration, graphs and weights: tokenizer, templates, defaults."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..common.reading import file_bytes
from ..errors import ConfigError, TokenizerError
from .config import Config

TOKENIZER_NAME = "tokenizer.json"
TEKKEN_NAMES = ("tekken.json",)
TIKTOKEN_NAMES = ("*.tiktoken", "tiktoken.model")
SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v*")
VOCAB_NAMES, MERGES_NAME = ("vocab.json",), "merges.txt"
WORD_PIECE_NAMES = ("vocab.txt",)
OTHER_FORMATS = (
    *TEKKEN_NAMES, *TIKTOKEN_NAMES, *SENTENCEPIECE_NAMES, *VOCAB_NAMES, MERGES_NAME, *WORD_PIECE_NAMES
)  # fmt: skip
"""Patterns for the names of tokenizers in folders without TOKENIZER_NAME."""

CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
ADDED_NAME = "added_tokens.json"
TEMPLATE_NAME = "chat_template.jinja"
PROCESSOR_TEMPLATE_NAME = "chat_template.json"
"""The template of older models that also read images: an object with the key `chat_template`."""
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
MODEL_CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
_OTHERS = (
    CONFIG_NAME, SPECIAL_TOKENS_NAME, ADDED_NAME, TEMPLATE_NAME, PROCESSOR_TEMPLATE_NAME, NAMED_TEMPLATES,
    MODEL_CONFIG_NAME, GENERATION_NAME
)  # fmt: skip


class SideFiles:
    """The side files of a folder. Files are read when they are needed, or all at once by `keep`.

    A path can name another file later. Therefore, a model keeps the side files that it was loaded with, and everything
    that is made for the model later, such as a tokenizer, reads these.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[str, bytes | TokenizerError | None] | None = None

    @classmethod
    def of(cls, source: Path | SideFiles) -> SideFiles:
        """Return the side files of a folder; side files are returned unchanged."""
        return source if isinstance(source, SideFiles) else cls(source)

    def keep(self) -> SideFiles:
        """Read all files now. Later changes to the folder are then not visible. Returns self.

        A file that cannot be read raises its error when it is needed. Other formats of a tokenizer are not read if
        there is a tokenizer.json.
        """
        has_tokenizer = self.is_file(TOKENIZER_NAME)
        patterns = (TOKENIZER_NAME, *(() if has_tokenizer else OTHER_FORMATS), *_OTHERS)
        names = [name for pattern in patterns for name in self.names(pattern)]
        self._kept = {name: self._attempt(name) for name in names}
        return self

    def path(self, name: str) -> Path:
        """Return the path of a file, for messages."""
        return self.folder / name

    def names(self, pattern: str) -> list[str]:
        """Return the names of the files that match a pattern, relative to the folder, sorted."""
        if self._kept is not None:
            return sorted(name for name in self._kept if fnmatchcase(name, pattern))
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob(pattern))

    def is_file(self, name: str) -> bool:
        """Return True if there is a regular file of this name."""
        if self._kept is None:
            return os.path.isfile(self.path(name))  # noqa: PTH113 - False also if the folder cannot be read
        return isinstance(self._kept.get(name), bytes)

    def data(self, name: str) -> bytes | None:
        """Return the contents of a file; None if it is missing. Raise TokenizerError if it cannot be read."""
        if self._kept is None:
            return file_bytes(self.path(name), TokenizerError)
        found = self._kept.get(name)
        if isinstance(found, TokenizerError):
            raise found
        return found

    def same_as(self, other: SideFiles) -> bool:
        """Return True if both have the same files with the same contents, and keep them."""
        return self._kept is not None and self._kept == other._kept

    def _attempt(self, name: str) -> bytes | TokenizerError | None:
        try:
            return file_bytes(self.path(name), TokenizerError)
        except TokenizerError as error:
            return error


@dataclass(frozen=True)
class LoadedFolder:
    """A model folder as it was when its model was loaded.

    Attributes:
        config: the configuration.
        side_files: the side files of the folder.
        tokenizer_files: the side files of the tokenizer's folder, usually the same ones; None if that folder is outside
            the model folder.
    """

    config: Config
    side_files: SideFiles
    tokenizer_files: SideFiles | None

    @classmethod
    def read(cls, config: Config) -> LoadedFolder:
        """Read the side files of a configuration's folder."""
        config, side_files = copy.copy(config), SideFiles(config.folder).keep()
        try:
            folder = config.tokenizer_folder
        except ConfigError:  # it is raised again by a tokenizer
            return cls(config, side_files, None)
        return cls(config, side_files, side_files if folder == config.folder else SideFiles(folder).keep())

    def same_as(self, other: LoadedFolder) -> bool:
        """Return True if both have the same tokenizer and the same token ids with special roles."""
        mine, theirs = self.tokenizer_files, other.tokenizer_files
        is_same = mine is not None and theirs is not None and mine.same_as(theirs)
        return is_same and self.side_files.same_as(other.side_files) and self.config.raw == other.config.raw
