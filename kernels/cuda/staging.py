"""Numbers that the host writes and the device reads repeatedly, without either waiting for the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import Driver


class Staging:
    """A device buffer, and two host buffers that are copied to the device buffer in turn.

    The host fills one host buffer while the device may still have to read the other.

    Attributes:
        memory: device buffer, uint8.
        half: index of the host buffer that is being filled.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver, self.memory = driver, driver.zeros(nbytes)
        self._hosts = [driver.host_memory(nbytes) for _ in range(2)]
        self._read = [driver.event() for _ in range(2)]
        self.half = 0

    def __len__(self) -> int:
        return len(self._hosts[0])

    def next(self) -> NDArray[np.uint8]:
        """Return the host buffer to fill, with the content from its last use, two calls ago."""
        self.half ^= 1
        self._read[self.half].wait()
        return self._hosts[self.half]

    def send(self, nbytes: int) -> None:
        """Start the copy of the first `nbytes` bytes to the device."""
        self._driver.write(self.memory[:nbytes], self._hosts[self.half][:nbytes])
        self._read[self.half].record()

    def settle(self) -> None:
        """Wait until the device has read all sent data, before host memory is freed."""
        for event in self._read:
            event.wait()

    def address(self) -> int:
        """Return the address of the device buffer."""
        return self._driver.address(self.memory)

    def view(self, dtype: Any) -> list[NDArray[Any]]:
        """Return both host buffers as arrays of a type."""
        return [host.view(dtype) for host in self._hosts]
