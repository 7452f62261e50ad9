"""The rules of genai_config.json for a folder with a draft model (`model.draft`) or an MTP head (`model.mtp`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .chosen_device import folder_device

DECODER, DRAFT, MTP = "model.decoder", "model.draft", "model.mtp"
# The kinds of layers whose cache can be cut to any length. Others, such as "conv" of LFM2, have a rolling state.
_REWINDABLE = ("full_attention", "sliding_attention", "attention")


def check_draft(raw: Mapping[str, Any]) -> None:
    """Check the rules of genai_config.json for a folder with `model.draft`.

    Raises:
        ConfigError: the draft has no file name, or is combined with something that rules out a draft model.
    """
    model = raw["model"]
    if not model["draft"].get("filename"):
        raise ConfigError(
            f"{DRAFT}.filename is not set in genai_config.json",
            f"{DRAFT} describes the draft model in the same way as {DECODER} describes the model",
            f"set {DRAFT}.filename to the draft model's ONNX file, or remove {DRAFT}",
        )
    for name in ("vision", "speech"):
        if model.get(name, {}).get("filename"):
            raise ConfigError(
                f"{DRAFT} cannot be used with model.{name} in genai_config.json",
                "a draft model proposes tokens from tokens only, so multimodal models are not supported",
                f"remove {DRAFT} or model.{name}",
            )
    for block in (DECODER, DRAFT):
        decoder = model[block.split(".")[1]]
        if slides(decoder):
            raise ConfigError(
                f"{DRAFT} cannot be used with {block}.sliding_window.slide_key_value_cache in genai_config.json",
                "rejected tokens must be removed from the cache; physically sliding KV caches have no room for that",
                f"remove {DRAFT}, or export the model without slide_key_value_cache",
            )
        if others := [kind for kind in decoder.get("layer_types", ()) if kind not in _REWINDABLE]:
            raise ConfigError(
                f"{DRAFT} cannot be used with {others[0]!r:.40} in {block}.layer_types in genai_config.json",
                "rejected tokens must be removed from the cache, and the rolling state of hybrid models such as LFM2 "
                "cannot be cut",
                f"remove {DRAFT}",
            )
    devices = [folder_device({"model": {"decoder": model[name]}}) for name in ("decoder", "draft")]
    if devices[0] != devices[1]:
        shown = " and ".join(repr(device or "cpu") for device in devices)
        raise ConfigError(
            f"{DECODER} and {DRAFT} have different devices in genai_config.json: {shown}",
            "the two models exchange tokens in every step, so both use the same execution provider",
            f"set the same provider_options in {DECODER}.session_options and {DRAFT}.session_options",
        )


def check_mtp(block: Mapping[str, Any]) -> None:
    """Check the rules of genai_config.json for the block `model.mtp`.

    Raises:
        ConfigError: the head has no file name, or not exactly one layer.
    """
    if not block.get("filename"):
        raise ConfigError(
            f"{MTP}.filename is not set in genai_config.json",
            f"{MTP} describes a head that proposes tokens",
            f"set {MTP}.filename to the head's ONNX file, or remove {MTP}",
        )
    if (count := block.get("num_hidden_layers")) != 1:
        raise ConfigError(
            f"{MTP}.num_hidden_layers is {count} in genai_config.json",
            "an MTP head has one layer, which is applied again for each further token",
            f"set {MTP}.num_hidden_layers to 1, or remove {MTP}",
        )


def slides(decoder: Mapping[str, Any]) -> bool:
    """Return True if a decoder block says that its cache drops the tokens that leave the window."""
    return bool(decoder.get("sliding_window", {}).get("slide_key_value_cache"))
