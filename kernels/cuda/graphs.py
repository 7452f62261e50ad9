"""Steps that come again as captured CUDA graphs: the host starts one thing in place of a few hundred kernels."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from .driver import CudaError, Driver

# Graphs that are kept: a few hundred kilobytes of a GPU's memory each.
_MOST_GRAPHS = 64
# What could not be captured so often is started as it is from then on.
_MOST_FAILURES = 3


class GraphCache:
    """What is started again and again, by what decides everything that it launches: sizes of grids, numbers in structs.

    Work that comes for the first time is started as it is, which also brings kernels into the GPU that were never used;
    the second time it is captured, and from then on that graph is launched. Those that were used least recently are
    forgotten.

    Attributes:
        graphs: those that are kept.
    """

    def __init__(self, driver: Driver, most: int = _MOST_GRAPHS) -> None:
        self._driver, self._most = driver, most
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._failures: Counter[Hashable] = Counter()
        self.graphs: OrderedDict[Hashable, Any] = OrderedDict()

    def start(self, key: Hashable, work: Callable[[], None]) -> None:
        """Start work; `key` is the same for work that launches the same."""
        if key in self.graphs:
            self.graphs.move_to_end(key)
        elif key in self._seen and self._failures[key] < _MOST_FAILURES:
            del self._seen[key]
            try:
                self.graphs[key] = self._driver.capture(work)
            except CudaError:
                # Others in this process may have waited for the whole device meanwhile, which ends captures. What is
                # wrong otherwise is so without one, too.
                self._failures[key] += 1
                work()
                return
            if len(self.graphs) > self._most:
                self.graphs.popitem(last=False)
        else:
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
            work()
            return
        self._driver.launch_graph(self.graphs[key])
