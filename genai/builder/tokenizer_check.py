"""Whether a checkpoint's tokenizer and its vocabulary fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError, ModelFolderError
from .checkpoint import read_json

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise unless there is a tokenizer whose ids all lie in the vocabulary.

    A vocabulary larger than the tokenizer is usual: tables are padded. A SentencePiece file is not looked into.

    Raises:
        ModelFolderError: there is no tokenizer. InputError: it has ids that the model has no vectors for.
    """
    if not (folder / TOKENIZER).is_file():
        if (folder / SENTENCEPIECE).is_file():
            return
        raise ModelFolderError(
            f"{folder}: no {TOKENIZER} and no {SENTENCEPIECE}",
            "without a tokenizer the model cannot read text",
            "download the checkpoint's tokenizer files, too",
        )
    largest = max(_ids(read_json(folder, TOKENIZER)), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"the tokenizer has token {largest}, the model's vocabulary ends at {vocab_size - 1}",
            "config.json's vocab_size and tokenizer.json contradict each other",
            "check that tokenizer and weights belong together",
        )


def _ids(tokenizer: dict[str, Any]) -> list[int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids = [token for token in vocabulary.values() if type(token) is int]
    else:
        ids = list(range(len(vocabulary or ())))
    added = tokenizer.get("added_tokens")
    tokens = [entry.get("id") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return ids + [token for token in tokens if type(token) is int]
