"""Converts tekken.json, Mistral's format: special tokens, followed by ranked tokens as in tiktoken, and an expression.

The ids of plain text are the same as those of the mistral-common library. As in transformers, special tokens such as
[INST] in text become their ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.reading import json_object
from ...errors import TokenizerError
from ..tokenizer_limits import MAX_VALUES
from .parts import MAX_TOKENS, Conversion, Json, ModelFormatError, added_token
from .ranks import checked_ranks, decoded, ranked_tokenizer

if TYPE_CHECKING:
    from ..files import FolderFacts

_LONGEST_EXPRESSION = 4096
# Escapes and character classes. If the rest matches _DIFFERENT, the tokenizers library interprets it differently.
_QUOTED = re.compile(r"\\[pP]\{\^?\w+\}|\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_DIFFERENT = re.compile(r"[$^]|\}\+")
# The special tokens of files up to version 7, which do not list their special tokens.
_OLDEST = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def convert_tekken(path: Path, data: bytes, facts: FolderFacts) -> Conversion:
    """Convert a tekken.json.

    Raises:
        TokenizerError: the file is not JSON.
        ModelFormatError: the file is malformed.
    """
    try:
        values = json_object(data.decode("utf-8"), path, TokenizerError, MAX_VALUES)
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"the file is not UTF-8: {error}") from error
    config = values.get("config")
    if not isinstance(config, Mapping):
        raise ModelFormatError(f"config is {config!r:.60}, but an object is expected")
    size, reserved = (_count(config, name) for name in ("default_vocab_size", "default_num_special_tokens"))
    special = _special(values.get("special_tokens"), reserved)
    vocab = values.get("vocab")
    if not isinstance(vocab, list) or not 0 < size - reserved <= len(vocab):
        held = len(vocab) if isinstance(vocab, list) else 0
        raise ModelFormatError(
            f"default_vocab_size is {size}, including {reserved} special tokens, but vocab has {held} tokens"
        )
    ranks = checked_ranks(_entries(vocab[: size - reserved]), {})
    text = ranked_tokenizer(ranks, special, _expression(config.get("pattern")), before=reserved)
    known = {token["content"] for token in special}
    return Conversion(text, {role: token for role, token in _ROLES.items() if token in known}, begins="<s>" in known)


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise ModelFormatError(f"config.{name} is {value!r:.40}, but a whole number up to {MAX_TOKENS} is expected")
    return value


def _expression(pattern: Any) -> str:
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _LONGEST_EXPRESSION:
        raise ModelFormatError(f"config.pattern is {pattern!r:.60}, but a regular expression is expected")
    if match := _DIFFERENT.search(_QUOTED.sub("", pattern)):
        raise ModelFormatError(
            f"config.pattern has {match[0]!r}, which has a different meaning in the tokenizers library"
        )
    return pattern


def _special(special_tokens: Any, reserved: int) -> list[Json]:
    """Return the special tokens, which precede the ranks. Ids that the file does not list get default names."""
    entries = (
        [{"rank": id_, "token_str": token} for id_, token in enumerate(_OLDEST)]
        if special_tokens is None
        else special_tokens
    )
    if not isinstance(entries, list):
        raise ModelFormatError(f"special_tokens is {entries!r:.60}, but a list is expected")
    by_id: dict[int, Json] = {}
    for entry in entries:
        entry = entry if isinstance(entry, Mapping) else {}
        id_, token, control = entry.get("rank"), entry.get("token_str"), entry.get("is_control", True)
        if type(id_) is not int or not 0 <= id_ < reserved or not isinstance(token, str) or not token:
            raise ModelFormatError(f"the special token {entry!r:.80} has no rank below {reserved}, or no token_str")
        if id_ in by_id:
            raise ModelFormatError(f"two special tokens have the rank {id_}")
        by_id[id_] = added_token(id_, token, special=control is not False)
    filled = [by_id.get(id_) or added_token(id_, f"<SPECIAL_{id_}>") for id_ in range(reserved)]
    if len({token["content"] for token in filled}) < len(filled):
        raise ModelFormatError("two special tokens have the same text")
    return filled


def _entries(vocab: list[Any]) -> Iterator[tuple[bytes, int]]:
    for position, entry in enumerate(vocab):
        rank = entry.get("rank") if isinstance(entry, Mapping) else None
        token = entry.get("token_bytes") if isinstance(entry, Mapping) else None
        if rank != position or not isinstance(token, str):
            raise ModelFormatError(
                f"vocab[{position}] is {entry!r:.80}, but token_bytes and the rank {position} are expected"
            )
        yield decoded(token, f"token {position}"), position
