"""The tokenizer of a checkpoint: whether it is there and fits the vocabulary, and what a model folder takes over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..errors import InputError, ModelFolderError
from ..text.backend import MODEL_NAMES, load_tokenizer

TOKENIZER, SPECIAL_TOKENS = "tokenizer.json", "special_tokens_map.json"
_COPIED = (
    TOKENIZER,
    "tokenizer_config.json",
    SPECIAL_TOKENS,
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    *MODEL_NAMES,
)
# Tokenizers in forms that only their own libraries read.
_FOREIGN = ("tekken.json", "*.tiktoken", "vocab.json", "tokenizer.model.v3", "vocab.txt")


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a folder that a model folder takes over as they are."""
    return [path for pattern in _COPIED for path in sorted(folder.glob(pattern)) if path.is_file()]


def require_tokenizer(folder: Path) -> None:
    """Raise ModelFolderError if a folder has no tokenizer that can be read."""
    if any((folder / name).is_file() for name in (TOKENIZER, *MODEL_NAMES)):
        return
    foreign = [path.name for pattern in _FOREIGN for path in folder.glob(pattern)]
    raise ModelFolderError(
        f"{folder}: no {TOKENIZER} and no {MODEL_NAMES[0]}",
        f"{foreign[0]} is not read here" if foreign else "without a tokenizer the model cannot read text",
        f"save {TOKENIZER} with transformers' save_pretrained()" if foreign else "download the tokenizer's files, too",
    )


def check_tokenizer(folder: Path, vocab_size: int) -> list[str]:
    """Load the tokenizer, and compare its ids with the vocabulary, which may be padded beyond them.

    Returns:
        What is odd, in words: special tokens that the model has no vectors for. Text models that share a tokenizer
        with a model for images have such tokens; nothing but their own text makes them.

    Raises:
        ModelFolderError: there is no tokenizer. TokenizerError: it cannot be used.
        InputError: it has ids that the model has no vectors for.
    """
    require_tokenizer(folder)
    backend = load_tokenizer(folder).backend
    special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
    beyond = {id_: token for token, id_ in backend.get_vocab(with_added_tokens=True).items() if id_ >= vocab_size}
    if largest := max(beyond.keys() - special, default=0):
        raise InputError(
            f"the tokenizer has token {largest}, the model's vocabulary ends at {vocab_size - 1}",
            "config.json's vocab_size and the tokenizer contradict each other",
            "check that tokenizer and weights belong together",
        )
    return [f"the tokenizer's {beyond[id_]!r} ({id_}) is not in the model's vocabulary" for id_ in sorted(beyond)]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files; a SentencePiece model is also written as tokenizer.json, which everybody reads.

    Raises:
        OSError: a file cannot be read or written. TokenizerError: the tokenizer cannot be used.
    """
    for file in tokenizer_files(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)
    if not (target / TOKENIZER).exists():
        loaded = load_tokenizer(source)
        (target / TOKENIZER).write_text(loaded.backend.to_str(), encoding="utf-8")
        # The names of <s> and </s> may stand in the SentencePiece model alone.
        (target / SPECIAL_TOKENS).write_text(json.dumps(dict(loaded.special), indent=2) + "\n", encoding="utf-8")
