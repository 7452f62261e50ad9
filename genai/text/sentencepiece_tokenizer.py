"""A SentencePiece model as a tokenizer of the tokenizers library, in the form of a tokenizer.json.

Ids of plain text equal the sentencepiece library's. Like transformers, and unlike sentencepiece, control pieces such as
<s> that stand in a text become their ids: chat prompts are written that way.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .sentencepiece_model import ModelFormatError, ModelType, Piece, PieceType, SentencePieceModel

MARK = "\u2581"
_MOST_LEADING_SPACES = 2**16
_NEVER_CHOSEN = 1e4
Json = dict[str, Any]


def tokenizer_json(
    model: SentencePieceModel, *, prefix_everywhere: bool = False, renamed: Mapping[int, str] = {}
) -> str:
    """The text of a tokenizer.json with the same ids.

    Args:
        model: the model.
        prefix_everywhere: where the model puts a space before the text, whether text behind a special token gets one
            too (`"legacy": true` in tokenizer_config.json) or only the beginning of the whole text.
        renamed: other texts for some ids, for placeholders that a publisher put to use.

    Raises:
        ModelFormatError: the model is of a kind that has no equivalent there.
    """
    _check_supported(model)
    texts = renamed or {}
    pieces = [Piece(texts.get(id_, piece.text), piece.score, piece.type) for id_, piece in enumerate(model.pieces)]
    if len({piece.text for piece in pieces}) < len(pieces):
        raise ModelFormatError("two pieces have the same text")
    added = [_added(id_, piece, model) for id_, piece in enumerate(pieces) if piece.type in _ADDED_TYPES]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(model, prefix_everywhere))},
        "pre_tokenizer": _prefix_once(model) if model.add_dummy_prefix and not prefix_everywhere else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": list(_decoders(model))},
        "model": _bpe(pieces, model) if model.type == ModelType.BPE else _unigram(pieces, model),
    }
    return json.dumps(tokenizer, ensure_ascii=False)


_ADDED_TYPES = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)


def _prefix_once(model: SentencePieceModel) -> Json:
    """Puts a mark before the beginning of the text."""
    mark = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
    if model.remove_extra_whitespaces:
        # The normalizer has left one space where the text began with some: its mark is the prefix.
        return mark
    # A Metaspace leaves the prefix out where the text begins with its mark. By now spaces are marks, so the first part
    # always puts a space there, and the second makes it a mark.
    parts = [{**mark, "replacement": " "}, {**mark, "prepend_scheme": "never"}]
    return {"type": "Sequence", "pretokenizers": parts}


def _check_supported(model: SentencePieceModel) -> None:
    if model.type not in (ModelType.BPE, ModelType.UNIGRAM):
        raise ModelFormatError(f"its type is {model.type.name}; BPE and UNIGRAM are supported")
    if model.whitespace_suffix or not model.escape_whitespaces:
        raise ModelFormatError("it marks spaces at the end of words, or not at all, which is not supported")
    if any(piece.type == PieceType.UNUSED for piece in model.pieces):
        raise ModelFormatError("it has pieces of type UNUSED, which is not supported")
    if not 0 <= model.unk_id < len(model.pieces):
        raise ModelFormatError(f"unk_id is {model.unk_id}, and there are {len(model.pieces)} pieces")


def _added(id_: int, piece: Piece, model: SentencePieceModel) -> Json:
    is_user_defined = piece.type == PieceType.USER_DEFINED
    return {
        "id": id_,
        "content": piece.text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        # Pieces with the mark are found where the text has spaces.
        "normalized": is_user_defined and MARK in piece.text and not model.add_dummy_prefix,
        "special": not is_user_defined,
    }


def _normalizers(model: SentencePieceModel, prefix_everywhere: bool) -> Iterator[Json]:
    if model.precompiled_charsmap:
        table = base64.b64encode(model.precompiled_charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": table}
    if model.remove_extra_whitespaces:
        leading = "" if model.add_dummy_prefix and not prefix_everywhere else r"\A +|"
        yield {"type": "Replace", "pattern": {"Regex": leading + rf"[ {MARK}]+\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    if model.add_dummy_prefix and prefix_everywhere:
        yield {"type": "Prepend", "prepend": MARK}


def _decoders(model: SentencePieceModel) -> Iterator[Json]:
    yield {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
    if model.byte_fallback:
        yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.remove_extra_whitespaces:
        yield {"type": "Strip", "content": " ", "start": _MOST_LEADING_SPACES, "stop": 0}
    elif model.add_dummy_prefix:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _unigram(pieces: list[Piece], model: SentencePieceModel) -> Json:
    # Texts such as "<0x41>" are no byte pieces: these come only from unknown characters.
    never = min(piece.score for piece in pieces) - _NEVER_CHOSEN
    vocab = [[piece.text, never if piece.type == PieceType.BYTE else piece.score] for piece in pieces]
    return {"type": "Unigram", "unk_id": model.unk_id, "vocab": vocab, "byte_fallback": model.byte_fallback}


def _bpe(pieces: list[Piece], model: SentencePieceModel) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[model.unk_id].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: id_ for id_, piece in enumerate(pieces)},
        "merges": _merges(pieces),
    }


def _merges(pieces: list[Piece]) -> list[list[str]]:
    """Every way to put a piece together from two others; pieces of a higher score first, as sentencepiece merges."""
    ids = {piece.text: id_ for id_, piece in enumerate(pieces) if piece.type == PieceType.NORMAL}
    merges: list[list[str]] = []
    for text in sorted(ids, key=lambda text: (-pieces[ids[text]].score, ids[text])):
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = [(ids[left], ids[right]) for left, right in halves if left in ids and right in ids]
        merges += [[pieces[left].text, pieces[right].text] for left, right in sorted(pairs)]
    return merges
