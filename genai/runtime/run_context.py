"""What a run of a general graph tells its kernels: whether someone wants it to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import GenaiError


class RunStopped(GenaiError):
    """The run was stopped from outside."""


@dataclass(frozen=True)
class RunContext:
    """Handed to every kernel; subgraphs ask before each of their runs, so that endless loops end too."""

    is_stopped: Callable[[], bool]

    def check(self) -> None:
        """Raise RunStopped if the run is to end."""
        if self.is_stopped():
            raise RunStopped("the run was stopped", "RunOptions.terminate is set", "set it to False and run again")
