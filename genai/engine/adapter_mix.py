"""Which adapters a sequence goes through, and how much of each."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from genai.kernels.device import DeviceAdapter


@dataclass(frozen=True, eq=False)
class AdapterMix:
    """Adapters in a device's memory, each with its weight; whoever holds the mix keeps them there.

    Attributes:
        parts: in an order that depends on what they are alone, so that equal mixes give equal bits.
        key: the same for mixes that compute the same, and for no others: keys and values of tokens that were computed
            with one are found by it.
    """

    parts: tuple[tuple[DeviceAdapter, float], ...]
    key: bytes

    @staticmethod
    def of(parts: Sequence[tuple[DeviceAdapter, bytes, float]]) -> AdapterMix:
        """From adapters, the hashes of their content, and weights."""
        ordered = sorted(parts, key=lambda part: (part[1], part[2]))
        digest = hashlib.sha256(b"".join(key + struct.pack("<d", weight) for _, key, weight in ordered))
        return AdapterMix(tuple((adapter, weight) for adapter, _, weight in ordered), digest.digest())
