"""Reads a SentencePiece `tokenizer.model`: the protobuf message ModelProto of sentencepiece_model.proto.

Only the fields that decide ids and texts are kept. The wire format (varints, fixed words, length-delimited bytes) is
read by hand, so that neither the sentencepiece library nor its generated protobuf classes are needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

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
        unk_id, bos_id, eos_id, pad_id: ids with a role; -1 means none.
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
    pad_id: int = -1
    precompiled_charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    whitespace_suffix: bool = False


def parse_model(data: bytes) -> SentencePieceModel:
    """The model in the bytes of a file.

    Raises:
        ModelFormatError: the bytes are no SentencePiece model, or one that is cut off.
    """
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
        pad_id=_signed(trainer.get(43, 2**64 - 1)),
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
