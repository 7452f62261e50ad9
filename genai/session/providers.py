"""Execution providers: which exist, and which a session uses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from .errors import InvalidArgument
from .options import SessionOptions

CPU_PROVIDER = "CPUExecutionProvider"


def get_available_providers() -> list[str]:
    """Names of the providers that sessions can use here."""
    return [CPU_PROVIDER]


def get_all_providers() -> list[str]:
    """All providers known, available or not."""
    return [CPU_PROVIDER]


def get_device() -> str:
    """ "CPU"."""
    return "CPU"


def chosen_providers(
    providers: Sequence[Any] | None, provider_options: Sequence[dict[str, Any]] | None, options: SessionOptions
) -> list[tuple[str, dict[str, Any]]]:
    """(name, options) per provider to use, the CPU last if it was not named.

    Raises:
        InvalidArgument: not a list of names or (name, options) pairs, or as many options as there are not providers.
    """
    given = list(options._providers) if providers is None else list(providers)
    if provider_options is not None and len(provider_options) != len(given):
        raise InvalidArgument(
            f"{len(provider_options)} provider_options for {len(given)} providers",
            "there must be as many",
            "give one dict per provider",
        )
    pairs = [_pair(item) for item in given]
    if provider_options is not None:
        pairs = [(name, {**own, **more}) for (name, own), more in zip(pairs, provider_options, strict=True)]
    available = get_available_providers()
    for name, _ in pairs:
        if name not in available:
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names. "
                f"Available providers: '{', '.join(available)}'",
                stacklevel=4,
            )
    used = {name: own for name, own in pairs if name in available}
    used.setdefault(CPU_PROVIDER, {})
    return list(used.items())


def _pair(item: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(item, str):
        return item, {}
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict):
        return item[0], dict(item[1])
    raise InvalidArgument(
        f"provider {item!r}", "a provider is a name or a (name, options) pair", f"pass {CPU_PROVIDER!r}"
    )
