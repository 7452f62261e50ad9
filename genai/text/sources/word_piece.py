"""Converts vocab.txt: WordPiece as in BERT, one token per line.

The ids are the same as those of transformers' BertTokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parts import MAX_TOKEN_BYTES, MAX_TOKENS, Conversion, ModelFormatError, added_token, surrounded, word_pieces

if TYPE_CHECKING:
    from ..files import FolderFacts

_CLASSES = (
    "",
    "BertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "MobileBertTokenizer",
    "PreTrainedTokenizer",
)
_ROLES = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip


def convert_word_piece(path: Path, data: bytes, facts: FolderFacts) -> Conversion:
    """Convert a vocab.txt. tokenizer_config.json determines the treatment of upper case and accents.

    Raises:
        ModelFormatError: the file is malformed or has no token for unknown words, or the tokenizer class is not BERT's.
    """
    if facts.tokenizer_class not in _CLASSES:
        raise ModelFormatError(
            f"tokenizer_class is {facts.tokenizer_class!r:.60}; the supported classes are {', '.join(_CLASSES[1:])}"
        )
    vocab = _vocabulary(data)
    special = {role: facts.special.get(role, token) for role, token in _ROLES.items()}
    if special["unk_token"] not in vocab:
        raise ModelFormatError(f"the file has no {special['unk_token']!r:.60}, the token for unknown words")
    special = {role: token for role, token in special.items() if token in vocab}
    ends = {
        role: {special[role]: vocab[special[role]]} if role in special else {} for role in ("cls_token", "sep_token")
    }
    text = word_pieces(
        vocab,
        special["unk_token"],
        added=[added_token(vocab[token], token) for token in sorted(set(special.values()), key=vocab.__getitem__)],
        normalizer={
            "handle_chinese_chars": _flag(facts.config, "tokenize_chinese_chars", True),
            "strip_accents": _flag(facts.config, "strip_accents", None),
            "lowercase": _flag(facts.config, "do_lower_case", True),
        },
        post_processor=surrounded(ends["cls_token"], ends["sep_token"]),
        cleanup=True,
    )
    return Conversion(text, special)


def _flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelFormatError(f"{name} in tokenizer_config.json is {value!r:.40}, but true or false is expected")
    return default if value is None else value


def _vocabulary(data: bytes) -> dict[str, int]:
    try:
        lines = data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"the file is not UTF-8: {error}") from error
    while lines and not lines[-1]:
        lines.pop()
    if not 0 < len(lines) <= MAX_TOKENS:
        raise ModelFormatError(f"the file has {len(lines)} lines, but 1 to {MAX_TOKENS} are expected")
    vocab: dict[str, int] = {}
    for id_, token in enumerate(lines):
        if not token or len(token.encode()) > MAX_TOKEN_BYTES:
            raise ModelFormatError(f"line {id_ + 1} is {token!r:.60}, but 1 to {MAX_TOKEN_BYTES} bytes are expected")
        if token in vocab:
            raise ModelFormatError(f"the token {token!r:.60} occurs twice, on lines {vocab[token] + 1} and {id_ + 1}")
        vocab[token] = id_
    return vocab
