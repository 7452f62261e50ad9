"""The MTP head (multi-token prediction) of a checkpoint, which proposes tokens for speculative decoding."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches

from ..errors import GenaiError, InputError, UnsupportedModelError
from .architectures.common import Architecture
from .checkpoint import Checkpoint
from .options import ExportOptions
from .spec import DecoderSpec
from .tensors import HEAD, TABLE, mtp_name, tensor_shapes
from .weights import are_equal

_WITHOUT = "to build the model without the head, pass --no-mtp (in Python: ExportOptions(mtp=False))"
# Tensors of heads in checkpoints and in GGUF files; the groups are the numbers of their layers.
_PART_OF_HEAD = re.compile(r"mtp\.(?:layers\.(\d+)\.)?|blk\.(\d+)\.nextn\.|model\.layers\.(\d+)\.eh_proj\.")
_OWN_MATRIX = re.compile(
    r"mtp\.(?:embed_tokens|lm_head)\.weight|blk\.\d+\.nextn\.(?:embed_tokens|shared_head_head)\.weight"
    r"|model\.layers\.(\d+)\.(?:embed_tokens|shared_head\.head)\.weight"
)
_LAST_LAYERS = "num_nextn_predict_layers"
_COUNT, _DEDICATED = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"


def with_mtp_head(
    spec: DecoderSpec, checkpoint: Checkpoint, architecture: Architecture, options: ExportOptions
) -> tuple[DecoderSpec, list[str]]:
    """Return the specification with the checkpoint's MTP head, if the options include it, and remarks for the user.

    Raises:
        InputError: the options require the head, and parts of it are missing or have other sizes.
        UnsupportedModelError: the options require the head, and it is not supported.
    """
    declared = checkpoint.config.integer(_COUNT, default=0, least=0)
    checkpoint.config.integer(_LAST_LAYERS, default=0, least=0)  # libraries set it for files without a head, too
    dedicated = checkpoint.config.flag(_DEDICATED)
    if options.mtp is False or options.prune_lm_head:
        return spec, []
    try:
        return _with_head(spec, checkpoint, architecture, dedicated)
    except GenaiError as error:
        if options.mtp:
            raise
        present = declared or any(_PART_OF_HEAD.match(name) for name in checkpoint)
        return spec, [f"the model is built without its MTP head: {error.what}"] if present else []


def _with_head(
    spec: DecoderSpec, checkpoint: Checkpoint, architecture: Architecture, dedicated: bool
) -> tuple[DecoderSpec, list[str]]:
    if architecture.mtp is None:
        raise UnsupportedModelError(
            f"the MTP head of {architecture.title} cannot be converted",
            "heads are converted for Qwen 3.5, Qwen3-Next, DeepSeek V3, GLM 4.5 to 4.7 and GLM 4.7 Flash only",
            f"omit --mtp; {_WITHOUT}",
        )
    head = spec.one_layer()
    stored = architecture.stored_in(checkpoint)
    names = {mtp_name(name) for name in tensor_shapes(head)}
    sources = {one for name in names if name.startswith("mtp.") for one in stored.source(spec, name).names}
    if missing := sorted(sources - set(checkpoint)):
        raise _incomplete(checkpoint, missing, len(sources))
    (name,) = stored.source(spec, "mtp.fc.weight").names
    expected, shape = (spec.hidden_size, 2 * spec.hidden_size), checkpoint.shape(name)
    if shape != expected:
        raise InputError(
            f"{name} of the MTP head has shape {list(shape)}, expected {list(expected)}",
            f"the head reads an embedding and a vector of the decoder, with {spec.hidden_size} elements each",
            f"use the head of the same model; {_WITHOUT}",
        )
    own = next((name for name in sorted(checkpoint) if _is_separate(checkpoint, spec, stored, name)), "")
    if own or dedicated:
        raise UnsupportedModelError(
            f"the MTP head has separate embeddings ({own or f'{_DEDICATED} in config.json'})",
            "an MTP head must have the embeddings and the LM head of the decoder",
            _WITHOUT,
        )
    layers = {match[match.lastindex or 0] for name in checkpoint if (match := _PART_OF_HEAD.match(name))}
    layers = {layer for layer in layers if layer.isdigit()}
    more = f"the MTP head has {len(layers)} layers, of which the first proposes all tokens; the others are left out"
    return replace(spec, mtp=head), [more] * (len(layers) > 1)


def _is_separate(checkpoint: Checkpoint, spec: DecoderSpec, stored: Architecture, name: str) -> bool:
    """Return True if a tensor holds embeddings or an LM head of the head, and differs from those of the decoder."""
    match = _OWN_MATRIX.match(name)
    if match is None or (match[1] and match[1] != str(spec.num_layers)):
        return False
    ours = TABLE if name.endswith("embed_tokens.weight") or spec.tie_word_embeddings else HEAD
    (of_decoder,) = stored.source(spec, ours).names
    return not are_equal(checkpoint, name, of_decoder)


def _incomplete(checkpoint: Checkpoint, missing: list[str], count: int) -> InputError:
    """Return the error for a head of `count` tensors of which some or all are missing."""
    if len(missing) == count:
        return InputError(
            f"{checkpoint.source} has no tensors of an MTP head",
            f"a head of this architecture has {count} tensors, such as {missing[0]!r}",
            f"download a checkpoint that contains the head; {_WITHOUT}",
        )
    close = get_close_matches(missing[0], list(checkpoint), 3)
    return InputError(
        f"the MTP head lacks {len(missing)} tensors, such as {missing[0]!r}",
        f"the files have only a part of the head; the closest names are {', '.join(close) or 'none'}",
        f"download the checkpoint again; {_WITHOUT}",
    )
