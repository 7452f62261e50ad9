"""What a folder says about its tokenizer: tokenizer.json, tokenizer_config.json, special_tokens_map.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role: begin a text, end a generation, fill short rows."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def read_text(path: Path) -> str | None:
    """A UTF-8 text file; None if there is none.

    Raises:
        TokenizerError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read", str(error), "check the file and its permissions") from error
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
    """The special tokens a folder names, such as {"eos_token": "<|im_end|>"}."""
    found: dict[str, str] = {}
    for source in (read_object(folder / SPECIAL_TOKENS_NAME), read_object(folder / CONFIG_NAME)):
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                found[name] = content
    return found


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


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of tokenizer.json, without truncation or padding.

    Raises:
        TokenizerError: the file is missing or cannot be used.
    """
    path = folder / TOKENIZER_NAME
    text = read_text(path)
    if text is None:
        others = sorted(other.name for other in path.parent.glob("*.model"))
        found = f"; {', '.join(others)} is a format this version does not read" if others else ""
        raise TokenizerError(
            f"{path.parent}: {TOKENIZER_NAME} is missing",
            f"text is encoded with that file{found}",
            "copy it from the original model, or save it with transformers' save_pretrained()",
        )
    from tokenizers import Tokenizer as Backend

    with library_errors(f"{path}: is not a usable tokenizer"):
        backend = Backend.from_str(text)
    # Files may carry settings of their own, which would cut texts silently or fill them.
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns whatever the tokenizers library raises into a TokenizerError that begins with `what`."""
    try:
        yield
    except BaseException as error:
        # The library raises bare Exceptions; a panic of its Rust code is not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = f"the tokenizers library says: {error}"
        raise TokenizerError(what, why, f"check {TOKENIZER_NAME}, or copy it again from the original model") from error


def cleans_up(folder: Path, backend: tokenizers.Tokenizer) -> bool:
    """Whether decoded texts are cleaned up: as in transformers, BPE ignores the setting, which would spoil it."""
    wanted = read_object(folder / CONFIG_NAME).get("clean_up_tokenization_spaces", False)
    return bool(wanted) and type(backend.model).__name__ != "BPE"


def configured_ids(config: Config) -> SpecialIds:
    """The special ids that genai_config.json gives."""
    model = config.model
    return _with_padding(model.bos_token_id, model.eos_token_ids, model.pad_token_id)


def named_ids(folder: Path, backend: tokenizers.Tokenizer) -> SpecialIds:
    """The special ids of the tokens that tokenizer_config.json names."""
    names = special_tokens(folder)
    bos, eos, pad = (
        backend.token_to_id(names[name]) if name in names else None for name in ("bos_token", "eos_token", "pad_token")
    )
    return _with_padding(bos, () if eos is None else (eos,), pad)


def _with_padding(bos: int | None, eos: tuple[int, ...], pad: int | None) -> SpecialIds:
    return SpecialIds(bos, eos, eos[0] if pad is None and eos else pad)
