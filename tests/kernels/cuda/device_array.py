"""Memory of an emulated GPU as the toolkit sees it: it refuses what CuPy's arrays refuse, or do in another stream."""

from __future__ import annotations

from typing import Any, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray


class DeviceArray:
    """What `genai.kernels.cuda.driver.Driver` says may be asked of memory, and nothing else.

    It is no array of NumPy's, which np.asarray would hand on without a word.

    Attributes:
        host: where it lies, for drivers and for tests that look into it.
    """

    __array_ufunc__ = None  # arithmetic with a host's array is a TypeError
    __iter__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: NDArray[Any]) -> None:
        self.host = host

    def _over(self, host: NDArray[Any]) -> Self:
        return type(self)(host)

    # --- what may be asked -------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.host.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.host.dtype

    @property
    def ndim(self) -> int:
        return self.host.ndim

    @property
    def size(self) -> int:
        return self.host.size

    @property
    def itemsize(self) -> int:
        return self.host.itemsize

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def strides(self) -> tuple[int, ...]:
        return self.host.strides

    @property
    def flags(self) -> Any:
        return self.host.flags

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, key: Any) -> Self:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(one, SupportsIndex | slice) or one is ... for one in keys) or any(
            isinstance(one, np.ndarray | bool) for one in keys
        ):
            raise TypeError(f"memory of a device is cut by numbers and slices, not by {key!r:.80}")
        # A single element stays where it is, too.
        return self._over(self.host[keys if any(one is ... for one in keys) else (*keys, ...)])

    def view(self, dtype: Any) -> Self:
        """The same bytes as another type."""
        dtype = np.dtype(dtype)
        if dtype.kind not in "biuf" or not dtype.isbuiltin:
            raise TypeError(f"a device has no arrays of {dtype}")
        if dtype.itemsize != self.itemsize and not self.flags.c_contiguous:
            raise ValueError("memory with gaps cannot be viewed as a type of another size")
        return self._over(self.host.view(dtype))

    def reshape(self, *shape: Any) -> Self:
        """The same memory in another shape: where that takes a copy it is refused."""
        made = self.host.reshape(*shape)
        if made.size and not np.may_share_memory(made, self.host):
            raise ValueError(f"{list(self.shape)} in steps of {list(self.strides)} bytes as {list(made.shape)}: a copy")
        return self._over(made)

    # --- what is refused ---------------------------------------------------------------------------------------------

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("implicit conversion to a NumPy array is not allowed: Driver.download copies memory")

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{function.__name__} of memory of a device")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ValueError("memory of a device is written by Driver.write, copy and copy_row")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("memory of a device is not compared on the host")

    def __bool__(self) -> NoReturn:
        raise TypeError("memory of a device is neither true nor false on the host")


def within(array: Any) -> NDArray[Any]:
    """The host's array of memory of a device. Raises TypeError: it is none, such as an array of the host's."""
    if not isinstance(array, DeviceArray):
        raise TypeError(f"{type(array).__name__} is no memory of this device")
    return array.host


def of_host(array: Any) -> NDArray[Any]:
    """An array of the host. Raises TypeError: it is memory of a device."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} is no array of the host")
    return array
