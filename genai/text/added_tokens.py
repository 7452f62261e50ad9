"""Added tokens that a folder declares beside its tokenizer: added_tokens_decoder, or the older added_tokens.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from .files import CONFIG_NAME, read_object, special_tokens

ADDED_NAME = "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class DeclaredToken:
    """A token and how it is found in a text: the flags of tokenizers.AddedToken."""

    content: str
    flags: Mapping[str, bool]


def declared_tokens(folder: Path) -> dict[int, DeclaredToken]:
    """The declared tokens by id.

    Raises:
        TokenizerError: an entry is malformed.
    """
    path = folder / CONFIG_NAME
    listed = read_object(path).get("added_tokens_decoder")
    if listed is None:
        return _older_file(folder)
    if not isinstance(listed, Mapping):
        raise _malformed(path, "added_tokens_decoder", listed)
    return {_id(path, id_): _token(path, entry) for id_, entry in listed.items()}


def _older_file(folder: Path) -> dict[int, DeclaredToken]:
    path = folder / ADDED_NAME
    special = set(special_tokens(folder).values())
    tokens = {}
    for content, id_ in read_object(path).items():
        is_special = content in special
        tokens[_id(path, id_)] = DeclaredToken(content, {"special": is_special, "normalized": not is_special})
    return tokens


def _id(path: Path, id_: Any) -> int:
    text = str(id_)
    if isinstance(id_, (bool, float)) or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _malformed(path, "the id of an added token", id_)
    return int(text)


def _token(path: Path, entry: Any) -> DeclaredToken:
    content = entry.get("content") if isinstance(entry, Mapping) else None
    if not isinstance(content, str) or not content:
        raise _malformed(path, "an added token", entry)
    flags = {name: entry[name] for name in _FLAGS if name in entry}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _malformed(path, f"a flag of the added token {content!r}", flags)
    return DeclaredToken(content, flags)


def _malformed(path: Path, what: str, value: object) -> TokenizerError:
    return TokenizerError(
        f"{path}: {what} is {value!r:.80}",
        "ids are whole numbers, tokens are objects with content and flags",
        "copy the file again from the original model",
    )
