"""The request log: one JSON line per request, without prompts unless they are requested."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..common.log import logger
from ..errors import InputError

_log = logger(__name__)


class RequestLog:
    """A file to which a line per request is appended. Only its owner can read it.

    Args:
        path: the file.
        with_prompts: True to write the bodies of requests, too.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path, *, with_prompts: bool = False) -> None:
        self.with_prompts = with_prompts
        self._path = path
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise InputError(
                f"{path}: the request log cannot be written", error.strerror or str(error), "choose another file"
            ) from error
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._has_failed = False

    def write(self, facts: Mapping[str, Any]) -> None:
        """Append a line. If the disk is full, one message is logged, and requests continue."""
        now = time.time()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        try:
            self._file.write(msgspec.json.encode({"time": moment, **facts}) + b"\n")
        except OSError as error:
            if not self._has_failed:
                _log.warning("%s: requests are not logged any more: %s", self._path, error)
            self._has_failed = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
