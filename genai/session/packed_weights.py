"""Packed weights, shared: the same bytes wanted in the same layout are packed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ..onnx.tensor import OnnxTensor

T = TypeVar("T")


class WeightStore:
    """Keeps packed constants by (where their bytes lie, layout).

    Keying by address makes views share: a tied embedding that reads the head's weight through a Reshape finds the
    packed copy that the head made. Pages of the model's files that were packed are given back to the system.
    """

    def __init__(self, constants: Mapping[str, Any], on_packed: Callable[[int], None] | None = None) -> None:
        """`on_packed` hears how many bytes were packed."""
        self._constants = constants
        self._on_packed = on_packed
        self._packed: dict[tuple[Any, ...], Any] = {}
        self._tensors: WeakValueDictionary[int, OnnxTensor] = WeakValueDictionary()  # those of the graph
        self._names: dict[tuple[Any, ...], str] = {}

    def add_tensors(self, tensors: Iterable[OnnxTensor]) -> None:
        """Tensors that constants may be views of."""
        self._tensors.update({t.raw().__array_interface__["data"][0]: t for t in tensors if t.is_external})

    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], T]) -> T:
        """The constants `names` in `layout`; `make` packs them the first time."""
        key = (layout, *(self._address(name) for name in names))
        if key not in self._packed:
            self._packed[key] = make()
            for name in filter(None, names):
                self.release(np.asarray(self._constants[name]))
        value: T = self._packed[key]
        return value

    def release(self, array: NDArray[Any]) -> None:
        """A constant was packed: its pages of the model's file go back to the system."""
        tensor = self._tensors.get(array.__array_interface__["data"][0])
        if tensor is not None:
            tensor.release_pages()
        if self._on_packed is not None:
            self._on_packed(array.nbytes)

    def name_of(self, name: str) -> str:
        """One name for all constants of the same bytes in the same order; other names are their own."""
        if name not in self._constants:
            return name
        array = np.asarray(self._constants[name])
        order: tuple[int, ...] = () if array.flags.c_contiguous else (*array.shape, *array.strides)
        return self._names.setdefault((self._address(name), str(array.dtype), order), name)

    def forget_constants(self) -> None:
        """Nothing more will be packed: those that no plan holds may go."""
        self._constants = {}

    def _address(self, name: str) -> tuple[int, int] | None:
        if not name:
            return None
        array = np.asarray(self._constants[name])
        return array.__array_interface__["data"][0], array.nbytes
