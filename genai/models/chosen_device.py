"""Which device a model is loaded on: the caller's word, or else what its folder asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, whole_number

CPU = ("cpu", "cpuexecutionprovider")
CUDA = ("cuda", "cudaexecutionprovider")


@dataclass(frozen=True)
class ChosenDevice:
    """A device by name.

    Attributes:
        asked_by: the file that asks for it, where nobody else does: the CPU serves as well then, as it did before
            somebody wrote that file on a machine with a GPU. "" = the caller said so.
        is_default: nobody said anything, so that it is the CPU.
    """

    name: str
    asked_by: str = ""
    is_default: bool = False

    @property
    def cpu_serves_too(self) -> bool:
        """Whether the CPU computes where the device does not work."""
        return self.name == "auto" or bool(self.asked_by)


def folder_device(raw: Any) -> str:
    """The GPU that the providers of a genai_config.json stand for; "" = none, or one that there are no kernels for.

    Raises:
        ConfigError: it asks for CUDA, and not for a GPU by its number. Options of others are not ours to refuse.
    """
    for block in ("model", "decoder", "session_options"):
        raw = raw.get(block) if isinstance(raw, dict) else None
    providers = raw.get("provider_options") if isinstance(raw, dict) else None
    for provider in providers if isinstance(providers, list) else ():
        for name, options in provider.items() if isinstance(provider, dict) else ():
            if str(name).lower() in CUDA:
                index = _number(options)
                return f"cuda:{index}" if index else "cuda"
    return ""


def _number(options: Any) -> int:
    """The number of a GPU in the options of a provider, 0 where there is none."""
    if not isinstance(options, dict):
        raise ConfigError(
            f"provider_options of cuda = {options!r:.80} in genai_config.json",
            f"an object is expected, found {type(options).__name__}",
            'write {"cuda": {}}, or {"cuda": {"device_id": "0"}}',
        )
    device_id = options.get("device_id", 0)
    index = whole_number(str(device_id)) if type(device_id) in (str, int) else None
    if index is None:
        raise ConfigError(
            f"device_id = {device_id!r:.80} of provider cuda in genai_config.json",
            "the number of a GPU is expected, in plain digits",
            'write "device_id": "0" for the first one, or leave it out',
        )
    return index
