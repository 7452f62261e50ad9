"""Reads ONNX models from files, bytes or protobuf objects.

Protobuf retains a file's bytes and copies each field out of them, so a model that contains its weights would take three
times its size. Therefore, a large file is mapped and traversed by the lengths of its fields (three messages deep:
model, graph, tensor), the bytes of large initializers are cut out, and protobuf parses the rest.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from genai.common.host_memory import mapped_array

from ..common.foreign_models import foreign_model_error
from ..common.reading import pointer_error
from ..errors import GraphError, ModelFolderError, ProtobufError
from .deserialize import Deserializer, RawData
from .external_data import ExternalData, Opened
from .ir import OnnxModel
from .validate import check_model

MAX_PROTOBUF_BYTES = 2**31 - 1


def read_model(
    source: str | Path | bytes | onnx.ModelProto,
    *,
    external_data: Mapping[str, bytes] | None = None,
    external_folder: Path | None = None,
    replaced: Collection[str] = (),
    opened: Opened | None = None,
) -> OnnxModel:
    """Read a model into the IR. External data is memory-mapped, not copied: do not change the files while in use.

    Args:
        source: path of the model's file, its bytes, or a protobuf object (which is not changed).
        external_data: bytes by location, used instead of files of those names.
        external_folder: folder with the external data, if it is not the model's folder.
        replaced: initializers that the caller replaces later; the files with their data need not exist.
        opened: called with the path of each file that the model is read from, and the open file.

    Raises:
        ModelFolderError: the file is missing or unreadable.
        ExternalDataError: external data is missing, truncated, or outside the model's folder.
        GraphError: the source is not a valid ONNX model.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    raw: RawData = {}
    if isinstance(source, onnx.ModelProto):
        proto, origin = source, "the protobuf object"
    elif path is not None:
        origin = repr(str(path))
        proto, raw = _read(path, origin, opened)
    elif isinstance(source, bytes | bytearray | memoryview):
        proto, origin = _parse(bytes(source), "the model's bytes"), "the model's bytes"
    else:
        raise GraphError(
            f"a model cannot be read from {type(source).__name__}",
            "a source is a path, the bytes of a model, or an onnx.ModelProto",
            "pass one of these sources",
        )
    _check_header(proto, origin)
    try:
        data = ExternalData(path, external_data, folder=external_folder, replaced=replaced, opened=opened)
        model = Deserializer(data, proto.ir_version, raw).model(proto)
        check_model(model)
    except RecursionError:
        raise GraphError(
            f"{origin} nests subgraphs too deeply", "no real model nests hundreds of graphs", "export the model again"
        ) from None
    model.folder, model.files = None if path is None else path.parent, tuple(data.files)
    model.link_subgraphs()
    return model


def _why_missing(path: Path) -> str:
    if path.is_dir():
        return "the path is a folder"
    return "the path is a device or a pipe" if path.exists() else "the file does not exist"


def _hint_for(path: Path) -> str:
    if (path / "genai_config.json").is_file():
        return f"to chat with the model in this folder, run `genai chat {path}`"
    inside = sorted(path.glob("*.onnx")) if path.is_dir() else []
    return f"pass {inside[0]}" if inside else "check the path; the file name of an ONNX model ends in .onnx"


def _read(path: Path, origin: str, opened: Opened | None) -> tuple[onnx.ModelProto, RawData]:
    """Read a file; return the model, and the raw data that was cut out of it, by index of the large initializer."""
    try:
        if error := foreign_model_error(path, "an ONNX model"):
            raise error
        # Only regular files are opened, because a pipe or device might block when it is opened, or never end.
        if not path.is_file():
            raise ModelFolderError(
                f"there is no model file {str(path)!r}",
                _why_missing(path),
                _hint_for(path),
            )
        if path.stat().st_size > MAX_PROTOBUF_BYTES:
            raise GraphError(
                f"{str(path)!r} is larger than 2 GiB",
                "protobuf is limited to 2 GiB; larger models store their weights as external data",
                "export the model with external data",
            )
        try:
            return _parse_file(path, origin, opened)
        except GraphError:
            if pointer := pointer_error(path, GraphError):
                raise pointer from None
            raise
    except (OSError, ValueError) as error:
        raise ModelFolderError(
            f"the model file {str(path)!r:.300} cannot be read: {error!s:.300}",
            "the operating system refused access",
            "check the path and its permissions",
        ) from error


def _parse_file(path: Path, origin: str, opened: Opened | None) -> tuple[onnx.ModelProto, RawData]:
    with path.open("rb") as file:
        if opened is not None:
            opened(path, file)
            file.seek(0)
        if os.fstat(file.fileno()).st_size < SMALLEST:
            return _parse(file.read(), origin), {}
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            cut = cut_large_tensors(mapping)
            if cut is None:
                return _parse(mapping[:], origin), {}
        rest, spans = cut
        return _parse(rest, origin), {number: _bytes_of(file, *span) for number, span in spans.items()}


def _bytes_of(file: io.BufferedReader, first: int, end: int) -> NDArray[np.uint8]:
    """Read a part of a file into a separate mapping, which is returned to the system when the part is deleted."""
    data = mapped_array(end - first)
    file.seek(first)
    if file.readinto(data.data) != len(data):
        raise OSError("it became shorter while it was read")
    data.flags.writeable = False
    return data


def _parse(data: bytes, origin: str) -> onnx.ModelProto:
    if not data:
        raise _not_a_model(origin, "it is empty", ProtobufError)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise _not_a_model(origin, "it is not a protobuf message, or it is truncated", ProtobufError) from None
    return proto


def _check_header(proto: onnx.ModelProto, origin: str) -> None:
    if not proto.HasField("graph"):
        raise _not_a_model(origin, "it has no graph", ProtobufError)
    if not proto.HasField("ir_version") or proto.ir_version < 1:
        raise _not_a_model(origin, f"its IR version is {proto.ir_version}")
    if proto.ir_version > onnx.IR_VERSION:
        raise GraphError(
            f"{origin} has ONNX IR version {proto.ir_version}",
            f"the installed onnx {onnx.__version__} supports versions up to {onnx.IR_VERSION}",
            "update the onnx package, or export the model with an older IR version",
        )
    if proto.ir_version >= 3 and not proto.opset_import:
        raise _not_a_model(origin, "it imports no operator set")


def _not_a_model(origin: str, why: str, kind: type[GraphError] = GraphError) -> GraphError:
    return kind(f"{origin} is not an ONNX model", why, "check that the file is a complete .onnx file")


_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Tensors smaller than this stay in the message.
SMALLEST = 1 << 16

Data = bytes | mmap.mmap


class MessageField(NamedTuple):
    """A field of a message: its number and kind, the start of the field, and the start and end of its contents."""

    number: int
    kind: int
    begin: int
    first: int
    end: int


class _UnusualEncoding(Exception):
    """An encoding that model writers do not normally produce; protobuf parses the whole file instead."""


def cut_large_tensors(data: Data, smallest: int = SMALLEST) -> tuple[bytes, dict[int, tuple[int, int]]] | None:
    """Cut the raw data of large initializers out of a model.

    Returns:
        The model, with empty raw data in those initializers, and the start and end of their raw data in `data`, by
        initializer index. None if the bytes are not a plain sequence of known fields.
    """
    try:
        fields = list(_fields(data, 0, len(data)))
        graphs = [field for field in fields if field.number == _GRAPH]
        if len(graphs) != 1 or graphs[0].kind != _BYTES:
            return None
        rest, spans = _cut_graph(data, graphs[0], smallest)
    except _UnusualEncoding:
        return None
    parts = [rest if field.number == _GRAPH else data[field.begin : field.end] for field in fields]
    return b"".join(parts), spans


def _cut_graph(data: Data, graph: MessageField, smallest: int) -> tuple[bytes, dict[int, tuple[int, int]]]:
    parts: list[bytes] = []
    spans: dict[int, tuple[int, int]] = {}
    number = 0
    start = graph.first  # start of the bytes that have not been copied yet
    for field in _fields(data, graph.first, graph.end):
        if field.number != _INITIALIZER:
            continue
        if field.kind != _BYTES:
            raise _UnusualEncoding
        if field.end - field.first >= smallest:
            tensor = list(_fields(data, field.first, field.end))
            raw = [one for one in tensor if one.number == _RAW_DATA]
            if len(raw) > 1 or any(one.kind != _BYTES for one in raw):
                raise _UnusualEncoding
            if raw and raw[0].end - raw[0].first >= smallest:
                spans[number] = raw[0].first, raw[0].end
                left = data[field.first : raw[0].begin] + _header(_RAW_DATA, 0) + data[raw[0].end : field.end]
                parts += [data[start : field.begin], _header(_INITIALIZER, len(left)), left]
                start = field.end
        number += 1
    parts.append(data[start : graph.end])
    contents = b"".join(parts)
    return _header(_GRAPH, len(contents)) + contents, spans


def _fields(data: Data, first: int, end: int) -> Iterator[MessageField]:
    """Yield the fields of the message in data[first:end]."""
    offset = first
    while offset < end:
        key, contents = _varint(data, offset, end)
        number, kind = key >> 3, key & 7
        if kind == _BYTES:
            size, contents = _varint(data, contents, end)
            last = contents + size
        elif kind == _VARINT:
            _, last = _varint(data, contents, end)
        elif kind in (_FIXED64, _FIXED32):
            last = contents + (8 if kind == _FIXED64 else 4)
        else:
            raise _UnusualEncoding
        if last > end or not number:
            raise _UnusualEncoding
        yield MessageField(number, kind, offset, contents, last)
        offset = last


def _varint(data: Data, offset: int, end: int) -> tuple[int, int]:
    """Read a varint, which has seven bits per byte; return the number and the offset after it."""
    value = shift = 0
    while offset < end and shift < 64:
        byte = data[offset]
        value |= (byte & 127) << shift
        offset += 1
        if byte < 128:
            return value, offset
        shift += 7
    raise _UnusualEncoding


def _header(number: int, size: int) -> bytes:
    """Return the encoded key and length of a bytes field."""
    result = bytearray([number << 3 | _BYTES])
    while size > 127:
        result.append(size & 127 | 128)
        size >>= 7
    result.append(size)
    return bytes(result)
