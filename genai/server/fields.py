"""The fields of requests: obeyed, accepted without effect, and refused.

Clients send many fields that no server obeys, so unknown fields are accepted and named in a response header. The lists
are data: fields/*.json, one file per endpoint. `tools/server_fields.py` compares them with the types of the SDKs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import RequestError

_FOLDER = Path(__file__).resolve().parent / "fields"
_MOST_FIELDS = 500


@dataclass(frozen=True)
class FieldTable:
    """The known fields of an endpoint.

    Attributes:
        obeyed: fields that have an effect.
        ignored: fields without effect.
        refused: fields that are refused, each with the values that are accepted, and the reason.
    """

    obeyed: frozenset[str]
    ignored: frozenset[str]
    refused: Mapping[str, tuple[Sequence[Any], str]]


@cache
def field_table(endpoint: str) -> FieldTable:
    """Return the fields of an endpoint: "chat", "completions" and so on."""
    content = json.loads((_FOLDER / f"{endpoint}.json").read_text(encoding="utf-8"))
    refused = {name: (rule["accepts"], rule["why"]) for name, rule in content["refused"].items()}
    return FieldTable(frozenset(content["obeyed"]), frozenset(content["ignored"]), refused)


@dataclass
class Fields:
    """The fields of a request.

    Attributes:
        values: the fields that have an effect and are not null.
        ignored: names of the fields and values without effect. A wire module may add names.
        copies: number of identical samples that a greedy request asks for.
    """

    values: dict[str, Any]
    ignored: list[str] = field(default_factory=list)
    copies: int = 1


def read_fields(endpoint: str, body: Mapping[str, Any], *, strict: bool) -> Fields:
    """Return the fields of a request body.

    Args:
        endpoint: name of the endpoint's table.
        body: the body.
        strict: True to refuse fields without effect.

    Raises:
        RequestError: a field is refused, or resembles a field that has an effect; or there are too many fields.
    """
    if len(body) > _MOST_FIELDS:
        raise RequestError(
            400, f"the body has {len(body):,} fields", f"the limit is {_MOST_FIELDS}", "leave fields without effect out"
        )
    table = field_table(endpoint)
    found = Fields({})
    for name, value in body.items():
        if name in table.obeyed:
            if value is not None:
                found.values[name] = value
        elif name in table.refused:
            accepted, why = table.refused[name]
            if value is not None and value not in accepted:
                raise RequestError(
                    400, f"{name} cannot be used", why, f"leave {name} out", code="unsupported_parameter", param=name
                )
        elif name not in table.ignored and (meant := _similar(name, table.obeyed)) is not None:
            raise RequestError(
                400, f"unknown field {name!r:.80}", "no field has this name", f"did you mean {meant!r}?",
                code="unknown_parameter", param=name,
            )  # fmt: skip
        elif value is not None:
            found.ignored.append(name)
    if strict:
        check_strict(found.ignored)
    return found


def check_strict(ignored: Sequence[str]) -> None:
    """Raise RequestError if fields have no effect."""
    if ignored:
        name = ignored[0]
        raise RequestError(
            400, f"{name:.80} has no effect", "the server was started with --strict", f"leave {name:.80} out",
            code="unsupported_parameter", param=name,
        )  # fmt: skip


_LONGEST_NAME = 60


def _similar(name: str, known: Iterable[str]) -> str | None:
    """Return a known name that is one edit away."""
    if len(name) > _LONGEST_NAME:
        return None
    return next((one for one in sorted(known) if len(one) > 3 and _is_one_edit(name, one)), None)


def _is_one_edit(left: str, right: str) -> bool:
    """Return True if one insertion, deletion, replacement or swap of neighbours makes the texts equal."""
    if abs(len(left) - len(right)) > 1:
        return False
    start = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    a, b = left[start:], right[start:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])
