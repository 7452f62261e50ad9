"""Packed weights, shared: the same bytes wanted in the same layout are packed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..graph.tensor import Tensor

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
        self._tensors: dict[int, Tensor] = {}

    def add_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that constants may be views of."""
        self._tensors |= {t.raw().__array_interface__["data"][0]: t for t in tensors if t.is_external}

    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], T]) -> T:
        """The constants `names` in `layout`; `make` packs them the first time."""
        key = (layout, *(self._address(name) for name in names))
        if key not in self._packed:
            self._packed[key] = make()
            for name in filter(None, names):
                self._release(name)
            if self._on_packed is not None:
                self._on_packed(sum(np.asarray(self._constants[name]).nbytes for name in filter(None, names)))
        value: T = self._packed[key]
        return value

    def _release(self, name: str) -> None:
        place = self._address(name)
        tensor = None if place is None else self._tensors.get(place[0])
        if tensor is not None:
            tensor.release_pages()

    def forget_constants(self) -> None:
        """Nothing more will be packed: those that no plan holds may go."""
        self._constants = {}

    def _address(self, name: str) -> tuple[int, int] | None:
        if not name:
            return None
        array = np.asarray(self._constants[name])
        return array.__array_interface__["data"][0], array.nbytes
