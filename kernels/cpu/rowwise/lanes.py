"""What the operators' loops share: up to LANES numbers of a row at a time."""

from __future__ import annotations

from typing import Any

from ..lazy import inline
from ..memory import load_first, load_float32, store_first, store_float32
from ..vector import LANES


@inline
def load(address: int, left: int) -> Any:
    """The next numbers of a row of which `left` are left; zeros beyond its end."""
    if left >= LANES:
        return load_float32(address)
    return load_first(address, left)


@inline
def store(address: int, vector: Any, left: int) -> None:
    """Write the next numbers of a row of which `left` are left; lanes beyond its end are dropped."""
    if left >= LANES:
        store_float32(address, vector)
    else:
        store_first(address, vector, left)
