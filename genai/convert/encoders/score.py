"""The score of a decoder that is a reranker, as the files of sentence-transformers define it."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from genai.common.reading import file_text, json_object

from ...errors import ConfigError, ModelFolderError
from .spec import TokenScore

_MODULES = "modules.json"


def token_score(folder: Path) -> TokenScore | None:
    """Return the score that the module LogitScore of a folder defines; None if there is no such module.

    Raises:
        ModelFolderError: a file cannot be read.
        ConfigError: a file is malformed.
    """
    text = file_text(folder / _MODULES, ModelFolderError, ConfigError)
    if text is None:
        return None
    entries = json_object('{"modules": ' + text + "}", folder / _MODULES, ConfigError)["modules"]
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and str(entry.get("type", "")).rpartition(".")[2] == "LogitScore":
            place = str(entry.get("path", ""))
            if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
                raise ConfigError(
                    f"{folder / _MODULES}: path is {place!r:.80}",
                    "a folder inside the model's folder is expected",
                    "correct it",
                )
            return read_score(folder / place / "config.json")
    return None


def read_score(path: Path) -> TokenScore:
    """Return the score in the settings of a LogitScore module. Raises ModelFolderError, ConfigError."""
    text = file_text(path, ModelFolderError, ConfigError)
    config = {} if text is None else json_object(text, path, ConfigError)
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    for name, value in zip(("true_token_id", "false_token_id"), ids, strict=True):
        is_id = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_id and (value is not None or name == "true_token_id"):
            raise ConfigError(
                f"{path}: {name} is {json.dumps(value):.80}", "the id of a token is expected", "correct it"
            )
    return TokenScore(*ids)  # type: ignore[arg-type]  # checked above
