"""Tensors of the files of one model, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from ..errors import InputError


class TensorFile(Protocol):
    """A file of tensors; `tensors` has what its header says of each."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, Any]:
        """By name."""

    def read(self, name: str) -> NDArray[Any]:
        """A tensor; nothing is copied."""


File = TypeVar("File", bound=TensorFile)


class TensorFiles(Mapping[str, NDArray[Any]], Generic[File]):
    """Several files as one; each look-up maps memory and copies nothing."""

    def __init__(self) -> None:
        self._file_of: dict[str, File] = {}

    def _add(self, file: File, fix: str) -> None:
        """One more file; `fix` is for a name that another has, too, which is an InputError."""
        for name in file.tensors:
            if name in self._file_of:
                raise InputError(
                    f"tensor {name!r} is in {self._file_of[name].path.name} and in {file.path.name}",
                    "there is no telling which of them counts",
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
