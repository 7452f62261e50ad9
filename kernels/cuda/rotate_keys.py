"""Keys in their pages turned to other positions: a launch per layer, of one list of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cache_layout import PagedLayer
from ..device import Turn
from .attention import KINDS
from .driver import Driver
from .launches import bind
from .sources import CudaKernel

_THREADS, _NUMBER_BYTES = 256, 4


def turn_keys_kernel(kind: str) -> CudaKernel:
    """The kernel that turns keys of a type."""
    return CudaKernel("turned_keys.cu", f"turn_keys<{KINDS[kind]}>", "TurnKeysArguments", _THREADS)


class KeyTurner:
    """Turns keys in the order of what a device is asked for; what it needs is compiled when it is first asked."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._functions: dict[CudaKernel, Any] = {}

    def turn(self, blocks: Sequence[int], turns: Sequence[tuple[PagedLayer, Turn]]) -> None:
        """See Executor.turn_keys."""
        missing = {turn_keys_kernel(layer.kind) for layer, _ in turns} - self._functions.keys()
        if missing:
            self._functions |= self._driver.load(missing)
        if not blocks:
            return
        different = {id(turn): turn for _, turn in turns}
        numbers, first = [np.asarray(blocks, np.int32)], dict[int, int]()
        total = len(blocks)
        for key, turn in different.items():
            numbers += [table.astype(np.float32).view(np.int32) for table in (turn.cosine, turn.sine)]
            first[key], total = total, total + 2 * len(turn.cosine)
        memory = self._driver.upload(np.concatenate(numbers))
        begin = self._driver.address(memory)
        for layer, turn in turns:
            kernel, pairs, cos = turn_keys_kernel(layer.kind), len(turn.cosine), begin + _NUMBER_BYTES * first[id(turn)]
            arguments = bind(
                kernel, blocks=begin, cos=cos, sin=cos + _NUMBER_BYTES * pairs, keys=self._driver.address(layer.keys),
                key_block=layer.keys.strides[0], pairs=pairs, interleaved=int(turn.interleaved),
                head_size=layer.head_size,
            )  # fmt: skip
            self._driver.launch(self._functions[kernel], kernel, (len(blocks), layer.kv_heads, 1), arguments)
