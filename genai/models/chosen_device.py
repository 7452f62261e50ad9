"""Selection of a model's device, by the caller or else by the model's folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, whole_number

CPU = ("cpu", "cpuexecutionprovider")
CUDA = ("cuda", "cudaexecutionprovider")


@dataclass(frozen=True)
class ChosenDevice:
    """The name of a device, and the origin of the choice.

    Attributes:
        name: name of the device.
        asked_by: the file that requests the device, if the caller names none. In this case, the CPU is an acceptable
            fallback, because the file may have been written on another machine with a GPU. "" = the caller named the
            device.
        is_default: True if neither the caller nor the folder named a device, so that the CPU is used.
    """

    name: str
    asked_by: str = ""
    is_default: bool = False

    @property
    def cpu_serves_too(self) -> bool:
        """True if the CPU may be used when the device does not work."""
        return self.name == "auto" or bool(self.asked_by)


def folder_device(raw: Any) -> str:
    """Return the GPU that the providers in a genai_config.json name; "" if they name none, or an unsupported device.

    Raises:
        ConfigError: the options of the CUDA provider do not contain a valid GPU number. Other providers' options are
            not checked.
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
    """Return the GPU number in a provider's options, or 0 if the options contain no number."""
    if not isinstance(options, dict):
        raise ConfigError(
            f"provider_options of cuda = {options!r:.80} in genai_config.json",
            f"an object is expected, not {type(options).__name__}",
            'write {"cuda": {}}, or {"cuda": {"device_id": "0"}}',
        )
    device_id = options.get("device_id", 0)
    index = whole_number(str(device_id)) if type(device_id) in (str, int) else None
    if index is None:
        raise ConfigError(
            f"device_id = {device_id!r:.80} of provider cuda in genai_config.json",
            "a GPU number in decimal digits is expected",
            'write "device_id": "0" for the first GPU, or leave device_id out',
        )
    return index
