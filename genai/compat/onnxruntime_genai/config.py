"""Config: the core class, plus methods that choose a device through providers and their options."""

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
        """Not supported: models are read from folders, not from packages of several models."""
        raise NotSupportedYetError(
            f"{path}: model packages are not supported",
            "a model is a folder that contains genai_config.json",
            "pass one of the package's folders to Config",
        )

    def append_provider(self, name: str) -> None:
        """Choose an execution provider: "cpu", or "cuda" for a GPU. With other names, loading a model raises an error.
        The choice overrides the provider of the model's folder; the `device` argument of Model overrides the choice."""
        self.providers.append(str(name))

    def clear_providers(self) -> None:
        """Remove all chosen providers, including those in the model's folder; the CPU remains."""
        self.providers.clear()
        if self.folder_device:
            self.overlay(json.dumps({"model": {"decoder": {"session_options": {"provider_options": []}}}}))

    def set_provider_option(self, name: str, key: str, value: str) -> None:
        """Set an option of a provider. "device_id" of "cuda" is the GPU's number; other options are ignored.

        Raises:
            OptionError: the device id is not a number.
        """
        if name.lower() in CUDA and key == "device_id":
            if whole_number(str(value)) is None:
                raise OptionError(
                    f"device_id = {value!r:.80} of provider {name!r}",
                    "a GPU number in plain digits is expected",
                    'for the first GPU, use "0"',
                )
            self._gpu = str(int(value))

    def _hardware(self, provider: str, value: Any = None) -> None:
        """Ignored: a hardware option of a provider other than the CPU. It has no effect until that provider is used."""

    set_decoder_provider_options_hardware_device_type = _hardware
    set_decoder_provider_options_hardware_device_id = _hardware
    set_decoder_provider_options_hardware_vendor_id = _hardware
    clear_decoder_provider_options_hardware_device_type = _hardware
    clear_decoder_provider_options_hardware_device_id = _hardware
    clear_decoder_provider_options_hardware_vendor_id = _hardware

    def check_providers(self) -> None:
        """Raise NotSupportedYetError if a chosen provider is unknown."""
        for name in self.providers:
            if name.lower() not in (*CPU, *CUDA):
                raise NotSupportedYetError(
                    f"provider {name!r} is not available",
                    "this version runs on the CPU and on NVIDIA GPUs",
                    'use "cpu" or "cuda", or omit the provider',
                )

    @property
    def device(self) -> str:
        """The device of the chosen providers, in the form that Model takes; "" = none was chosen."""
        chosen = [name.lower() for name in self.providers]
        if any(name in CUDA for name in chosen):
            return f"cuda:{self._gpu}" if self._gpu else "cuda"
        return "cpu" if chosen else ""

    def choose_device(self, given: str | None) -> ChosenDevice:
        """Return the device for the model. Order of precedence: `given`, chosen providers, the model's folder, the CPU.

        Raises:
            NotSupportedYetError: a chosen provider is unknown.
        """
        self.check_providers()
        if given is None and not self.device and self.folder_device and self._gpu:  # the caller set device_id
            return ChosenDevice(f"cuda:{self._gpu}")
        return super().choose_device(given)
