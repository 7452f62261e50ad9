"""Execution providers: which exist, which a session uses, and which nodes each of them takes.

A provider is a plug-in: another package offers it through the entry point group "genai.providers", under the name that
callers give to `InferenceSession(providers=[...])`. The CPU is built in and takes what nobody else takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import onnx

from ..graph.ir import Graph, Node
from .errors import EPFail, InvalidArgument
from .options import SessionOptions

CPU_PROVIDER = "CPUExecutionProvider"
GROUP = "genai.providers"
Chosen = list[tuple[str, dict[str, Any]]]


class Provider(Protocol):
    """What a plug-in offers. Its entry point is a callable: options (keywords) -> Provider."""

    def supports(self, node: Node, graph: Graph, version: int) -> bool:
        """Whether it can run a node; `version` is of the node's operator set."""

    def compile(self, model: onnx.ModelProto) -> Callable[[list[Any]], list[Any]]:
        """Prepare a model of supported nodes: inputs in the order of its graph -> outputs in that order."""


def get_available_providers() -> list[str]:
    """Names of the providers that sessions can use here, the CPU last."""
    return [*_plug_ins(), CPU_PROVIDER]


def get_all_providers() -> list[str]:
    """The same: what is not installed is not known."""
    return get_available_providers()


def get_device() -> str:
    """The kind of device that sessions run on."""
    return "CPU"


def make_provider(name: str, options: Mapping[str, Any]) -> Provider:
    """A provider by name.

    Raises:
        EPFail: its package raises.
    """
    try:
        provider: Provider = _plug_ins()[name].load()(**options)
    except Exception as error:
        raise EPFail(
            f"provider {name!r} cannot be set up with {dict(options)}",
            f"{type(error).__name__}: {error!s:.300}",
            "check its options and its package, or leave it out of `providers`",
        ) from error
    return provider


def _plug_ins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def chosen_providers(
    providers: Sequence[Any] | None, provider_options: Sequence[dict[str, Any]] | None, options: SessionOptions
) -> Chosen:
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
