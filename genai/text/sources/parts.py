"""What every format of a tokenizer becomes: the text of a tokenizer.json, and the parts that it is put together of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

MAX_TOKENS = 2**19
"""More tokens than any tokenizer has: a file that claims more is not one."""
MAX_TOKEN_BYTES = 512
"""Every way to cut a token in two is looked at, so a long one would take for ever."""
MAX_BYTES = 2**22
"""Of all tokens together, for the same reason: so many take a few seconds. Large vocabularies have 1.5 million."""


class ModelFormatError(ValueError):
    """A file is no tokenizer of the format that it should have, or one that cannot be converted."""


@dataclass(frozen=True)
class Conversion:
    """What a tokenizer in another format becomes.

    Attributes:
        text: of a tokenizer.json with the same ids.
        special: special tokens by role, such as {"eos_token": "</s>"}, as the format itself has them.
        begins: whether texts begin with the bos_token, unless tokenizer_config.json says otherwise.
    """

    text: str
    special: Mapping[str, str] = field(default_factory=dict)
    begins: bool = False


def added_token(id_: int, content: str, *, special: bool = True, **flags: bool) -> Json:
    """A token that is found in texts as it is."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": content, **plain, **flags, "special": special}


def surrounded(before: Mapping[str, int], after: Mapping[str, int]) -> Json | None:
    """Puts tokens, given with their ids, before and behind a text; None where there are none."""

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
    """Bytes as printable characters; with `regex`, texts are cut as in GPT-2 first."""
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def cut_by(expressions: Sequence[str]) -> Json:
    """Cuts texts by expressions, each applied to what the one before it has left, and makes bytes of the pieces."""
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
    """The tokenizer.json of a byte-level BPE.

    Args:
        vocab: ids of tokens, whose bytes are written as printable characters.
        merges: pairs of tokens in the order in which they are joined.
        ignore_merges: a piece that is a token as a whole becomes that token, whatever the merges say.
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
    """The tokenizer.json of BERT's kind: words, whose pieces but the first begin with ##.

    Args:
        unknown: the token of words that no pieces make.
        normalizer: handle_chinese_chars, strip_accents, lowercase.
        cleanup: whether decoded texts lose the spaces before punctuation.
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
    """The text of a tokenizer.json."""
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": post_processor}
    whole = {"version": "1.0", "added_tokens": added, **parts, "decoder": decoder, "model": model}
    return json.dumps(whole, ensure_ascii=False)
