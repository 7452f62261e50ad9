"""What a folder says about its tokenizer: where its files are, and what tokenizer_config.json and its kin name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import CONFIG_NAME as GENAI_CONFIG_NAME
from ..config import Config
from ..errors import ConfigError, InputError, ModelFolderError, TokenizerError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"


def read_bytes(path: Path) -> bytes | None:
    """A file; None if there is none.

    Raises:
        TokenizerError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read", str(error), "check the file and its permissions") from error


def read_text(path: Path) -> str | None:
    """A UTF-8 text file, with line breaks as "\\n"; None if there is none.

    Raises:
        TokenizerError: it cannot be read.
    """
    data = read_bytes(path)
    try:
        return None if data is None else data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: is not UTF-8 text", str(error), "write the file again as UTF-8") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file.

    Raises:
        TokenizerError: unreadable, not JSON, or not an object.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: is not JSON", str(error), "correct the file at that place") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__}", "an object is expected", "copy the file again")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens a folder names, such as {"eos_token": "<|im_end|>"}: every key that ends in _token."""
    found: dict[str, str] = {}
    for source in (read_object(folder / SPECIAL_TOKENS_NAME), read_object(folder / CONFIG_NAME)):
        named = ((name, _content(value)) for name, value in source.items() if name.endswith("_token"))
        found |= {name: content for name, content in named if content is not None}
    return found


def further_special_tokens(folder: Path) -> list[str]:
    """Special tokens without a role: additional_special_tokens, or extra_special_tokens as newer files call them."""
    found: list[str] = []
    for source in (read_object(folder / SPECIAL_TOKENS_NAME), read_object(folder / CONFIG_NAME)):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            listed = source.get(name)
            values = listed.values() if isinstance(listed, Mapping) else listed if isinstance(listed, list) else ()
            found += [content for value in values if (content := _content(value)) is not None]
    return found


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def find_folder(source: object) -> tuple[Path, Config | None]:
    """The folder of the tokenizer files, and the model's configuration where there is one.

    Args:
        source: a Model, a Config, or a folder.
    """
    folder, config = _resolve(source)
    name = config.raw["model"].get("tokenizer_dir", "") if config is not None else ""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(
            f"model.tokenizer_dir = {name!r} in {GENAI_CONFIG_NAME}",
            "the tokenizer must lie inside the model folder",
            "give a relative folder name",
        )
    return folder / name, config


def _resolve(source: object) -> tuple[Path, Config | None]:
    config = getattr(source, "config", source)
    if isinstance(config, Config):
        return config.folder, config
    if not isinstance(source, (str, Path)):
        raise InputError(
            f"Tokenizer: got a {type(source).__name__}",
            "a Model, a Config or a folder is expected",
            "pass the path of the model folder",
        )
    folder = Path(source).expanduser()
    if not folder.is_dir():
        reason = "it is a file" if folder.exists() else "there is no such folder"
        raise ModelFolderError(f"{folder}: not a folder", reason, f"give the folder that holds {TOKENIZER_NAME}")
    return folder, Config(folder) if (folder / GENAI_CONFIG_NAME).exists() else None


def cleans_up(folder: Path, backend: tokenizers.Tokenizer) -> bool:
    """Whether decoded texts are cleaned up: as in transformers, BPE ignores the setting, which would spoil it."""
    wanted = read_object(folder / CONFIG_NAME).get("clean_up_tokenization_spaces", False)
    return bool(wanted) and type(backend.model).__name__ != "BPE"
