"""Facts about models that are not model folders: checkpoints, GGUF files, adapters, and models on the hub."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from genai.common.memory_limits import available_memory, format_bytes

from ..convert.build import default_precision, plan_build
from ..convert.options import ExportOptions
from ..convert.tensors import tensor_shapes
from ..hub.known import CACHED_TOKENS, PROCESS_BYTES, known_models
from ..hub.pull import PullPlan
from ..lora.describe import describe
from ..lora.read import read_adapter
from ..text.files import generation_defaults


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Return facts about a decoder's checkpoint or GGUF file, and about the model that would be built from it.

    Raises:
        GenaiError: see `plan_build`.
    """
    plan = plan_build(path, replace(ExportOptions(), precision=default_precision(path)))
    spec = plan.spec
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
    count, head = sum(sizes.values()), sum(size for name, size in sizes.items() if name.startswith("mtp."))
    tokens = min(spec.context_length, CACHED_TOKENS)
    cache = tokens * 4 * spec.num_layers * spec.num_key_value_heads * spec.head_size
    needed, free = plan.written_bytes + cache + PROCESS_BYTES, available_memory()
    fits = f"{'fits' if needed < free else 'does not fit'} in the free memory, {format_bytes(free)}"
    return {
        "kind": "GGUF file" if path.is_file() else "checkpoint",
        "path": str(path),
        "architecture": plan.checkpoint.config.model_type,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "parameters": count - head,
        "mtp_parameters": head,
        "vocab_size": spec.vocab_size,
        "context_length": spec.context_length,
        "read_bytes": plan.read_bytes,
        "default_precision": plan.options.precision,
        "built_bytes": plan.written_bytes,
        "memory_bytes": needed,
        "verdict": f"{fits}, with a cache of {tokens:,} tokens in fp16",
        "remarks": "; ".join(plan.remarks) or "none",
        "sampling_defaults_without_effect": [] if path.is_file() else list(generation_defaults(path).unsupported),
    }


def describe_adapter(path: Path) -> dict[str, Any]:
    """Return facts about an adapter. Raises GenaiError as `read_adapter` does."""
    return {"kind": "adapter", **{f"adapter_{name}": value for name, value in describe(read_adapter(path)).items()}}


def describe_download(plan: PullPlan) -> dict[str, Any]:
    """Return facts about a model on the hub: what a download would contain."""
    listing, choice = plan.listing, plan.choice
    facts: dict[str, Any] = {
        "kind": f"{choice.kind} to download",
        "name": plan.name,
        "source": listing.page,
        "revision": listing.commit,
        "license": listing.license,
        "gated": listing.gated,
        "choice": choice.why,
        "download_bytes": plan.total_bytes,
        "missing_bytes": plan.missing_bytes,
        "files": {file.path: file.size for file in choice.files},
    }
    known = next((known for known in known_models().values() if known.repository == listing.reference.repo), None)
    if known is not None:
        facts |= {
            "parameters": known.parameters,
            "context_length": known.context,
            "int4_bytes": known.size_bytes,
            "good_for": known.good_for,
        }
    return facts
