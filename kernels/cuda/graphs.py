"""Recurring steps as captured CUDA graphs, which let the host launch one graph instead of a few hundred kernels."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from .driver import CudaError, Driver

# Maximum number of graphs. Each graph uses a few hundred kilobytes of GPU memory.
_MOST_GRAPHS = 64
# After this number of failed captures, work is always launched directly.
_MOST_FAILURES = 3


class GraphCache:
    """Captured graphs of recurring work, by a key that contains everything that determines the work's launches.

    A key holds grid sizes and struct values. The first time, work is launched directly, which also loads kernels that
    were never used. The second time, the work is captured, and from then on the graph is launched. The least recently
    used graphs are dropped.

    Attributes:
        graphs: the captured graphs.
    """

    def __init__(self, driver: Driver, most: int = _MOST_GRAPHS) -> None:
        self._driver, self._most = driver, most
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._failures: Counter[Hashable] = Counter()
        self.graphs: OrderedDict[Hashable, Any] = OrderedDict()

    def start(self, key: Hashable, work: Callable[[], None]) -> None:
        """Launch work. Equal keys must mean identical launches."""
        if key in self.graphs:
            self.graphs.move_to_end(key)
        elif key in self._seen and self._failures[key] < _MOST_FAILURES:
            del self._seen[key]
            try:
                self.graphs[key] = self._driver.capture(work)
            except CudaError:
                # Other code in this process may have synchronised the whole device, which invalidates captures. Any
                # other error recurs when the work is launched without a capture.
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
