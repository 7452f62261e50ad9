"""Converts files of the tiktoken library: each line has a token's bytes in base64, and its rank.

The files contain neither the expression nor the special tokens. Both are part of each model's code, and are defined
here for models that are published in this format. The ids are the same as those of the tiktoken library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from . import expressions
from .parts import Conversion, ModelFormatError, added_token
from .ranks import checked_ranks, declared_token, decoded, ranked_tokenizer

if TYPE_CHECKING:
    from ..files import FolderFacts

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})")
_END = "<|endoftext|>"


@dataclass(frozen=True)
class RankedKind:
    """The facts about a model that a tiktoken file does not contain.

    Attributes:
        expression: expression that splits texts into pieces.
        special: special tokens, by the offset of their ids from the end of the ranks.
        roles: special tokens that start and end texts, by role.
        begins: True if texts start with the bos_token.
        composed: True if texts are first normalised to NFC.
    """

    expression: str
    special: Mapping[int, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    begins: bool = False
    composed: bool = False


def _llama3_special() -> dict[int, str]:
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id"}
    named |= {7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}
    rest = [index for index in range(256) if index not in named]
    named |= {index: f"reserved_special_token_{number}" for number, index in enumerate(rest)}
    return {index: f"<|{name}|>" for index, name in sorted(named.items())}


_QWEN_SPECIAL = (_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
_GPT4_SPECIAL = {1: _END, 2: "<|fim_prefix|>", 3: "<|fim_middle|>", 4: "<|fim_suffix|>", 20: "<|endofprompt|>"}
_ENDS = {"eos_token": _END}
_LLAMA3 = RankedKind(
    expressions.LLAMA3, _llama3_special(), {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, True
)
_QWEN = RankedKind(expressions.QWEN2, dict(enumerate(_QWEN_SPECIAL)), _ENDS, composed=True)
_GLM4 = RankedKind(expressions.LLAMA3, roles=_ENDS)
_KIMI = RankedKind(expressions.KIMI)
_GPT4 = RankedKind(expressions.GPT4, _GPT4_SPECIAL, _ENDS)
_GPT4O = RankedKind(expressions.GPT4O, {1: _END, 20: "<|endofprompt|>"}, _ENDS)
_GPT2 = RankedKind(expressions.GPT2, {0: _END}, _ENDS)
_BY_FILE = {"qwen": _QWEN, "cl100k_base": _GPT4, "o200k_base": _GPT4O, "r50k_base": _GPT2, "gpt2": _GPT2}
_BY_CLASS = {"QWenTokenizer": _QWEN, "ChatGLM4Tokenizer": _GLM4, "TikTokenTokenizer": _KIMI}
# Meta's own folders have no config.json, so their model type is "".
_BY_MODEL_TYPE = {"llama": _LLAMA3, "mllama": _LLAMA3, "": _LLAMA3, "qwen": _QWEN, "glm4": _GLM4, "chatglm": _GLM4}


def is_tiktoken(data: bytes) -> bool:
    """Return True if a file starts like a tiktoken file, as some tokenizer.model files do."""
    return _LINE.fullmatch(data[:1024].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def convert_tiktoken(path: Path, data: bytes, facts: FolderFacts) -> Conversion:
    """Convert a tiktoken file. If tokenizer_config.json declares added tokens, these are used.

    Raises:
        ModelFormatError: the file is malformed, or the expression of the model is unknown.
    """
    kind = _kind(path, facts)
    entries = list(_entries(data))
    behind = 1 + max((rank for _, rank in entries), default=-1)
    named = {behind + index: token for index, token in kind.special.items()}
    declared = facts.declared
    if declared:  # the model may use some of the reserved tokens
        contents = {token["content"] for token in declared.values()}
        named = {id_: token for id_, token in named.items() if id_ not in declared and token not in contents}
    added = [added_token(id_, token) for id_, token in named.items()]
    added += [declared_token(id_, token) for id_, token in declared.items()]
    added.sort(key=lambda token: int(token["id"]))
    known = {str(token["content"]) for token in added}
    ranks = checked_ranks(entries, {int(token["id"]): token["content"] for token in added})
    text = ranked_tokenizer(ranks, added, kind.expression, normalizer={"type": "NFC"} if kind.composed else None)
    special = {role: token for role, token in kind.roles.items() if token in known}
    return Conversion(text, special, begins=kind.begins)


def _kind(path: Path, facts: FolderFacts) -> RankedKind:
    kind = _BY_FILE.get(path.stem) or _BY_CLASS.get(facts.tokenizer_class)
    kind = kind or (_BY_MODEL_TYPE.get(facts.model_type) if path.suffix == ".model" else None)
    if kind is None:
        named = f"tokenizer_class {facts.tokenizer_class!r:.60}, model_type {facts.model_type!r:.60}"
        raise ModelFormatError(
            f"the model's own code defines how text is split, and the rule is unknown for {named}; it is known "
            f"for the files {', '.join(_BY_FILE)}, the classes {', '.join(_BY_CLASS)}, and Llama 3"
        )
    return kind


def _entries(data: bytes) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        token, _, rank = line.rstrip(b"\r").partition(b" ")
        if not (rank.isdigit() and len(rank) < 10):
            raise ModelFormatError(f"line {number} is {line!r:.60}, but a token in base64 and its rank are expected")
        yield decoded(token, f"the token of line {number}"), int(rank)
