"""A cache in the host's memory: allocation, copies of blocks, and rotation of keys."""

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

# Number of blocks that are rotated together.
_AT_ONCE = 64


class TimedByHost:
    """Base class of the host's step functions; see `device.StepFunction`."""

    def run(self, step: StepContext, given: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError

    def seconds(self, step: StepContext, given: Mapping[str, Any] | None = None) -> float:
        begin = time.perf_counter()
        self.run(step, given)
        return time.perf_counter() - begin


class HostMemory:
    """Base class of executors that use the host's memory; see `device.Executor`."""

    # For short prompts, steps of 256 tokens are as fast as longer steps. For long prompts they are faster, because the
    # rows stay in the second-level cache. The memory that a step needs grows with its tokens.
    step_sizes = StepSizes(fast=256, most=sys.maxsize)
    reads_values_from_keys = True

    def free_bytes(self) -> None:
        return None

    def wait(self) -> None:
        """Return immediately, because all work is synchronous."""

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
    """Rotate all keys of some blocks. Keys that are not stored as float32 are rounded again."""
    for begin in range(0, len(blocks), _AT_ONCE):
        some = np.asarray(blocks[begin : begin + _AT_ONCE], np.int64)
        # The slots after a block's last token may hold any bits.
        with np.errstate(invalid="ignore", over="ignore"):
            if layer.packed is None:
                pages = read_floats(layer.keys[some], layer.kind).astype(np.float32)
                layer.keys[some] = stored_floats(_rotated_pages(pages, rotation), layer.kind)
            else:
                keys, _ = read_pages(layer, some)
                slots = (some[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).ravel()
                write_keys(layer, slots, rotate(keys, rotation.cosine, rotation.sine, rotation.interleaved))


def _rotated_pages(pages: NDArray[np.float32], rotation: KeyRotation) -> NDArray[np.float32]:
    """Rotate keys [blocks, heads, size, PAGE_TOKENS] in place and return them."""
    half = len(rotation.cosine)
    parts = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rotation.interleaved else (slice(half), slice(half, 2 * half))
    )
    cosine, sine = (table.astype(np.float32)[:, None] for table in (rotation.cosine, rotation.sine))
    first, second = pages[:, :, parts[0]], pages[:, :, parts[1]]
    pages[:, :, parts[0]], pages[:, :, parts[1]] = first * cosine - second * sine, second * cosine + first * sine
    return pages
