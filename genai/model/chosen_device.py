"""Which device a model is loaded on: the caller's word, or else what its folder asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import whole_number

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

    What is malformed asks for nothing: other programs' options are not ours to refuse.
    """
    for block in ("model", "decoder", "session_options"):
        raw = raw.get(block) if isinstance(raw, dict) else None
    listed = raw.get("provider_options") if isinstance(raw, dict) else None
    for provider in listed if isinstance(listed, list) else ():
        for name, options in provider.items() if isinstance(provider, dict) else ():
            if str(name).lower() in CUDA:
                number = options.get("device_id") if isinstance(options, dict) else None
                index = whole_number(str(number))
                return f"cuda:{index}" if index else "cuda"
    return ""
