"""Unexpected numbers, values and bytes, and functions that insert them into data."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

ODD_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, 2**63, 10**30)


def break_anywhere(value: Any, rng: random.Random) -> None:
    """Replace a random value in nested lists and objects with an unexpected one."""
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if not isinstance(value[key], (dict, list)) or not value[key] or rng.random() < 0.2:
            value[key] = rng.choice(
                (*ODD_NUMBERS, None, True, "", "x" * 10**5, [], {}, [[]] * 1000, -1.5, "\0", "\ud800")
            )
            return
        value = value[key]


@contextlib.contextmanager
def _deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def dumped(value: Any) -> str:
    """Return the JSON text of a value nested to any depth."""
    with _deep():
        return json.dumps(value)


def loaded(text: str) -> Any:
    """Parse the output of `dumped`."""
    with _deep():
        return json.loads(text)


def break_bytes(data: bytes, rng: random.Random, first: int = 4096) -> bytes:
    """Change bytes and words, mostly at the start, which holds counts and offsets; sometimes truncate the data."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        place = rng.randrange(max(1, min(len(changed) - 8, first)))
        if rng.random() < 0.4:
            changed[place] = rng.randrange(256)
        else:
            form, number = rng.choice(
                (("<I", rng.choice(ODD_NUMBERS) % 2**32), ("<Q", rng.choice(ODD_NUMBERS) % 2**64))
            )
            changed[place : place + struct.calcsize(form)] = struct.pack(form, number)
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)


def break_json(text: str, rng: random.Random) -> str:
    """Change values in a JSON object, or make its text invalid: numbers of 5,000 digits, 100,000 brackets."""
    if rng.random() < 0.2:
        return text.replace(rng.choice([c for c in text if c.isdigit()] or ["}"]), "9" * 5000, 1)
    if rng.random() < 0.1:
        brackets = rng.choice(("[]", '{"a":}'))
        return brackets[:-1] * 100_000 + brackets[-1:] * 100_000
    value = json.loads(text)
    for _ in range(rng.choice((1, 2, 3))):
        break_anywhere(value, rng)
    return json.dumps(value)
