"""Random arrays: small, sometimes empty, with NaN, infinities and repeated numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

Generator = np.random.Generator
FLOATS = (np.float32, np.float32, np.float32, np.float64, np.float16)
INTEGERS = (np.int64, np.int64, np.int32, np.int8, np.uint8)
_PLAIN = (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_ODD = (np.nan, np.inf, -np.inf, -0.0, 1e-30, 1e30)
_WORDS = ("", "a", "b", "ab", "B", "a b", "1", "2.5", "-3", "é", "a,b")


def pick(rng: Generator, *choices: Any) -> Any:
    """Return one of the choices."""
    return choices[int(rng.integers(len(choices)))]


def extents(rng: Generator, rank: int, *, may_be_empty: bool = True) -> tuple[int, ...]:
    """Return sizes of 1 to 4, occasionally 0."""
    sizes = rng.integers(1, 5, rank)
    if may_be_empty and rank and rng.random() < 0.08:
        sizes[rng.integers(rank)] = 0
    return tuple(int(size) for size in sizes)


def floats(rng: Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Return normally distributed numbers or a few common values, occasionally with unusual values among them."""
    if rng.random() < 0.5:
        values = rng.standard_normal(shape)
    else:
        values = rng.choice(_PLAIN, shape)
    if rng.random() < 0.12:
        values = np.where(rng.random(shape) < 0.2, rng.choice(_ODD, shape), values)
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(dtype)


def integers(rng: Generator, shape: tuple[int, ...], dtype: Any = np.int64) -> Any:
    """Return small integers, occasionally with the type's minimum and maximum among them."""
    low = 0 if np.dtype(dtype).kind == "u" else -4
    values = rng.integers(low, 6, shape).astype(dtype)
    if rng.random() < 0.05 and np.dtype(dtype).itemsize < 8:
        info = np.iinfo(dtype)
        values = np.where(rng.random(shape) < 0.3, rng.choice([info.min, info.max], shape).astype(dtype), values)
    return np.asarray(values).astype(dtype)


def words(rng: Generator, shape: tuple[int, ...]) -> Any:
    """Return random strings."""
    result = np.empty(shape, object)
    flat = result.reshape(-1)
    flat[:] = [_WORDS[int(number)] for number in rng.integers(0, len(_WORDS), result.size)]
    return flat.reshape(shape)


def array(rng: Generator, kind: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return an array of a kind: f floats, i integers, b booleans, s strings, q bytes."""
    sizes = extents(rng, int(rng.integers(0, 5))) if shape is None else shape
    if kind == "f":
        return floats(rng, sizes, pick(rng, *FLOATS))
    if kind == "i":
        return integers(rng, sizes, pick(rng, *INTEGERS))
    if kind == "q":
        return rng.integers(0, 256, sizes).astype(np.uint8).view(pick(rng, np.uint8, np.int8))
    return rng.random(sizes) < 0.5 if kind == "b" else words(rng, sizes)
