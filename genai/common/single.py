"""Objects of which there is one: they own memory and threads, or a place in a sequence."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from ..errors import StateError


class Single:
    """One that cannot be copied: pickle, copy.copy and copy.deepcopy all ask here."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raises StateError."""
        raise StateError(
            f"{type(self).__name__} objects can be neither copied nor pickled",
            "it owns memory and threads of this process",
            "make another one where it is needed; processes can be given the path of the model instead",
        )
