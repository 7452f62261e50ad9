"""Writes models as protobuf objects or files, with the weights in the model file or beside it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EINVAL
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import EncodeError

from ..errors import GraphError, ModelFolderError, OptionError
from .ir import OnnxModel, OnnxTensor
from .reader import MAX_PROTOBUF_BYTES
from .serialize import EmbeddingEncoder, Serializer
from .types import DataType

# Offsets are multiples of the page size, as the ONNX specification advises for memory mapping.
_ALIGNMENT = 4096


def to_proto(model: OnnxModel) -> onnx.ModelProto:
    """Convert a model to protobuf. External tensors remain references to their files, relative to `model.folder`."""
    return Serializer().model(model)


def write_model(
    model: OnnxModel, path: str | Path, *, external_data: str | None = None, size_threshold: int = 1024,
    kept: Collection[str] = (),
) -> None:  # fmt: skip
    """Write a model to a file. Files appear complete or not at all; the model object is not changed.

    Args:
        path: path of the model file; its folder must exist.
        external_data: name of a file beside `path` for tensors of `size_threshold` bytes or more. Without this file,
            every tensor is stored in the model's own file, which is limited to 2 GiB.
        size_threshold: minimum size of external tensors, in bytes.
        kept: with `external_data`, names of initializers that stay in the files beside `path` that they were read from.

    Raises:
        OptionError: `external_data` is not a plain file name, or the threshold is negative.
        GraphError: the model does not fit in one file.
        ModelFolderError: the files cannot be written.
    """
    path = Path(path)
    _check_options(path, external_data, size_threshold)
    try:
        if external_data is None:
            weights = sum(tensor.nbytes for graph in model.graphs() for tensor in graph.initializers.values())
            if weights > MAX_PROTOBUF_BYTES:
                raise _too_large(path, weights)
            data = _serialized(EmbeddingEncoder().model(model), path)
            with _replacing(path) as file:
                file.write(data)
        else:
            # The data file is moved into place first, so that a model file never refers to missing data.
            with _replacing(path) as file, _replacing(path.with_name(external_data)) as data_file:
                proto = _SplittingEncoder(data_file, external_data, size_threshold, kept).model(model)
                file.write(_serialized(proto, path))
    except OSError as error:
        raise ModelFolderError(
            f"the model cannot be written to {str(path)!r}: {error}",
            "the operating system could not write it",
            "check that the folder exists, is writable and has enough space",
        ) from error


def _check_options(path: Path, external_data: str | None, size_threshold: int) -> None:
    if size_threshold < 0:
        raise OptionError(f"size_threshold is {size_threshold}", "a size in bytes cannot be negative", "pass 0 or more")
    if external_data is not None and (
        Path(external_data).name != external_data or external_data in ("", ".", "..", path.name)
    ):
        raise OptionError(
            f"external_data is {external_data!r}",
            "a plain file name is expected, other than the model's, because the data is stored beside the model",
            f"pass a name such as {path.name + '.data'!r}",
        )


def _serialized(proto: onnx.ModelProto, path: Path) -> bytes:
    try:
        data: bytes = proto.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise _too_large(path, None) from error
    if len(data) > MAX_PROTOBUF_BYTES:
        raise _too_large(path, len(data))
    return data


class _SplittingEncoder(Serializer):
    """Writes large tensors to a data file during conversion; equal storages are written once."""

    def __init__(self, file: BinaryIO, location: str, size_threshold: int, kept: Collection[str] = ()) -> None:
        self._file, self._kept = file, kept
        self._location = location
        self._size_threshold = size_threshold
        self._offsets: dict[int, int] = {}

    def external(self, tensor: OnnxTensor) -> Mapping[str, str] | None:
        # Segments and strings stay where they are stored; a small tensor from another file must move inline.
        if tensor.dtype is DataType.STRING or tensor.segment is not None or tensor.name in self._kept:
            return super().external(tensor)
        if tensor.nbytes < self._size_threshold:
            return None
        return {"location": self._location, "offset": str(self._offset(tensor)), "length": str(tensor.nbytes)}

    def _offset(self, tensor: OnnxTensor) -> int:
        # Storages exist as long as the model, so their identity is a safe key.
        key = id(tensor.storage)
        if key not in self._offsets:
            end = self._file.tell()
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            self._file.write(b"\0" * (offset - end))
            self._file.write(tensor.raw().data)
            self._offsets[key] = offset
        return self._offsets[key]


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file. It replaces a path and gets the path's mode, or is deleted if the block fails.

    The name is chosen before the file is created, because otherwise an interrupt could leave behind an unknown file.
    """
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "it is a folder, a pipe or a device", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _too_large(path: Path, nbytes: int | None) -> GraphError:
    size = "more than 2 GiB" if nbytes is None else f"{nbytes} bytes"
    return GraphError(
        f"the model for {str(path)!r} needs {size} in one file",
        "protobuf is limited to 2 GiB",
        f"write the weights beside it: write_model(..., external_data={path.name + '.data'!r})",
    )
