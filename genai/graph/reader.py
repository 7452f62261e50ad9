"""Reads ONNX models from files, bytes or protobuf objects."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from ..errors import GraphError, ModelFolderError
from .decode import Decoder
from .external_data import ExternalData
from .ir import Model
from .large_tensors import SMALLEST, cut_large_tensors
from .validate import check_model

MAX_PROTOBUF_BYTES = 2**31 - 1


def read_model(
    source: str | Path | bytes | onnx.ModelProto, *, external_data: Mapping[str, bytes] | None = None
) -> Model:
    """Read a model into the IR. External data is memory-mapped, not copied: leave the files in place while in use.

    Args:
        source: path of the model's file, its bytes, or a protobuf object (which is not changed).
        external_data: bytes by location, in place of files of those names.

    Raises:
        ModelFolderError: if the file is missing or unreadable.
        ExternalDataError: if external data is missing, truncated, or outside the model's folder.
        GraphError: if this is not an ONNX model, or not a valid one.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    raw: Mapping[int, bytes] = {}
    if isinstance(source, onnx.ModelProto):
        proto, origin = source, "the protobuf object"
    elif path is not None:
        origin = repr(str(path))
        proto, raw = _read(path, origin)
    elif isinstance(source, bytes | bytearray | memoryview):
        proto, origin = _parse(bytes(source), "the model's bytes"), "the model's bytes"
    else:
        raise GraphError(
            f"a model cannot be read from {type(source).__name__}",
            "a source is a path, the bytes of a model, or an onnx.ModelProto",
            "pass one of these",
        )
    _check_header(proto, origin)
    try:
        model = Decoder(ExternalData(path, external_data), proto.ir_version, raw).model(proto)
        check_model(model)
    except RecursionError:
        raise GraphError(
            f"{origin} nests subgraphs too deeply", "no real model nests hundreds of graphs", "export it again"
        ) from None
    model.folder = None if path is None else path.parent
    model.link_subgraphs()
    return model


def _read(path: Path, origin: str) -> tuple[onnx.ModelProto, Mapping[int, bytes]]:
    """The model, and the raw data of large initializers, by their number, that it was read without."""
    try:
        # A pipe or device would block or never end, so only regular files are opened.
        if not path.is_file():
            raise ModelFolderError(
                f"there is no model file {str(path)!r}",
                "it is a folder" if path.is_dir() else "no such file",
                "check the path; an ONNX model is a file that ends in .onnx",
            )
        if path.stat().st_size > MAX_PROTOBUF_BYTES:
            raise GraphError(
                f"{str(path)!r} is larger than 2 GiB",
                "protobuf cannot hold that much; larger models keep their weights in external data",
                "export the model with external data",
            )
        return _parse_file(path, origin)
    except (OSError, ValueError) as error:
        raise ModelFolderError(
            f"the model file {str(path)!r:.300} cannot be read: {error!s:.300}",
            "the system refused it",
            "check the path and its permissions",
        ) from error


def _parse_file(path: Path, origin: str) -> tuple[onnx.ModelProto, Mapping[int, bytes]]:
    if path.stat().st_size < SMALLEST:
        return _parse(path.read_bytes(), origin), {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        found = cut_large_tensors(mapping)
        if found is None:
            return _parse(mapping[:], origin), {}
        rest, places = found
        return _parse(rest, origin), {number: mapping[first:end] for number, (first, end) in places.items()}


def _parse(data: bytes, origin: str) -> onnx.ModelProto:
    if not data:
        raise _not_a_model(origin, "it is empty")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise _not_a_model(origin, "it is not a protobuf message, or it is truncated") from None
    return proto


def _check_header(proto: onnx.ModelProto, origin: str) -> None:
    if not proto.HasField("graph"):
        raise _not_a_model(origin, "it has no graph")
    if not proto.HasField("ir_version") or proto.ir_version < 1:
        raise _not_a_model(origin, f"its IR version is {proto.ir_version}")
    if proto.ir_version > onnx.IR_VERSION:
        raise GraphError(
            f"{origin} is of ONNX IR version {proto.ir_version}",
            f"the installed onnx {onnx.__version__} knows versions up to {onnx.IR_VERSION} and would lose the rest",
            "update the onnx package, or export the model with an older IR version",
        )
    if proto.ir_version >= 3 and not proto.opset_import:
        raise _not_a_model(origin, "it imports no operator set")


def _not_a_model(origin: str, why: str) -> GraphError:
    return GraphError(f"{origin} is not an ONNX model", why, "check that the file is the .onnx file and complete")
