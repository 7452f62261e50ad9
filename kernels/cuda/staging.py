"""Numbers that the host writes and the device reads, again and again, while neither waits for the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import Driver


class Staging:
    """A block of device memory, and two of the host that it is written from in turns: one is filled while the device
    may still have to read the other.

    Attributes:
        memory: the device's, uint8. half: which of the two is filled now.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver, self.memory = driver, driver.zeros(nbytes)
        self._hosts = [driver.host_memory(nbytes) for _ in range(2)]
        self._read = [driver.event() for _ in range(2)]
        self.half = 0

    def __len__(self) -> int:
        return len(self._hosts[0])

    def next(self) -> NDArray[np.uint8]:
        """The host's memory to fill, as it was filled the time before last."""
        self.half ^= 1
        self._read[self.half].wait()
        return self._hosts[self.half]

    def send(self, nbytes: int) -> None:
        """Let the device copy so many bytes of what was filled."""
        self._driver.write(self.memory[:nbytes], self._hosts[self.half][:nbytes])
        self._read[self.half].record()

    def settle(self) -> None:
        """Wait until the device has read all that was sent: before the host's memory goes back."""
        for event in self._read:
            event.wait()

    def address(self) -> int:
        """Where the device's memory begins."""
        return self._driver.address(self.memory)

    def view(self, dtype: Any) -> list[NDArray[Any]]:
        """Both of the host's, as arrays of a type."""
        return [host.view(dtype) for host in self._hosts]
