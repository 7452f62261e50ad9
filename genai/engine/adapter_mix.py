"""The adapters that a sequence is computed with, and their weights."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from genai.kernels.device import DeviceAdapter


@dataclass(frozen=True, eq=False)
class AdapterMix:
    """Adapters in a device's memory, each with a weight. A reference to the mix keeps the adapters loaded.

    Attributes:
        parts: adapters and weights, sorted by content so that equal mixes produce bit-identical results.
        key: identifies what the mix computes: two mixes have the same key exactly if they compute the same results.
            It is part of the keys of the prefix cache.
    """

    parts: tuple[tuple[DeviceAdapter, float], ...]
    key: bytes

    @staticmethod
    def of(parts: Sequence[tuple[DeviceAdapter, bytes, float]]) -> AdapterMix:
        """Create a mix from tuples of an adapter, the hash of its content, and its weight."""
        ordered = sorted(parts, key=lambda part: (part[1], part[2]))
        digest = hashlib.sha256(b"".join(key + struct.pack("<d", weight) for _, key, weight in ordered))
        return AdapterMix(tuple((adapter, weight) for adapter, _, weight in ordered), digest.digest())
