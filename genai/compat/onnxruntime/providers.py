"""The execution providers of a session, read from onnxruntime's arguments: names, options, or pairs of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genai.common.warning import warn_caller

from ...devices import why_no_gpu
from ...errors import whole_number
from ...session.execution_providers import (
    GROUP as GROUP,
    Provider as Provider,
    available_providers,
    plug_ins,
)
from ...session.partition import CPU_PROVIDER, CUDA_PROVIDER
from .errors import InvalidArgument

# Names that exist in onnxruntime; scripts may request them although they are not available here.
_ELSEWHERE = frozenset(
    f"{name}ExecutionProvider"
    for name in (
        "ACL ArmNN Azure CANN CUDA CoreML Dml JS MIGraphX NvTensorRTRTX Nnapi OpenVINO QNN ROCM Rknpu SNPE Tensorrt "
        "VSINPU VitisAI WebGpu WebNN Xnnpack Dnnl"
    ).split()
)
Chosen = list[tuple[str, dict[str, Any]]]


def get_available_providers() -> list[str]:
    """Return the names of the providers that sessions can use here, with the CPU last."""
    return available_providers()


get_all_providers = get_available_providers  # providers that are not installed are unknown


def get_device() -> str:
    """Return the kind of device that sessions can use: "GPU" if one is available, else "CPU"."""
    return "CPU" if why_no_gpu(0) else "GPU"


def chosen_providers(
    providers: Sequence[Any], provider_options: Sequence[dict[str, Any]] | None = None, *, must_exist: bool = False
) -> Chosen:
    """Return (name, options) for each provider to use; the CPU is added at the end if it is not named.

    Raises:
        InvalidArgument: `providers` is not a list of names or (name, options) pairs, `provider_options` does not have
            one dict per name, or a name is unknown and `must_exist` is set.
    """
    given = _listed("providers", providers)
    if provider_options is not None:
        more = _listed("provider_options", provider_options)
        if len(more) != len(given) or any(not isinstance(item, str) for item in given):
            raise InvalidArgument(
                f"{len(more)} provider_options were given for the providers {given}",
                "provider_options must contain one dict for each name in providers",
                "pass one dict per name, or only (name, options) pairs",
            )
        given = list(zip(given, more, strict=True))
    pairs = [_pair(item) for item in given]
    used: dict[str, dict[str, Any]] = {}
    for name, own in pairs:
        reason = _why_not(name, own)
        if must_exist and reason and name not in _ELSEWHERE:
            raise InvalidArgument(
                f"provider {name!r} is unknown",
                f"the available providers are {', '.join(get_available_providers())}",
                "use one of these providers",
            )
        if reason:
            warn_caller(
                f"Specified provider '{name}' is not in available provider names. "
                f"Available providers: '{', '.join(get_available_providers())}'{reason}"
            )
        elif used.setdefault(name, own) is not own:
            warn_caller(f"provider '{name}' is listed twice, and only its first options are used")
    used.setdefault(CPU_PROVIDER, {})
    return list(used.items())


def before_the_cpu(chosen: Chosen) -> Chosen:
    """Return the providers that precede the CPU. Later providers receive no nodes, because the CPU takes the rest."""
    return chosen[: [name for name, _ in chosen].index(CPU_PROVIDER)]


def _why_not(name: str, options: Mapping[str, Any]) -> str:
    """Return the reason if a provider is unavailable, else "". The GPU is checked only if it is requested."""
    if name == CUDA_PROVIDER:
        index = whole_number(str(options.get("device_id", 0)))
        if index is None:
            return ""  # setting up the provider reports the error
        reason = why_no_gpu(0)  # if GPU 0 is usable, setting up another GPU reports its error
        if reason and index:
            reason = why_no_gpu(index)
        return f". {reason}" if reason else ""
    return "" if name == CPU_PROVIDER or name in plug_ins() else "."


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidArgument(f"{name} is a {type(value).__name__}", "the value must be a list", f"pass [{value!r}]")
    return list(value)


def _pair(item: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(item, str):
        return item, {}
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict):
        return item[0], dict(item[1])
    raise InvalidArgument(
        f"{item!r} is not a provider",
        "a provider is a name or a (name, options) pair",
        f"pass a name such as {CPU_PROVIDER!r}",
    )
