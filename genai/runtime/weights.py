"""Packed weights, shared: the same bytes wanted in the same layout are packed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class WeightStore:
    """Keeps packed constants by (where their bytes lie, layout).

    Keying by address makes views share: a tied embedding that reads the head's weight through a Reshape finds the
    packed copy that the head made.
    """

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self._constants = constants
        self._packed: dict[tuple[Any, ...], Any] = {}

    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], T]) -> T:
        """The constants `names` in `layout`; `make` packs them the first time."""
        key = (layout, *(self._address(name) for name in names))
        if key not in self._packed:
            self._packed[key] = make()
        value: T = self._packed[key]
        return value

    def forget_constants(self) -> None:
        """Nothing more will be packed: those that no plan holds may go."""
        self._constants = {}

    def _address(self, name: str) -> tuple[int, int] | None:
        if not name:
            return None
        array = np.asarray(self._constants[name])
        return array.__array_interface__["data"][0], array.nbytes
