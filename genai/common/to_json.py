"""JSON output of results."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(result: Any, more: Mapping[str, Any] | None = None, *, indent: int | None = None) -> str:
    """Return a result dataclass and the entries of `more` as JSON. NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_plain(dataclasses.asdict(result) | dict(more or {})), indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
