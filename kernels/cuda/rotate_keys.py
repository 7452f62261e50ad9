"""Rotation of keys in their pages to other positions, with one launch per layer over one list of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cache_layout import PagedLayer
from ..device import KeyRotation
from .attention import KINDS
from .driver import Driver
from .launches import bind
from .sources import CudaKernel

_THREADS, _NUMBER_BYTES = 256, 4


def rotate_keys_kernel(kind: str) -> CudaKernel:
    """Return the kernel that rotates keys of a type."""
    return CudaKernel("rotate_keys.cu", f"rotate_keys<{KINDS[kind]}>", "RotateKeysArguments", _THREADS)


class KeyRotator:
    """Rotates keys, in order with the device's other work. Kernels are compiled on first use."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._functions: dict[CudaKernel, Any] = {}

    def rotate(self, blocks: Sequence[int], rotations: Sequence[tuple[PagedLayer, KeyRotation]]) -> None:
        """See Executor.rotate_keys."""
        missing = {rotate_keys_kernel(layer.kind) for layer, _ in rotations} - self._functions.keys()
        if missing:
            self._functions |= self._driver.load(missing)
        if not blocks:
            return
        different = {id(rotation): rotation for _, rotation in rotations}
        numbers, first = [np.asarray(blocks, np.int32)], dict[int, int]()
        total = len(blocks)
        for key, rotation in different.items():
            numbers += [table.astype(np.float32).view(np.int32) for table in (rotation.cosine, rotation.sine)]
            first[key], total = total, total + 2 * len(rotation.cosine)
        memory = self._driver.upload(np.concatenate(numbers))
        begin = self._driver.address(memory)
        for layer, rotation in rotations:
            kernel, pairs, cos = (
                rotate_keys_kernel(layer.kind),
                len(rotation.cosine),
                begin + _NUMBER_BYTES * first[id(rotation)],
            )
            arguments = bind(
                kernel, blocks=begin, cos=cos, sin=cos + _NUMBER_BYTES * pairs, keys=self._driver.address(layer.keys),
                key_block=layer.keys.strides[0], pairs=pairs, interleaved=int(rotation.interleaved),
                head_size=layer.head_size,
            )  # fmt: skip
            self._driver.launch(self._functions[kernel], kernel, (len(blocks), layer.kv_heads, 1), arguments)
