"""A SentencePiece `tokenizer.model` as a tokenizer of the tokenizers library, in the form of a tokenizer.json.

Its bytes are the protobuf message ModelProto of sentencepiece_model.proto. Only fields that decide ids and texts are
kept. The wire format (varints, fixed words, length-delimited bytes) is read by hand, so that neither the sentencepiece
library nor its generated protobuf classes are needed.

Ids of plain text equal the sentencepiece library's. Like transformers, and unlike sentencepiece, control pieces such as
<s> that stand in a text become their ids: chat prompts are written that way.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

MAX_PIECES = 2**24
"""More pieces than any tokenizer has: a file that claims more is not one."""
MAX_PIECE_BYTES = 512
"""Every way to cut a piece in two is looked at, so a long one would take for ever."""


Kind = TypeVar("Kind", bound=IntEnum)


class ModelFormatError(ValueError):
    """The bytes are no SentencePiece model."""


class PieceType(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """How text is cut into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its id is its place in the list."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceModel:
    """What a tokenizer.model says.

    Attributes:
        pieces: the vocabulary by id.
        type: how text is cut.
        byte_fallback: whether unknown characters become byte pieces.
        unk_id, bos_id, eos_id: ids with a role; -1 means none.
        precompiled_charsmap: how characters are normalised, as a compiled table; empty for not at all.
        add_dummy_prefix: whether a space is put before the text.
        remove_extra_whitespaces: whether spaces are trimmed and runs of them become one.
        escape_whitespaces: whether spaces become the mark U+2581.
        whitespace_suffix: whether that mark ends a word instead of beginning it.
    """

    pieces: tuple[Piece, ...]
    type: ModelType = ModelType.UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    precompiled_charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    whitespace_suffix: bool = False


def parse_model(data: bytes) -> SentencePieceModel:
    """The model in the bytes of a file; ModelFormatError if they are none, or one that is cut off."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_bytes(value), len(pieces)))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
        if len(pieces) > MAX_PIECES:
            raise ModelFormatError(f"it has more than {MAX_PIECES} pieces")
    if not pieces:
        raise ModelFormatError("it has no pieces")
    return SentencePieceModel(
        pieces=tuple(pieces),
        type=_enum(ModelType, trainer.get(3, 1), "model type"),
        byte_fallback=bool(trainer.get(35, 0)),
        unk_id=_signed(trainer.get(40, 0)),
        bos_id=_signed(trainer.get(41, 1)),
        eos_id=_signed(trainer.get(42, 2)),
        whitespace_suffix=bool(trainer.get(24, 0)),
        precompiled_charsmap=_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def _piece(data: bytes, index: int) -> Piece:
    fields = dict(_fields(data))
    encoded = _bytes(fields.get(1, b""))
    if len(encoded) > MAX_PIECE_BYTES:
        raise ModelFormatError(f"piece {index} has {len(encoded)} bytes; at most {MAX_PIECE_BYTES} are allowed")
    try:
        text = encoded.decode()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"piece {index} is not UTF-8: {error}") from error
    score = struct.unpack("<f", _bytes(fields.get(2, b"\0\0\0\0")))[0]
    if not text or score != score or abs(score) == float("inf"):
        raise ModelFormatError(f"piece {index} is empty or its score {score} is no number")
    return Piece(text, score, _enum(PieceType, fields.get(3, 1), f"type of piece {index}"))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a message: an int for a varint, bytes for all else."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ModelFormatError(f"byte {position}: unknown wire type {wire_type}")
        if number == 0 or length > len(data) - position:
            raise ModelFormatError(f"byte {position}: field {number} of {length} bytes runs over the end")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), position
    raise ModelFormatError(f"byte {position}: a number is cut off or too long")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ModelFormatError("a field is a number where bytes are expected")
    return value


def _signed(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ModelFormatError("a field is bytes where a number is expected")
    return value - 2**64 if value >= 2**63 else value


def _enum(kind: type[Kind], value: int | bytes, name: str) -> Kind:
    try:
        return kind(_signed(value))
    except ValueError as error:
        raise ModelFormatError(f"the {name} is {value!r}") from error


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
