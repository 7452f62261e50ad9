"""Conversion of values that enter or leave a session: DLPack, GPU memory, names of types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.arrays.memory import DeviceTensor, Region, to_host
from genai.kernels.cuda.driver import DLPACK_CUDA, Driver, NoDevice
from genai.kernels.errors import DeviceFailed

from ..devices import no_gpu, open_gpu
from ..errors import InputError
from ..onnx.types import DataType


def arrays_in(value: Any) -> Iterator[NDArray[Any]]:
    """Yield the arrays in a value. A sequence contains arrays of unlike shapes; an optional may be empty."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_in(item)


def on_host(values: Sequence[Any]) -> list[Any]:
    """Copy values in device memory to host arrays, with one transfer per memory region; other values are unchanged."""
    found = list(values)
    if DeviceTensor not in map(type, found):
        return found
    if away := [index for index, value in enumerate(found) if isinstance(value, DeviceTensor)]:
        for index, copy in zip(away, to_host([found[index] for index in away]), strict=True):
            found[index] = copy
    return found


def value_from_dlpack(value: Any) -> Any:
    """Return an array, or a tensor in GPU memory, that shares the memory of a DLPack producer or capsule.

    Raises:
        InputError: NumPy does not support the value's type, or its device does not exist on this machine.
        DeviceError: the value is on a GPU that cannot be used on this machine.
    """
    number = 0
    try:
        kind, number = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (1, 0)
        if kind == DLPACK_CUDA:
            driver = open_gpu(number)
            return tensor_over(driver, driver.adopt(value))
        if type(value).__name__ == "PyCapsule":
            return np.asarray(_Writable(np.from_dlpack(_Capsule(value))))
        return np.from_dlpack(value)
    except NoDevice as error:
        raise no_gpu(f"{type(value).__name__} on GPU {number} cannot be read through DLPack", error) from error
    except (MemoryError, DeviceFailed):
        raise
    except Exception as error:  # producers may raise any exception
        raise InputError(
            f"{type(value).__name__} cannot be read through DLPack", str(error), "pass a NumPy array"
        ) from error


class _Capsule:
    """A DLPack capsule with the interface of a DLPack producer."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class _Writable:
    """An array's memory, marked writable. NumPy treats old-style capsules as read-only: they carry no such flag."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def tensor_over(driver: Driver, array: Any) -> DeviceTensor:
    """Return a dense array in a device's own format as a tensor."""
    return DeviceTensor(Region(driver, array.reshape(-1).view(np.uint8)), 0, array.shape, np.dtype(array.dtype))


def type_name(value: Any) -> str:
    """Return the ONNX type of a value, such as "tensor(float)"."""
    if isinstance(value, np.ndarray | np.generic | DeviceTensor):
        try:
            return f"tensor({DataType.from_numpy(value.dtype).onnx_name})"
        except Exception:
            return f"array of {value.dtype}"
    if isinstance(value, list):
        return f"seq({type_name(value[0]) if value else ''})"
    if isinstance(value, dict):
        key = next(iter(value), 0)
        return f"map({'string' if isinstance(key, str) else 'int64'},...)"
    return "optional()" if value is None else type(value).__name__
