"""From a Hugging Face checkpoint folder to a model folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelFolderError, OptionError
from ..sampling_defaults import model_defaults
from ..text.special_ids import generation_defaults
from .architectures import find
from .checkpoint import GENERATION_CONFIG, Checkpoint
from .checkpoint_weights import CheckpointWeights
from .folder import write_model_folder
from .genai_config import search_defaults
from .options import ExportOptions
from .size import folder_bytes
from .spec import DecoderSpec
from .tokenizer_files import check_tokenizer, tokenizer_files

# What onnxruntime's attention operator rotates at once.
_ROTATED_TOGETHER = 16


@dataclass(frozen=True)
class BuildPlan:
    """What a build will do: the decoder, the options that fit it, and the bytes that it reads and writes.

    `remarks` is what a user should be told: keys of config.json that nothing here knows, tokens without vectors.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    options: ExportOptions
    weights: CheckpointWeights
    search: Mapping[str, Any]
    read_bytes: int
    written_bytes: int
    remarks: list[str]


def plan_build(
    checkpoint_dir: str | Path,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> BuildPlan:
    """Read headers and configuration, and check all that can be checked before anything is written.

    Args:
        checkpoint_dir: folder with config.json, *.safetensors and a tokenizer.
        options: None means INT4 in blocks of 32.
        force: NaN and infinity among the weights become 0.
        progress: told the bytes of every tensor that is read.

    Raises:
        ModelFolderError: files are missing. InputError, ConfigError: they contradict each other.
        UnsupportedModelError: an architecture or a part of one that is not known.
        TokenizerError: the tokenizer cannot be used.
    """
    checkpoint = Checkpoint(checkpoint_dir)
    architecture = find(checkpoint.config.model_type)
    spec = architecture.describe(checkpoint.config)
    remarks = check_tokenizer(checkpoint.folder, spec.vocab_size)
    if unread := checkpoint.config.unread:
        remarks.append(f"config.json has keys that {architecture.model_type} is not known for: {', '.join(unread)}")
    weights = CheckpointWeights(checkpoint, architecture, spec, force=force, progress=progress)
    options = _fitting(options or ExportOptions(), spec)
    copied = sum(file.stat().st_size for file in tokenizer_files(checkpoint.folder))
    written = folder_bytes(spec, options) + copied
    search = _search(checkpoint, spec.vocab_size)
    return BuildPlan(checkpoint, spec, options, weights, search, weights.total_bytes, written, remarks)


def _search(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    """Search options out of generation_config.json, if the engine will take them when the model is loaded."""
    search = search_defaults(checkpoint.config.generation)
    try:
        model_defaults({**generation_defaults(checkpoint.folder).sampling, **search}, vocab_size)
    except OptionError as error:
        raise ConfigError(
            f"{GENERATION_CONFIG}: {error.what}", error.why, "correct the file, or remove the key"
        ) from error
    return search


def build_model(
    checkpoint_dir: str | Path,
    output: str | Path,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Build a model folder from a checkpoint; returns it. See plan_build for arguments and errors.

    The folder appears when it is whole. Memory stays within twice the largest tensor, whatever the model's size.
    """
    plan = plan_build(checkpoint_dir, options, force=force, progress=progress)
    return execute(plan, Path(output))


def execute(plan: BuildPlan, output: Path) -> Path:
    """Write what was planned.

    Raises:
        ModelFolderError: there is no room, the folder exists or cannot be written.
        InputError: a weight is not finite, or of another shape than config.json says.
    """
    _require_room(output, plan.written_bytes)
    return write_model_folder(
        output,
        plan.spec,
        plan.options,
        plan.weights,
        tokenizer_dir=plan.checkpoint.folder,
        search=plan.search,
    )


def _fitting(options: ExportOptions, spec: DecoderSpec) -> ExportOptions:
    """Rotation outside the attention operator where onnxruntime could not do it inside."""
    if spec.rotary_size % _ROTATED_TOGETHER == 0 or not options.fused_rope or _needs_fused_rope(spec):
        return options
    return replace(options, fused_rope=False)


def _needs_fused_rope(spec: DecoderSpec) -> bool:
    """Tables that change with the length are known inside the attention operator only."""
    from .rope_scaling import LongRope

    return isinstance(spec.rope_scaling, LongRope)


def _require_room(output: Path, needed: int) -> None:
    if not output.parent.is_dir():
        raise ModelFolderError(
            f"{output.parent} is no folder", f"{output.name} is to be made in it", "make it first, or choose another"
        )
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise ModelFolderError(
            f"{output.parent} has {free / 1e9:.2f} GB free, the model needs {needed / 1e9:.2f} GB",
            "a build that fills the disk fails at its end",
            "free some space, choose another place, or a smaller precision",
        )
