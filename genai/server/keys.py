"""API keys: the file that holds them, and their comparison in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..common.reading import read_text_file
from ..errors import InputError, RequestError

_MIN_LENGTH, _MOST_KEYS = 16, 10_000


@dataclass(frozen=True)
class Key:
    """An API key, of which only a hash is stored.

    Attributes:
        name: name of the key in logs.
        salt: salt of the prefix cache, so that requests share cached blocks only with requests of the same key.
        priority: added to the priority of each request; batches have a lower one.
    """

    name: str
    salt: str | None = None
    digest: bytes = field(default=b"", repr=False)
    priority: int = 0


ANYONE = Key("")
"""The key of all requests to a server without keys."""


def read_keys(path: Path) -> list[Key]:
    """Read a file of API keys. Each line is KEY or NAME KEY. Empty lines and lines that begin with # are ignored.

    Raises:
        InputError: the file cannot be read, has no key, or has a line that is not a key.
    """
    keys: list[Key] = []
    for number, line in enumerate(read_text_file(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}, line {number}"
        if len(words) > 2:
            raise InputError(f"{where} has {len(words)} words", "a line is KEY or NAME KEY", "correct the line")
        text = words[-1]
        if len(text) < _MIN_LENGTH or not text.isascii():
            raise InputError(
                f"{where} has a key of {len(text)} characters",
                f"a key has at least {_MIN_LENGTH} ASCII characters, so that nobody can guess it",
                'create a key with python -c "import secrets; print(secrets.token_urlsafe(32))"',
            )
        name = words[0] if len(words) == 2 else f"key-{number}"
        if name in {key.name for key in keys}:
            raise InputError(f"{where} repeats the name {name!r:.80}", "names are unique", "choose another name")
        keys.append(Key(name, hashlib.sha256(f"genai prefix cache {text}".encode()).hexdigest(), _digest(text)))
        if len(keys) > _MOST_KEYS:
            raise InputError(f"{where} is beyond {_MOST_KEYS:,} keys", "this is the limit", "remove unused keys")
    if not keys:
        raise InputError(f"{path} has no key", "the file needs at least one", "add a line with a key")
    return keys


def find_key(keys: Sequence[Key], authorization: str, x_api_key: str) -> Key:
    """Return the key of a request, from the headers `authorization: Bearer KEY` or `x-api-key: KEY`.

    All keys are compared, each in constant time, so that the time of the answer does not depend on the key.

    Raises:
        RequestError: the request has no key, or an unknown key.
    """
    scheme, _, given = authorization.partition(" ")
    text = given.strip() if scheme.lower() == "bearer" else x_api_key.strip()
    digest = _digest(text)
    found = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    if not text or not found:
        raise RequestError(
            401, "the API key is missing" if not text else "the API key is not known",
            "this server accepts only requests with one of its keys",
            "send the header authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key", headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    return found[0]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
