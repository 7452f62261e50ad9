"""Converts vocab.json and merges.txt: byte-level BPE in the format of GPT-2 and many later models.

The files do not define how texts are split. The split is derived from tokenizer_class in tokenizer_config.json, or else
from the model_type. The ids are the same as those of the transformers class with that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.reading import decoded
from ...errors import TokenizerError, kind_of
from ...models.side_files import MERGES_NAME
from ..tokenizer_limits import MAX_VALUES
from . import expressions
from .parts import MAX_TOKENS, Conversion, Json, ModelFormatError, byte_level, byte_pairs, cut_by
from .ranks import first_missing, require_bytes

if TYPE_CHECKING:
    from ..files import FolderFacts

_MOST_MERGES = 2**20
_NFC = {"type": "NFC"}
_END = "<|endoftext|>"


@dataclass(frozen=True)
class PairsKind:
    """The way in which a transformers class splits texts.

    Attributes:
        expressions: the expressions that split texts; empty = as in GPT-2.
        composed: True if texts are first normalised to NFC.
        digits: True if digits are split one by one.
        special: special tokens that are used if the files name none.
    """

    expressions: tuple[str, ...] = ()
    composed: bool = False
    digits: bool = False
    special: Mapping[str, str] = field(default_factory=lambda: {"bos_token": _END, "eos_token": _END})


_GPT2 = PairsKind()
_BY_CLASS = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "Qwen2Tokenizer": PairsKind((expressions.QWEN2,), composed=True, special={"eos_token": _END, "pad_token": _END}),
    "GPTNeoXTokenizer": PairsKind(composed=True),
    "CohereTokenizer": PairsKind(
        composed=True,
        digits=True,
        special={"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
    ),
}
_CLASS_OF_MODEL = {
    **dict.fromkeys("gpt2 gpt_neo gptj codegen phi opt starcoder2 exaone4".split(), "GPT2Tokenizer"),
    **dict.fromkeys("qwen2 qwen2_moe qwen3 qwen3_moe".split(), "Qwen2Tokenizer"),
    **dict.fromkeys("gpt_neox olmo".split(), "GPTNeoXTokenizer"),
    **dict.fromkeys("cohere cohere2".split(), "CohereTokenizer"),
}


def convert_vocab_merges(path: Path, data: bytes, facts: FolderFacts) -> Conversion:
    """Convert a vocab.json and the merges.txt in the same folder.

    Raises:
        TokenizerError: merges.txt cannot be read.
        ModelFormatError: a file is malformed, merges.txt is missing, or the tokenizer class is unknown.
    """
    kind = _kind(facts)
    vocab = _vocabulary(data)
    if missing := first_missing(vocab.values(), facts.declared):
        raise ModelFormatError(f"{missing[0]} ids below {max(vocab.values())} are missing, starting with {missing[1]}")
    require_bytes(vocab)
    merged = facts.files.data(MERGES_NAME)
    merges = _merges(None if merged is None else decoded(merged, facts.files.path(MERGES_NAME), TokenizerError), vocab)
    prefix = facts.config.get("add_prefix_space") is True
    pre_tokenizer: Json = cut_by(kind.expressions) if kind.expressions else byte_level(prefix=prefix, regex=True)
    if kind.digits:
        digits = {"type": "Digits", "individual_digits": True}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [digits, pre_tokenizer]}
    text = byte_pairs(vocab, merges, added=[], pre_tokenizer=pre_tokenizer, normalizer=_NFC if kind.composed else None)
    known = {token["content"] for token in facts.declared.values()} | vocab.keys()
    return Conversion(text, {role: token for role, token in kind.special.items() if token in known})


def _kind(facts: FolderFacts) -> PairsKind:
    name = facts.tokenizer_class
    kind = _BY_CLASS.get(name or _CLASS_OF_MODEL.get(facts.model_type, ""))
    if kind is None:
        raise ModelFormatError(
            "the file does not define how text is split, and the rule is unknown for tokenizer_class "
            f"{name!r:.60} and model_type {facts.model_type!r:.60}; it is known for the classes "
            f"{', '.join(_BY_CLASS)}"
        )
    return kind


def _vocabulary(data: bytes) -> dict[str, int]:
    if data.count(b",") > MAX_VALUES:
        raise ModelFormatError(f"the file has more than {MAX_VALUES} commas")
    try:
        # The entries are read as a list of pairs, because a dict would keep only one of several entries for the same
        # token.
        pairs = json.loads(data.decode("utf-8"), object_pairs_hook=lambda found: found)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"the file is not JSON: {error}") from error
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise ModelFormatError(f"the file contains {kind_of(pairs)}, but an object that maps tokens to ids is expected")
    vocab: dict[str, int] = {}
    tokens: dict[int, str] = {}
    for token, id_ in pairs:
        if type(id_) is not int or not 0 <= id_ < MAX_TOKENS:
            raise ModelFormatError(
                f"the id of {token!r:.60} is {id_!r:.40}, but ids must be numbers below {MAX_TOKENS}"
            )
        if token in vocab:
            raise ModelFormatError(f"the token {token!r:.60} occurs twice, with the ids {vocab[token]} and {id_}")
        if id_ in tokens:
            raise ModelFormatError(f"two tokens have the id {id_}: {tokens[id_]!r:.60} and {token!r:.60}")
        vocab[token], tokens[id_] = id_, token
    if not vocab:
        raise ModelFormatError("the file has no tokens")
    return vocab


def _merges(text: str | None, vocab: Mapping[str, int]) -> list[list[str]]:
    if text is None:
        raise ModelFormatError(f"{MERGES_NAME}, which defines the merges, is missing from the folder")
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise ModelFormatError(f"line {number} of {MERGES_NAME} is {line!r:.60}, but two tokens are expected")
        if strangers := [token for token in (*pair, "".join(pair)) if token not in vocab]:
            raise ModelFormatError(f"line {number} of {MERGES_NAME} has {strangers[0]!r:.60}, which is not a token")
        merges.append(pair)
        if len(merges) > _MOST_MERGES:
            raise ModelFormatError(f"{MERGES_NAME} has more than {_MOST_MERGES} lines")
    return merges
