"""A cache in the memory of the host: who copies its blocks, hands them out, and rotates the keys in them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import ReservedMemory

from .cache_layout import PAGE_TOKENS, PagedLayer
from .device import KeyRotation, StepContext, StepSizes
from .float_bits import read_floats, stored_floats
from .reference.attention import rotate
from .reference.pages import read_pages, write_keys

# Blocks that are copied and rotated at once.
_AT_ONCE = 64


class TimedByHost:
    """What step functions of the host have in common; see `device.StepFunction`."""

    def run(self, step: StepContext, given: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError

    def seconds(self, step: StepContext, given: Mapping[str, Any] | None = None) -> float:
        begin = time.perf_counter()
        self.run(step, given)
        return time.perf_counter() - begin


class HostMemory:
    """What executors have in common whose memory is the host's; see `device.Executor`."""

    # As fast as longer steps for short prompts and faster for long ones, because the rows stay in the second-level
    # cache; and what a step needs of memory grows with it.
    step_sizes = StepSizes(fast=256, most=sys.maxsize)

    def free_bytes(self) -> None:
        return None

    def wait(self) -> None:
        """What was asked for is done already."""

    def allocate(self, nbytes: int) -> ReservedMemory:
        return ReservedMemory(nbytes)

    def copy_blocks(self, blocks: NDArray[np.uint8], copies: Iterable[tuple[int, int]]) -> None:
        for source, destination in copies:
            blocks[destination] = blocks[source]

    def read_block(self, blocks: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:
        block: NDArray[np.uint8] = blocks[index]
        return block.copy()

    def write_block(self, blocks: NDArray[np.uint8], index: int, content: NDArray[np.uint8]) -> None:
        blocks[index] = content

    def rotate_keys(self, blocks: Sequence[int], rotations: Sequence[tuple[PagedLayer, KeyRotation]]) -> None:
        for layer, rotation in rotations:
            _rotate_keys(layer, blocks, rotation)

    def host(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows


def _rotate_keys(layer: PagedLayer, blocks: Sequence[int], rotation: KeyRotation) -> None:
    """Turn all keys of some blocks. They are rounded once more where they are not float32."""
    for begin in range(0, len(blocks), _AT_ONCE):
        some = np.asarray(blocks[begin : begin + _AT_ONCE], np.int64)
        # What a block holds behind its last token may be anything.
        with np.errstate(invalid="ignore", over="ignore"):
            if layer.packed is None:
                pages = read_floats(layer.keys[some], layer.kind).astype(np.float32)
                layer.keys[some] = stored_floats(_rotated_pages(pages, rotation), layer.kind)
            else:
                keys, _ = read_pages(layer, some)
                slots = (some[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).ravel()
                write_keys(layer, slots, rotate(keys, rotation.cosine, rotation.sine, rotation.interleaved))


def _rotated_pages(pages: NDArray[np.float32], rotation: KeyRotation) -> NDArray[np.float32]:
    """Keys [blocks, heads, size, PAGE_TOKENS]."""
    half = len(rotation.cosine)
    parts = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rotation.interleaved else (slice(half), slice(half, 2 * half))
    )
    cosine, sine = (table.astype(np.float32)[:, None] for table in (rotation.cosine, rotation.sine))
    first, second = pages[:, :, parts[0]], pages[:, :, parts[1]]
    pages[:, :, parts[0]], pages[:, :, parts[1]] = first * cosine - second * sine, second * cosine + first * sine
    return pages
