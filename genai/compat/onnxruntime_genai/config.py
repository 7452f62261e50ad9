"""Config: the core's, with a device that is chosen by providers and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from ...errors import NotSupportedYetError, OptionError, whole_number
from ...models import config as core
from ...models.chosen_device import CPU, CUDA, ChosenDevice


class Config(core.Config):
    __doc__ = core.Config.__doc__

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.providers: list[str] = []
        self._gpu = ""

    @classmethod
    def from_package_ep(cls, path: str, ep: str) -> NoReturn:
        """Not supported: models are read from folders, not from packages of several."""
        raise NotSupportedYetError(
            f"{path}: model packages are not read",
            "a model is a folder with a genai_config.json",
            "give one of the package's folders to Config",
        )

    def append_provider(self, name: str) -> None:
        """Choose an execution provider: "cpu", or "cuda" for a GPU, unless Model is told a device; others are refused
        when a model is loaded. What the folder asks for counts no more."""
        self.providers.append(str(name))

    def clear_providers(self) -> None:
        """Forget chosen providers, those that the folder asks for as well; the CPU remains."""
        self.providers.clear()
        if self.folder_device:
            self.overlay(json.dumps({"model": {"decoder": {"session_options": {"provider_options": []}}}}))

    def set_provider_option(self, name: str, key: str, value: str) -> None:
        """An option of a provider: "device_id" of "cuda" is the GPU's number, others have no effect.

        Raises:
            OptionError: that is no number.
        """
        if name.lower() in CUDA and key == "device_id":
            if whole_number(str(value)) is None:
                raise OptionError(
                    f"device_id = {value!r:.80} of provider {name!r}",
                    "the number of a GPU is expected, in plain digits",
                    'such as "0", the first one',
                )
            self._gpu = str(int(value))

    def _hardware(self, provider: str, value: Any = None) -> None:
        """Which device a provider other than the CPU would use: no effect as long as it is not chosen."""

    set_decoder_provider_options_hardware_device_type = _hardware
    set_decoder_provider_options_hardware_device_id = _hardware
    set_decoder_provider_options_hardware_vendor_id = _hardware
    clear_decoder_provider_options_hardware_device_type = _hardware
    clear_decoder_provider_options_hardware_device_id = _hardware
    clear_decoder_provider_options_hardware_vendor_id = _hardware

    def check_providers(self) -> None:
        """Whether the chosen providers are known. Raises NotSupportedYetError: one of them is not."""
        for name in self.providers:
            if name.lower() not in (*CPU, *CUDA):
                raise NotSupportedYetError(
                    f"provider {name!r} is not available",
                    "this version runs on the CPU and on GPUs of NVIDIA",
                    'use "cpu" or "cuda", or none',
                )

    @property
    def device(self) -> str:
        """The device that the chosen providers stand for, as Model takes it; "" = none was chosen."""
        chosen = [name.lower() for name in self.providers]
        if any(name in CUDA for name in chosen):
            return f"cuda:{self._gpu}" if self._gpu else "cuda"
        return "cpu" if chosen else ""

    def choose_device(self, given: str | None) -> ChosenDevice:
        """Where the model is to be loaded: the caller's word, chosen providers, what the folder asks for, the CPU.

        Raises:
            NotSupportedYetError: a provider was chosen that is not known.
        """
        self.check_providers()
        if given is None and not self.device and self.folder_device and self._gpu:  # the caller says which
            return ChosenDevice(f"cuda:{self._gpu}")
        return super().choose_device(given)
