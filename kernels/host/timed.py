"""How long steps take that are over when they return."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..executor import StepContext


class TimedByHost:
    """What step functions of the host have in common; see `executor.StepFunction`."""

    def run(self, step: StepContext, given: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError

    def seconds(self, step: StepContext, given: Mapping[str, Any] | None = None) -> float:
        begin = time.perf_counter()
        self.run(step, given)
        return time.perf_counter() - begin
