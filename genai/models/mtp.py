"""Loading of the MTP head that a folder describes in genai_config.json (`model.mtp`)."""

from __future__ import annotations

from collections.abc import Sequence

from genai.kernels.ir import OpProgram

from ..errors import ConfigError, UnsupportedModelError
from .config import Config
from .draft_block import DECODER, MTP


def missing_rows(config: Config, name: str, others: Sequence[str]) -> ConfigError:
    """Return the error for a decoder, or an MTP head, without the output that the head reads."""
    decoder = config.model.decoder
    key = f"{MTP}.outputs.hidden_states" if decoder.block == MTP else f"{MTP}.main_hidden_states"
    return ConfigError(
        f"{key} is {name!r} in genai_config.json, but {decoder.filename} has no such output",
        f"the outputs with one row per token are {', '.join(others)}",
        f"correct {key}, or remove {MTP}",
    )


def unusable_head(config: Config, reason: str) -> UnsupportedModelError:
    """Return the error for an MTP head whose graph cannot be flattened."""
    return UnsupportedModelError(
        f"{config.model.decoder.filename}: the MTP head cannot run in a batch",
        reason,
        f"export the head again, remove {MTP} from genai_config.json, or load the model without its head (mtp=False)",
    )


def check_head(config: Config, head: OpProgram, main: OpProgram) -> None:
    """Raise ConfigError unless an MTP head reads rows as wide as the hidden states of the model and of the head."""
    decoder = config.model.decoder
    if not head.given:
        raise ConfigError(
            f"{decoder.filename}: the input {decoder.names.hidden_states!r} with hidden states was not found",
            "an MTP head reads the hidden states of the model",
            f"set its name in genai_config.json under {MTP}.inputs, or remove {MTP}",
        )
    width = head.types[head.given[0]].width
    for block, program in ((DECODER, main), (MTP, head)):
        if (made := program.types[program.outputs[-1]].width) != width:
            raise ConfigError(
                f"{decoder.filename} reads hidden states of {width} numbers, but {block} returns {made}",
                "the head reads the hidden states of the model, and its own for further tokens",
                f"use the head that was exported with the model, or remove {MTP} from genai_config.json",
            )
