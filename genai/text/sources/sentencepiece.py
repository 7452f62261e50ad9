"""Converts a SentencePiece `tokenizer.model` to a tokenizer.json.

The file is the protobuf message ModelProto of sentencepiece_model.proto. Only the fields that determine ids and texts
are declared here, so the sentencepiece library is not needed.

The ids of plain text are the same as those of the sentencepiece library. As in transformers, and unlike in
sentencepiece, control pieces such as <s> in text become their ids, because chat prompts contain control pieces.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..prefix_space import SENTENCEPIECE_CLASSES, prefix_space, reading_class
from .parts import (
    MAX_BYTES,
    MAX_TOKEN_BYTES,
    MAX_TOKENS,
    Conversion,
    Json,
    ModelFormatError,
    added_token,
    tokenizer_text,
)

if TYPE_CHECKING:
    from ..files import FolderFacts

# The fields of each message, with number, type and default. Enumerations are declared as integers and texts as bytes;
# both are checked below.
_MESSAGES = {
    "ModelProto": {"pieces": (1, "Piece", ""), "trainer": (2, "Trainer", ""), "normalizer": (3, "Normalizer", "")},
    "Piece": {"piece": (1, "bytes", ""), "score": (2, "float", "0"), "type": (3, "int32", "1")},
    "Trainer": {
        "model_type": (3, "int32", "1"),
        "treat_whitespace_as_suffix": (24, "bool", "false"),
        "byte_fallback": (35, "bool", "false"),
        "unk_id": (40, "int32", "0"),
        "bos_id": (41, "int32", "1"),
        "eos_id": (42, "int32", "2"),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, "bytes", ""),
        "add_dummy_prefix": (3, "bool", "true"),
        "remove_extra_whitespaces": (4, "bool", "true"),
        "escape_whitespaces": (5, "bool", "true"),
    },
}


AnyEnum = TypeVar("AnyEnum", bound=IntEnum)


class PieceType(IntEnum):
    """The type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


ADDED_TYPES = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
"""Types of the pieces that are matched as a whole in texts."""


class ModelType(IntEnum):
    """The algorithm that splits text into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary. Its id is its index in the list."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceModel:
    """The contents of a tokenizer.model.

    Attributes:
        pieces: the vocabulary by id.
        type: the algorithm that splits text.
        trainer: flags for byte pieces in place of unknown characters (byte_fallback) and for space marks at the end of
            words instead of the start, and ids with a role; -1 = no id.
        normalizer: a compiled table for normalising characters (empty = none), and flags for adding a space before the
            text, for trimming and merging spaces, and for replacing spaces with the mark.
    """

    pieces: tuple[Piece, ...]
    type: ModelType
    trainer: Any
    normalizer: Any


def parse_model(data: bytes) -> SentencePieceModel:
    """Parse the bytes of a file. Raise ModelFormatError if they are not a model or are truncated."""
    from google.protobuf.message import DecodeError

    model = _message_class()()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelFormatError(f"the file is truncated, or is not a protobuf message: {error}") from error
    if not 0 < len(model.pieces) <= MAX_TOKENS:
        raise ModelFormatError(f"the file has {len(model.pieces)} pieces, but 1 to {MAX_TOKENS} are expected")
    pieces = tuple(_piece(piece, index) for index, piece in enumerate(model.pieces))
    if sum(len(piece.text) for piece in pieces) > MAX_BYTES:
        raise ModelFormatError(f"the pieces have more than {MAX_BYTES} characters in total")
    kind = _enum(ModelType, model.trainer.model_type, "model type")
    return SentencePieceModel(pieces, kind, model.trainer, model.normalizer)


@cache
def _message_class() -> Any:
    """Return the class of ModelProto, with the fields that are declared here."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    file = FileDescriptorProto(name="sentencepiece_model.proto", package="sentencepiece")
    for message, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message)
        for name, (number, kind, default) in fields.items():
            field = declared.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if name == "pieces":
                field.label = FieldDescriptorProto.LABEL_REPEATED
            if kind in _MESSAGES:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".sentencepiece.{kind}"
            else:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
                field.default_value = default
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("sentencepiece.ModelProto"))


def _piece(piece: Any, index: int) -> Piece:
    if len(piece.piece) > MAX_TOKEN_BYTES:
        raise ModelFormatError(f"piece {index} has {len(piece.piece)} bytes, but the limit is {MAX_TOKEN_BYTES}")
    try:
        text = piece.piece.decode()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"piece {index} is not UTF-8: {error}") from error
    if not text or not math.isfinite(piece.score):
        raise ModelFormatError(f"piece {index} is empty, or its score {piece.score} is not finite")
    return Piece(text, piece.score, _enum(PieceType, piece.type, f"type of piece {index}"))


def _enum(kind: type[AnyEnum], value: int, name: str) -> AnyEnum:
    try:
        return kind(value)
    except ValueError as error:
        raise ModelFormatError(f"the {name} is {value}, which is unknown") from error


MARK = "\u2581"
_MOST_LEADING_SPACES = 2**16
_NEVER_CHOSEN = 1e4


def convert_sentencepiece(path: Path, data: bytes, facts: FolderFacts) -> Conversion:
    """Convert a tokenizer.model. "legacy" and "add_prefix_space" in tokenizer_config.json determine the prefix spaces.

    Raises:
        ModelFormatError: see `parse_model` and `tokenizer_json`.
    """
    model = parse_model(data)
    adds = prefix_space(facts)
    if adds is not None and reading_class(facts) in SENTENCEPIECE_CLASSES:
        model.normalizer.add_dummy_prefix = adds
    renamed = {id_: token["content"] for id_, token in facts.declared.items() if id_ < len(model.pieces)}
    text = tokenizer_json(model, prefix_everywhere=facts.config.get("legacy") is True, renamed=renamed)
    roles = {"bos_token": model.trainer.bos_id, "eos_token": model.trainer.eos_id}
    special = {
        name: renamed.get(id_, model.pieces[id_].text) for name, id_ in roles.items() if 0 <= id_ < len(model.pieces)
    }
    return Conversion(text, special)


def tokenizer_json(
    model: SentencePieceModel,
    *,
    prefix_everywhere: bool = False,
    renamed: Mapping[int, str] = {},
    strips: Mapping[int, Mapping[str, bool]] = {},
    post_processor: Json | None = None,
) -> str:
    """Return the text of a tokenizer.json with the same ids.

    Args:
        model: the model.
        prefix_everywhere: for models that add a space before the text: True if a space is also added before text after
            a special token (`"legacy": true` in tokenizer_config.json), False if a space is added only at the start of
            the whole text.
        renamed: new texts of ids, for placeholders that a publisher has replaced.
        strips: flags (lstrip, rstrip) of the special tokens that remove white space beside them, by id.
        post_processor: post-processor that adds tokens before and after texts.

    Raises:
        ModelFormatError: the tokenizers library has no equivalent for the model.
    """
    _check_supported(model)
    pieces = [Piece(renamed.get(id_, piece.text), piece.score, piece.type) for id_, piece in enumerate(model.pieces)]
    if len({piece.text for piece in pieces}) < len(pieces):
        raise ModelFormatError("two pieces have the same text")
    added = [
        {**_added(id_, piece, model), **strips.get(id_, {})}
        for id_, piece in enumerate(pieces)
        if piece.type in ADDED_TYPES
    ]
    return tokenizer_text(
        added,
        {"type": "Sequence", "normalizers": list(_normalizers(model, prefix_everywhere))},
        _prefix_once(model) if model.normalizer.add_dummy_prefix and not prefix_everywhere else None,
        post_processor,
        {"type": "Sequence", "decoders": list(_decoders(model))},
        _bpe(pieces, model) if model.type == ModelType.BPE else _unigram(pieces, model),
    )


def _prefix_once(model: SentencePieceModel) -> Json:
    """Return a pre-tokenizer that adds a mark at the start of the text."""
    mark = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
    if model.normalizer.remove_extra_whitespaces:
        # If the text started with spaces, the normalizer has left one space, whose mark is the prefix.
        return mark
    # A Metaspace adds no prefix if the text starts with its mark. Spaces are already marks at this point, so the first
    # part always adds a space at the start, and the second part converts this space to a mark.
    parts = [{**mark, "replacement": " "}, {**mark, "prepend_scheme": "never"}]
    return {"type": "Sequence", "pretokenizers": parts}


def _check_supported(model: SentencePieceModel) -> None:
    if model.type not in (ModelType.BPE, ModelType.UNIGRAM):
        raise ModelFormatError(f"the model type is {model.type.name}, but only BPE and UNIGRAM are supported")
    if model.trainer.treat_whitespace_as_suffix or not model.normalizer.escape_whitespaces:
        raise ModelFormatError("the model marks spaces at the end of words or not at all, which is not supported")
    if any(piece.type == PieceType.UNUSED for piece in model.pieces):
        raise ModelFormatError("the model has pieces of type UNUSED, which are not supported")
    if not 0 <= model.trainer.unk_id < len(model.pieces):
        raise ModelFormatError(f"unk_id is {model.trainer.unk_id}, but there are {len(model.pieces)} pieces")
    if model.trainer.byte_fallback:
        byte_pieces = {piece.text for piece in model.pieces if piece.type == PieceType.BYTE}
        if missing := [name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name not in byte_pieces]:
            why = f"{len(missing)} of the 256 byte pieces are missing, starting with {missing[0]}"
            raise ModelFormatError(f"byte_fallback is set, but {why}")


def _added(id_: int, piece: Piece, model: SentencePieceModel) -> Json:
    is_user_defined = piece.type == PieceType.USER_DEFINED
    # Pieces that contain the mark must match spaces in the text.
    normalized = is_user_defined and MARK in piece.text and not model.normalizer.add_dummy_prefix
    return added_token(id_, piece.text, special=not is_user_defined, normalized=normalized)


def _normalizers(model: SentencePieceModel, prefix_everywhere: bool) -> Iterator[Json]:
    if model.normalizer.precompiled_charsmap:
        table = base64.b64encode(model.normalizer.precompiled_charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": table}
    if model.normalizer.remove_extra_whitespaces:
        leading = "" if model.normalizer.add_dummy_prefix and not prefix_everywhere else r"\A +|"
        yield {"type": "Replace", "pattern": {"Regex": leading + rf"[ {MARK}]+\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    if model.normalizer.add_dummy_prefix and prefix_everywhere:
        yield {"type": "Prepend", "prepend": MARK}


def _decoders(model: SentencePieceModel) -> Iterator[Json]:
    yield {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
    if model.trainer.byte_fallback:
        yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.normalizer.remove_extra_whitespaces:
        yield {"type": "Strip", "content": " ", "start": _MOST_LEADING_SPACES, "stop": 0}
    elif model.normalizer.add_dummy_prefix:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _unigram(pieces: list[Piece], model: SentencePieceModel) -> Json:
    # A literal "<0x41>" in text must not become a byte piece, because byte pieces are only for unknown characters.
    never = min(piece.score for piece in pieces) - _NEVER_CHOSEN
    vocab = [[piece.text, never if piece.type == PieceType.BYTE else piece.score] for piece in pieces]
    trainer = model.trainer
    return {"type": "Unigram", "unk_id": trainer.unk_id, "vocab": vocab, "byte_fallback": trainer.byte_fallback}


def _bpe(pieces: list[Piece], model: SentencePieceModel) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[model.trainer.unk_id].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.trainer.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: id_ for id_, piece in enumerate(pieces)},
        "merges": _merges(pieces),
    }


def _merges(pieces: list[Piece]) -> list[list[str]]:
    """Return all splits of pieces into two other pieces, higher scores first, which is sentencepiece's merge order."""
    ids = {piece.text: id_ for id_, piece in enumerate(pieces) if piece.type == PieceType.NORMAL}
    merges: list[list[str]] = []
    for text in sorted(ids, key=lambda text: (-pieces[ids[text]].score, ids[text])):
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = [(ids[left], ids[right]) for left, right in halves if left in ids and right in ids]
        merges += [[pieces[left].text, pieces[right].text] for left, right in sorted(pairs)]
    return merges
