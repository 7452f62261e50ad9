"""Values on their way into and out of a session: DLPack, memory of GPUs, names of types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.arrays.memory import DeviceTensor, Region, to_host
from genai.kernels.cuda.driver import DLPACK_CUDA, Driver, NoDevice
from genai.kernels.device import DeviceFailed

from ..devices import no_gpu, open_gpu
from ..errors import InputError
from ..onnx.types import DataType


def on_host(values: Sequence[Any]) -> list[Any]:
    """Values as they are, but those in a device's memory as arrays: one transfer for what lies together."""
    found = list(values)
    if away := [index for index, value in enumerate(found) if isinstance(value, DeviceTensor)]:
        for index, copy in zip(away, to_host([found[index] for index in away]), strict=True):
            found[index] = copy
    return found


def value_from_dlpack(value: Any) -> Any:
    """An array, or a tensor in a GPU's memory, over the memory of a DLPack producer or capsule.

    Raises:
        InputError: it is of a type that NumPy does not know, or on a device that is not here.
        DeviceError: it is on a GPU that cannot be used here.
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
    except Exception as error:  # producers raise what they like
        raise InputError(
            f"{type(value).__name__} cannot be read through DLPack", str(error), "pass a NumPy array"
        ) from error


class _Capsule:
    """A DLPack capsule as its producer would offer it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class _Writable:
    """Memory of an array that NumPy holds for read-only since a capsule of the old form does not say."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def tensor_over(driver: Driver, array: Any) -> DeviceTensor:
    """A device's own array, which is dense, as a tensor."""
    return DeviceTensor(Region(driver, array.reshape(-1).view(np.uint8)), 0, array.shape, np.dtype(array.dtype))


def type_name(value: Any) -> str:
    """The ONNX type of a value, as in "tensor(float)"."""
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
