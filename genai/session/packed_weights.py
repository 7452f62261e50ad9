"""Shared packed weights: the same bytes in the same layout are packed only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary, ref

import numpy as np
from numpy.typing import NDArray

from ..onnx.tensor import OnnxTensor

T = TypeVar("T")


class WeightStore:
    """A cache of packed constants, keyed by (address of the bytes, layout).

    Because the key is an address, views share packed copies: a tied embedding that reads the head's weight through a
    Reshape finds the head's packed copy. An entry is valid only while the array that owns the bytes exists, because
    another array can get the address afterwards. After packing, the pages of the model's file are released to the
    system.
    """

    def __init__(self, constants: Mapping[str, Any], on_packed: Callable[[int], None] | None = None) -> None:
        """`on_packed` is called with the number of packed bytes."""
        self._constants = constants
        self._on_packed = on_packed
        self._packed: dict[tuple[Any, ...], tuple[list[ref[NDArray[Any]]], Any]] = {}
        self._tensors: WeakValueDictionary[int, OnnxTensor] = WeakValueDictionary()  # the graph's external tensors
        self._names: dict[tuple[Any, ...], tuple[list[ref[NDArray[Any]]], str]] = {}

    def add_tensors(self, tensors: Iterable[OnnxTensor]) -> None:
        """Add tensors of which constants may be views."""
        self._tensors.update({t.raw().__array_interface__["data"][0]: t for t in tensors if t.is_external})

    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], T]) -> T:
        """Return the constants `names` in `layout`; the first call packs them with `make`."""
        key = (layout, *(self._address(name) for name in names))
        value: T | None = _valid(self._packed.get(key))
        if value is None:
            value = make()
            self._packed[key] = [ref(_owner(self._array(name))) for name in filter(None, names)], value
            for name in filter(None, names):
                self.release(self._array(name))
        return value

    def release(self, array: NDArray[Any]) -> None:
        """Release the file pages of a constant that was packed."""
        tensor = self._tensors.get(array.__array_interface__["data"][0])
        if tensor is not None:
            tensor.release_pages()
        if self._on_packed is not None:
            self._on_packed(array.nbytes)

    def tensor_of(self, array: NDArray[Any]) -> OnnxTensor | None:
        """Return the external tensor of which a constant is a view of all elements; None if there is none."""
        tensor = self._tensors.get(array.__array_interface__["data"][0])
        return tensor if tensor is not None and tensor.nbytes == array.nbytes else None

    def name_of(self, name: str) -> str:
        """Return one name for all constants with the same bytes in the same order; other names are unchanged."""
        if name not in self._constants:
            return name
        array = self._array(name)
        order: tuple[int, ...] = () if array.flags.c_contiguous else (*array.shape, *array.strides)
        key = self._address(name), str(array.dtype), order
        known: str | None = _valid(self._names.get(key))
        if known is None:
            self._names[key] = [ref(_owner(array))], name
        return known or name

    def forget_constants(self) -> None:
        """Drop the constants that no plan holds. Call this method when packing is complete."""
        self._constants = {}

    def _array(self, name: str) -> NDArray[Any]:
        return np.asarray(self._constants[name])

    def _address(self, name: str) -> tuple[int, int] | None:
        if not name:
            return None
        array = self._array(name)
        return array.__array_interface__["data"][0], array.nbytes


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _valid(entry: tuple[list[ref[NDArray[Any]]], Any] | None) -> Any:
    """Return the value of an entry whose owners exist, or None."""
    return None if entry is None or any(owner() is None for owner in entry[0]) else entry[1]
