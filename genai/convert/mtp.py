"""The MTP head (multi-token prediction) of a checkpoint, which proposes tokens for speculative decoding."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches

from ..errors import InputError, UnsupportedModelError
from .architectures.common import Architecture
from .checkpoint import Checkpoint
from .options import ExportOptions
from .spec import DecoderSpec
from .tensors import mtp_name, tensor_shapes

_WITHOUT = "to build the model without the head, pass --no-mtp (in Python: ExportOptions(mtp=False))"
_COUNT, _DEDICATED = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"


def with_mtp_head(
    spec: DecoderSpec, checkpoint: Checkpoint, architecture: Architecture, options: ExportOptions
) -> tuple[DecoderSpec, list[str]]:
    """Return the specification with the checkpoint's MTP head, if the options include it, and remarks for the user.

    Raises:
        InputError: parts of the head are missing or have other sizes, or the head is required and missing.
        UnsupportedModelError: the head has separate embeddings, or is required and not supported.
    """
    wanted = False if options.prune_lm_head else options.mtp
    declared = checkpoint.config.integer(_COUNT, default=0, least=0)
    dedicated = checkpoint.config.flag(_DEDICATED)
    if wanted is False:
        return spec, []
    if architecture.mtp is None:
        if wanted:
            raise UnsupportedModelError(
                f"the MTP head of {architecture.title} cannot be converted",
                "heads are converted for Qwen 3.5 and Qwen3-Next only",
                "omit --mtp (in Python: ExportOptions(mtp=True))",
            )
        return spec, []
    head = architecture.mtp(spec)
    stored = architecture.stored_in(checkpoint)
    names = {mtp_name(name) for name in tensor_shapes(head)}
    sources = {one for name in names if name.startswith("mtp.") for one in stored.source(spec, name).names}
    missing = sorted(sources - set(checkpoint))
    if len(missing) == len(sources):
        return spec, _absent(checkpoint, declared, wanted)
    _check(spec, checkpoint, stored, missing, dedicated)
    return replace(spec, mtp=head), _more_layers(checkpoint)


def _absent(checkpoint: Checkpoint, declared: int, wanted: bool | None) -> list[str]:
    """Return a remark if config.json describes a head that the files lack. Raise InputError if it is required."""
    if wanted:
        raise InputError(
            f"{checkpoint.source} has no MTP head",
            f"config.json sets {_COUNT} to {declared}, and the files have no tensors of a head",
            "omit --mtp (in Python: ExportOptions(mtp=True)), or download a checkpoint that contains the head",
        )
    if not declared:
        return []
    return [
        f"config.json sets {_COUNT} to {declared}, but the files have no MTP head, so the model is built without it"
    ]


def _check(
    spec: DecoderSpec, checkpoint: Checkpoint, stored: Architecture, missing: list[str], dedicated: bool
) -> None:
    if missing:
        close = get_close_matches(missing[0], list(checkpoint), 3)
        raise InputError(
            f"the checkpoint's MTP head lacks {len(missing)} tensors, such as {missing[0]!r}",
            f"the files have only a part of the head; the closest names are {', '.join(close) or 'none'}",
            f"download the checkpoint again; {_WITHOUT}",
        )
    (name,) = stored.source(spec, "mtp.fc.weight").names
    expected, shape = (spec.hidden_size, 2 * spec.hidden_size), checkpoint.shape(name)
    if shape != expected:
        raise InputError(
            f"{name} of the MTP head has shape {list(shape)}, expected {list(expected)}",
            f"the head reads an embedding and a vector of the decoder, with {spec.hidden_size} elements each",
            f"use the head of the same model; {_WITHOUT}",
        )
    if dedicated:
        raise UnsupportedModelError(
            f"config.json sets {_DEDICATED} to true",
            "an MTP head must have the embeddings and the LM head of the decoder",
            _WITHOUT,
        )


def _more_layers(checkpoint: Checkpoint) -> list[str]:
    layers = {match[1] for name in checkpoint if (match := re.match(r"mtp\.layers\.(\d+)\.", name))}
    if len(layers) < 2:
        return []
    return [f"the MTP head has {len(layers)} layers, of which the first proposes all tokens; the others are left out"]
