"""Objects that cannot be copied, because they own memory and threads, or a position in a sequence."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from ..errors import StateError


class Single:
    """An object that cannot be copied. pickle, copy.copy and copy.deepcopy all call `__reduce_ex__`."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise StateError."""
        raise StateError(
            f"{type(self).__name__} objects can be neither copied nor pickled",
            "these objects own memory and threads of this process",
            "create a new object instead of a copy, and pass the model's path to other processes",
        )
