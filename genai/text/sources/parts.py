"""The result of every conversion, the text of a tokenizer.json, and functions that build its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

MAX_TOKENS = 2**19
"""Maximum number of tokens. No real tokenizer has more, so a file with more tokens is malformed."""
MAX_TOKEN_BYTES = 512
"""Maximum bytes of a token. All splits of a token into two are tried, which would take very long for longer tokens."""
MAX_BYTES = 2**22
"""Maximum bytes of all tokens together, for the same reason: this number of bytes takes a few seconds. Large
vocabularies have 1.5 million."""


class ModelFormatError(ValueError):
    """A file is not a tokenizer of the expected format, or cannot be converted."""


@dataclass(frozen=True)
class Conversion:
    """A tokenizer converted from another format.

    Attributes:
        text: text of a tokenizer.json with the same ids.
        special: special tokens by role, such as {"eos_token": "</s>"}, as defined by the format itself.
        begins: True if texts start with the bos_token, unless tokenizer_config.json overrides this.
    """

    text: str
    special: Mapping[str, str] = field(default_factory=dict)
    begins: bool = False


def added_token(id_: int, content: str, *, special: bool = True, **flags: bool) -> Json:
    """Return an added token, which is matched literally in texts."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": content, **plain, **flags, "special": special}


def surrounded(before: Mapping[str, int], after: Mapping[str, int]) -> Json | None:
    """Return a post-processor that adds tokens (given with their ids) before and after a text; None without tokens."""

    def special(tokens: Mapping[str, int]) -> list[Json]:
        return [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]

    single = [*special(before), {"Sequence": {"id": "A", "type_id": 0}}, *special(after)]
    if len(single) == 1:
        return None
    special_tokens = {
        token: {"id": token, "ids": [id_], "tokens": [token]} for token, id_ in (*before.items(), *after.items())
    }
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special_tokens}


def byte_level(*, prefix: bool = False, regex: bool = False) -> Json:
    """Return a pre-tokenizer that maps bytes to printable characters. With `regex`, it first splits as in GPT-2."""
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def cut_by(expressions: Sequence[str]) -> Json:
    """Return a pre-tokenizer that splits texts by one expression after another, and maps the pieces to bytes."""
    splits: list[Json] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level()]}


def byte_pairs(
    vocab: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    *,
    added: Sequence[Json],
    pre_tokenizer: Json,
    normalizer: Json | None = None,
    post_processor: Json | None = None,
    ignore_merges: bool = False,
) -> str:
    """Return the tokenizer.json of a byte-level BPE.

    Args:
        vocab: ids of tokens, with bytes written as printable characters.
        merges: pairs of tokens in the order in which they are merged.
        added: the added tokens.
        pre_tokenizer, normalizer, post_processor: parts of the tokenizer.json.
        ignore_merges: True if a piece that is a token as a whole becomes that token, regardless of the merges.
    """
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip
    decoder = byte_level(prefix=True, regex=True)
    return tokenizer_text(added, normalizer, pre_tokenizer, post_processor, decoder, model)


def word_pieces(
    vocab: Mapping[str, int],
    unknown: str,
    *,
    added: Sequence[Json],
    normalizer: Mapping[str, bool | None],
    post_processor: Json | None,
    cleanup: bool = False,
) -> str:
    """Return the tokenizer.json of a BERT tokenizer: pieces of words, all of which except the first start with ##.

    Args:
        vocab: ids of tokens.
        unknown: the token for words without matching pieces.
        added: the added tokens.
        normalizer: handle_chinese_chars, strip_accents and lowercase.
        post_processor: part of the tokenizer.json.
        cleanup: True if spaces before punctuation are removed from decoded texts.
    """
    model = {
        "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocab,
    }  # fmt: skip
    return tokenizer_text(
        added,
        {"type": "BertNormalizer", "clean_text": True, **normalizer},
        {"type": "BertPreTokenizer"},
        post_processor,
        {"type": "WordPiece", "prefix": "##", "cleanup": cleanup},
        model,
    )


def tokenizer_text(
    added: Sequence[Json],
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    post_processor: Json | None,
    decoder: Json,
    model: Json,
) -> str:
    """Return the text of a tokenizer.json."""
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": post_processor}
    whole = {"version": "1.0", "added_tokens": added, **parts, "decoder": decoder, "model": model}
    return json.dumps(whole, ensure_ascii=False)
