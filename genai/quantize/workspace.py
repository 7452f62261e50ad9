"""Finished matrices on disk next to the output, so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizedWeight, WeightFormat

from ..convert.folder import locked
from ..errors import StateError

_PLAN = "plan.json"
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class FinishedMatrix:
    """A finished matrix.

    Attributes:
        packed: the quantised matrix, memory-mapped from its files.
        factors: float32 [columns], the factors by which the columns were multiplied before quantisation, or None.
        notes: notes of the method.
        seconds: duration of the quantisation.
    """

    packed: QuantizedWeight
    factors: NDArray[np.float32] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def workspace_folder(target: Path) -> Path:
    """Return the hidden folder next to a model folder that is being written."""
    return target.parent / f".{target.name}.quantizing"


@dataclass(frozen=True)
class _Writer:
    """A wrapper that makes NumPy call `write`, which raises the system's errors."""

    file: Any

    def write(self, data: bytes) -> int:
        return int(self.file.write(data))


def save_array(file: Any, array: NDArray[Any]) -> None:
    """Save to a file object. For a real file, NumPy would report a full disk only as a number of bytes written."""
    np.save(_Writer(file), array, allow_pickle=False)


class FinishedMatrices(AbstractContextManager["FinishedMatrices"]):
    """A folder of finished matrices.

    Args:
        target: the model folder to write; the workspace is a hidden folder next to it.
        plan: everything that the matrices depend on. Matrices for another plan are deleted.

    Attributes:
        resumed: number of matrices that an earlier run finished.

    Raises:
        StateError: another process is using the folder.
    """

    def __init__(self, target: Path, plan: Mapping[str, Any]) -> None:
        self.folder = workspace_folder(target)
        self._stack = ExitStack()
        self._identity = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
        self.folder.mkdir(exist_ok=True)
        if self._stack.enter_context(locked(self.folder, wait=False)) is False:
            raise StateError(
                f"{self.folder} is in use",
                "another process is writing the same model",
                "wait for the other process, or choose another output folder",
            )
        if self._read(_PLAN) != {"identity": self._identity}:
            for path in self.folder.iterdir():
                path.unlink()
            self._write(_PLAN, json.dumps({"identity": self._identity}).encode())
        self.resumed = len(list(self.folder.glob("*.done.json")))

    def get(self, name: str) -> FinishedMatrix | None:
        """Return a finished matrix, or None."""
        record = self._read(f"{_file(name)}.done.json")
        if record is None:
            return None
        arrays = {
            part: np.load(self.folder / f"{_file(name)}.{part}.npy", mmap_mode="r", allow_pickle=False)
            for part in record["arrays"]
        }
        factors = arrays.pop("factors", None)
        if record["zero_points"]:
            arrays["offset_scales"] = arrays["scales"]
        format = WeightFormat(**record["format"])
        packed = QuantizedWeight(format, record["n"], record["k"], **arrays)
        return FinishedMatrix(packed, factors, record["notes"], record["seconds"])

    def put(self, name: str, result: FinishedMatrix) -> None:
        """Store a matrix, which counts as finished only when it is completely on disk."""
        packed = result.packed
        arrays: dict[str, NDArray[Any] | None] = {
            "data": packed.data,
            "grid": packed.grid,
            "scales": packed.scales,
            "multipliers": packed.multipliers,
            "offset_scales": None if packed.offset_scales is packed.scales else packed.offset_scales,
            "offsets": packed.offsets,
            "factors": result.factors,
        }
        present = {part: array for part, array in arrays.items() if array is not None}
        for part, array in present.items():
            path = self.folder / f"{_file(name)}.{part}.npy"
            with _replacing(path) as file:
                save_array(file, array)
        record = {
            "name": name,
            "arrays": list(present),
            "format": asdict(packed.format),
            "n": packed.rows,
            "k": packed.columns,
            "zero_points": packed.offset_scales is not None and packed.offset_scales is packed.scales,
            "notes": dict(result.notes),
            "seconds": result.seconds,
        }
        self._write(f"{_file(name)}.done.json", json.dumps(record).encode())

    def remember(self, name: str, content: Any) -> None:
        """Store a value that JSON can represent."""
        self._write(f"{_file(name)}.json", json.dumps(content).encode())

    def remembered(self, name: str) -> Any:
        """Return the value stored under a name, or None."""
        return self._read(f"{_file(name)}.json")

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Release the lock."""
        self._stack.close()

    def __exit__(self, *error: object) -> None:
        if not any(path.name != _PLAN for path in self.folder.glob("*.json")):  # there is nothing to resume
            self.remove()
        self.close()

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError):
            return None

    def _write(self, name: str, data: bytes) -> None:
        with _replacing(self.folder / name) as file:
            file.write(data)


class _replacing(AbstractContextManager[Any]):
    """A file that is written atomically."""

    def __init__(self, path: Path) -> None:
        self._path, self._new = path, path.with_name(path.name + ".new")

    def __enter__(self) -> Any:
        self._file = self._new.open("wb")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if kind is None:
            self._new.replace(self._path)
        else:
            self._new.unlink(missing_ok=True)


def _file(name: str) -> str:
    """Return a file name that is valid on any file system."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]
