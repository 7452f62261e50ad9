"""Ranges by name, and the JSON file that stores the ranges in onnxruntime's format."""

from __future__ import annotations

import json
import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ...common.atomic_files import write_whole
from ...errors import InputError, ModelFolderError, NotSupportedYetError

# Larger than the file for a model with a hundred thousand values.
_MOST_BYTES = 1 << 28


class CalibrationMethod(Enum):
    """The method for finding a range from values. Distribution is only for float8 and is not supported."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class TensorData:
    """The range of one value.

    Args:
        lowest, highest: bounds, converted to float32.
    """

    def __init__(self, *, lowest: Any, highest: Any) -> None:
        self.lowest, self.highest = np.float32(_number(lowest)), np.float32(_number(highest))
        if not (math.isfinite(self.lowest) and math.isfinite(self.highest) and self.lowest <= self.highest):
            raise InputError(
                f"the range is {self.lowest} to {self.highest}",
                "both numbers must be finite, and the first must not be larger",
                "calibrate again",
            )

    @property
    def range_value(self) -> tuple[np.float32, np.float32]:
        """The lowest and the highest value."""
        return self.lowest, self.highest

    @property
    def avg_std(self) -> NoReturn:
        """Not supported: it fits float8 to a mean and a deviation, and float8 is not supported."""
        raise NotSupportedYetError(
            "TensorData.avg_std is not supported",
            "this value is used to fit float8 to a mean and a deviation, and float8 is not supported",
            "use range_value",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a value for JSON."""
        return {"lowest": _written(self.lowest), "highest": _written(self.highest), "CLS": "TensorData"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorData:
        """Convert the result of `to_dict` back. Raise InputError if it is malformed."""
        if not isinstance(data, Mapping) or "lowest" not in data or "highest" not in data:
            raise InputError(
                f"{data!r:.80} is not a range", "the data has no 'lowest' and 'highest'", "calibrate again"
            )
        return cls(lowest=data["lowest"], highest=data["highest"])

    def __repr__(self) -> str:
        return f"TensorData(lowest={self.lowest}, highest={self.highest})"


def _written(value: np.float32) -> dict[str, Any]:
    return {"data": [float(value)], "dtype": "float32", "CLS": "numpy.array"}


def _number(value: Any) -> float:
    if isinstance(value, Mapping):
        value = value.get("data")
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.size != 1:
        raise InputError(f"{value!r:.80} is not a number", "a range consists of two numbers", "calibrate again")
    return float(array.reshape(()))


class TensorsData:
    """Ranges by value, and the calibration method that found them.

    Args:
        data: TensorData or (lowest, highest) for each value.
    """

    def __init__(self, calibration_method: CalibrationMethod, data: Mapping[str, Any]) -> None:
        self.calibration_method = calibration_method
        self.data = {name: self._entry(name, one) for name, one in data.items()}

    @staticmethod
    def _entry(name: str, value_range: Any) -> TensorData:
        if isinstance(value_range, TensorData):
            return value_range
        if isinstance(value_range, tuple | list) and len(value_range) >= 2:
            return TensorData(lowest=value_range[0], highest=value_range[1])
        raise InputError(
            f"the range of {name!r} is {value_range!r:.80}",
            "a range must be a tuple (lowest, highest)",
            "pass a TensorData",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __contains__(self, name: object) -> bool:
        return name in self.data

    def __getitem__(self, name: str) -> TensorData:
        return self.data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.data[name] = self._entry(name, value)

    def keys(self) -> KeysView[str]:
        """Return the names of the values."""
        return self.data.keys()

    def values(self) -> ValuesView[TensorData]:
        """Return the ranges."""
        return self.data.values()

    def items(self) -> ItemsView[str, TensorData]:
        """Return the pairs of names and ranges."""
        return self.data.items()

    def to_dict(self) -> dict[str, Any]:
        """Return a value for JSON."""
        method = {"CLS": "CalibrationMethod", "value": f"CalibrationMethod.{self.calibration_method.name}"}
        data = {name: one.to_dict() for name, one in self.data.items()}
        return {"CLS": "TensorsData", "data": data, "calibration_method": method}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorsData:
        """Convert the result of `to_dict` back. Raise InputError if it is malformed."""
        try:
            method = CalibrationMethod[str(data["calibration_method"]["value"]).removeprefix("CalibrationMethod.")]
            entries = dict(data["data"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                "the data contains no calibration ranges", f"{type(error).__name__}: {error}", "calibrate again"
            ) from error
        return cls(method, {name: TensorData.from_dict(one) for name, one in entries.items()})


def save_tensors_data(tensors_data: TensorsData, path: str | Path, *, smooth_quant: bool = False) -> None:
    """Write ranges as JSON.

    Args:
        smooth_quant: value of onnxruntime's key of that name.

    Raises:
        ModelFolderError: the file cannot be written.
    """
    text = json.dumps(tensors_data.to_dict() | {"smooth_quant": smooth_quant})
    try:
        write_whole(Path(path), text.encode())
    except OSError as error:
        raise ModelFolderError(
            f"the ranges cannot be written to {str(path)!r}", str(error), "check the folder and its permissions"
        ) from error


def load_tensors_data(path: str | Path) -> TensorsData:
    """Read ranges from JSON.

    Raises:
        ModelFolderError: the file cannot be read.
        InputError: the file does not contain ranges, or contains ranges for SmoothQuant.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise InputError(
                f"{str(path)!r} has {size} bytes",
                "the file is too large to be a file of calibration ranges",
                "check the path",
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFolderError(f"the ranges in {str(path)!r} cannot be read", str(error), "check the path") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} has no ranges", f"the file is not JSON: {error}", "calibrate again") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{str(path)!r} has no ranges",
            f"the file contains a {type(content).__name__}, not a dict of ranges",
            "calibrate again",
        )
    if content.get("smooth_quant"):
        raise InputError(
            f"the ranges in {str(path)!r} were computed with SmoothQuant",
            "SmoothQuant changes the model before calibration",
            "calibrate again without SmoothQuant",
        )
    return TensorsData.from_dict(content)
