"""Loading of the MTP head that a folder describes in genai_config.json (`model.mtp`)."""

from __future__ import annotations

from collections.abc import Sequence

from genai.kernels.ir import OpProgram
from genai.kvcache.groups import GroupKind

from ..engine.mtp import HeadDecoder
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
    """Return the error for an MTP head whose graph cannot be flattened, or has another kind of layer."""
    return UnsupportedModelError(
        f"{config.model.decoder.filename}: this MTP head is not supported",
        reason,
        f"export the head again, remove {MTP} from genai_config.json, or load the model without its head (mtp=False)",
    )


def check_head(config: Config, head: HeadDecoder, main: OpProgram) -> None:
    """Raise an error unless an MTP head can propose tokens for a model with the program `main`.

    Raises:
        ConfigError: the head does not read rows as wide as the hidden states of the model and of the head.
        UnsupportedModelError: the layer of the head is not full attention with one RoPE table.
    """
    program, names = head.program, config.model.decoder
    if not program.given:
        raise ConfigError(
            f"{names.filename}: the input {names.names.hidden_states!r} with hidden states was not found",
            "an MTP head reads the hidden states of the model",
            f"set its name in genai_config.json under {MTP}.inputs, or remove {MTP}",
        )
    width = program.types[program.given[0]].width
    for block, one in ((DECODER, main), (MTP, program)):
        if (made := one.types[one.outputs[-1]].width) != width:
            raise ConfigError(
                f"{names.filename} reads hidden states of {width} numbers, but {block} returns {made}",
                "the head reads the hidden states of the model, and its own for further tokens",
                f"use the head that was exported with the model, or remove {MTP} from genai_config.json",
            )
    if head.rope_threshold is not None or any(group.kind is not GroupKind.FULL for group in head.groups):
        # Windows, states and other RoPE tables would need hidden states of earlier tokens, which are not stored.
        raise unusable_head(config, "its layer is not full attention with one RoPE table")
