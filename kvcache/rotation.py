"""Keys that lie in blocks, turned to other positions: rotations by rotary tables add up, so that none is computed anew.

What is kept of a sequence whose middle is forgotten moves to earlier places that way. The idea is that of llama.cpp's
context shift, and of StreamingLLM (G. Xiao et al. 2023), which also keeps the first tokens ("attention sinks").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genai.kernels.float_bits import read_floats, stored_floats
from genai.kernels.formats import PAGE_TOKENS, PagedLayer
from genai.kernels.reference.attention import rotate
from genai.kernels.reference.pages import read_pages, write_keys

# Blocks that are copied and turned at once.
_AT_ONCE = 64
_TOLERANCE = 2e-3  # of tables in float16


class Turn(NamedTuple):
    """A rotation of keys.

    Attributes:
        cosine, sine: float64 [pairs]. interleaved: whether pairs are neighbours, or of the halves.
    """

    cosine: NDArray[np.float64]
    sine: NDArray[np.float64]
    interleaved: bool

    @classmethod
    def back(cls, cos: NDArray[Any], sin: NDArray[Any], interleaved: bool, distance: int) -> Turn:
        """To positions that are `distance` lower, by rotary tables [positions, pairs].

        Raises:
            ValueError: rotations by these tables do not add up.
        """
        last = len(cos) - 1
        for first in {1, min(distance, last // 2), last // 2}:
            _check_sum(cos, sin, first, last - first)
        cosine, sine = _unit(cos, sin, distance)
        return cls(cosine, -sine, interleaved)


def turn_keys(layer: PagedLayer, blocks: Sequence[int], turn: Turn) -> None:
    """Turn all keys of some blocks, in place. They are rounded once more where they are not float32."""
    for begin in range(0, len(blocks), _AT_ONCE):
        some = np.asarray(blocks[begin : begin + _AT_ONCE], np.int64)
        # What a block holds behind its last token may be anything.
        with np.errstate(invalid="ignore", over="ignore"):
            if layer.packed is None:
                pages = read_floats(layer.keys[some], layer.kind).astype(np.float32)
                layer.keys[some] = stored_floats(_turned_pages(pages, turn), layer.kind)
            else:
                keys, _ = read_pages(layer, some)
                slots = (some[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).ravel()
                write_keys(layer, slots, rotate(keys, turn.cosine, turn.sine, turn.interleaved))


def _turned_pages(pages: NDArray[np.float32], turn: Turn) -> NDArray[np.float32]:
    """Keys [blocks, heads, size, PAGE_TOKENS]."""
    half = len(turn.cosine)
    parts = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if turn.interleaved else (slice(half), slice(half, 2 * half))
    cosine, sine = (table.astype(np.float32)[:, None] for table in (turn.cosine, turn.sine))
    first, second = pages[:, :, parts[0]], pages[:, :, parts[1]]
    pages[:, :, parts[0]], pages[:, :, parts[1]] = first * cosine - second * sine, second * cosine + first * sine
    return pages


def _unit(cos: NDArray[Any], sin: NDArray[Any], place: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A row of the tables without the factor that some of them hold."""
    cosine, sine = cos[place].astype(np.float64), sin[place].astype(np.float64)
    size = np.hypot(cosine, sine)
    return cosine / size, sine / size


def _check_sum(cos: NDArray[Any], sin: NDArray[Any], first: int, second: int) -> None:
    (a, b), (c, d), (e, f) = (_unit(cos, sin, place) for place in (first, second, first + second))
    if not (np.allclose(a * c - b * d, e, atol=_TOLERANCE) and np.allclose(b * c + a * d, f, atol=_TOLERANCE)):
        raise ValueError(f"positions {first} and {second} do not add up to {first + second} in its rotary tables")
