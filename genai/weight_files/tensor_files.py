"""The tensors of several files of one model, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from ..errors import InputError


class TensorFile(Protocol):
    """A file of tensors; `tensors` holds the header's entry for each tensor."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The header's entries, by the names of the tensors."""

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor without a copy."""


File = TypeVar("File", bound=TensorFile)


class TensorFiles(Mapping[str, NDArray[Any]], Generic[File]):
    """Several files as one mapping. Looking up a tensor memory-maps it without a copy."""

    def __init__(self) -> None:
        self._file_of: dict[str, File] = {}

    def _add(self, file: File, fix: str) -> None:
        """Add a file. Raise InputError with this `fix` if another file has a tensor of the same name."""
        for name in file.tensors:
            if name in self._file_of:
                raise InputError(
                    f"tensor {name!r} is in {self._file_of[name].path.name} and in {file.path.name}",
                    "tensor names must be unique among the files of a model",
                    fix,
                )
            self._file_of[name] = file

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._file_of[name].read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
