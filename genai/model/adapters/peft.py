"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import re2
from safetensors.numpy import save_file

from ...errors import InputError, ModelFolderError
from ..folders import folder_json, readable
from ..safetensors_file import SafetensorsFile
from .parameters import AdapterParameters, Pair

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Where our own tools write down which base an adapter was trained on; see `store.base_identity`.
BASE_HASH = "genai_base_sha256"
_PREFIXES = ("base_model.model.", "base_model.")
_MOST_PATTERNS, _MOST_PATTERN = 10_000, 1000

# Kinds of adapters that are more than two factors beside a product: what is set, and why that cannot run.
_REFUSED = {
    "use_dora": "DoRA scales the columns of the merged weight, for which the base's own would have to be changed",
    "use_qalora": "QA-LoRA pools its inputs in groups",
    "lora_bias": "the second factor has a bias of its own",
    "modules_to_save": "whole modules were trained beside the factors, which replace the base's own",
    "trainable_token_indices": "rows of the embedding were trained",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt",
    "target_parameters": "parameters of experts were adapted, which have no place of their own",
    "layer_replication": "layers of the base are repeated",
    "arrow_config": "adapters are mixed by what they are given",
    "corda_config": "CorDA changes the base's weights",
    "lora_ga_config": "LoRA-GA changes the base's weights",
    "megatron_config": "Megatron's parallel layers are cut in another way",
}
_MERGE = "merge it into the base with PEFT (merge_and_unload), and build a model folder from the result"


def read_peft(folder: Path) -> AdapterParameters:
    """Read a folder. Nothing in it is executed, and no path in it is followed.

    Raises:
        ModelFolderError: a file is missing. InputError: it is damaged, or of a kind that cannot be run.
    """
    config = _config(folder)
    path = folder / WEIGHTS
    with readable(folder):
        if not path.is_file():
            raise _missing(folder)
    file = SafetensorsFile(path)
    names: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        module, factor = _factor_of(name, path)
        if factor in names.setdefault(module, {}):
            raise InputError(
                f"{path}: {module!r} has two factors {factor}", "they are of several adapters", "save one of them alone"
            )
        names[module][factor] = name
    pairs = {module: _pair(file, module, found, config, path) for module, found in names.items()}
    if not pairs:
        raise InputError(f"{path}: holds no factors", "an adapter has at least one pair", "save the adapter again")
    return AdapterParameters(
        folder, pairs, "peft", base=str(config.get("base_model_name_or_path") or ""),
        base_hash=str(config.get(BASE_HASH) or ""), fan_in_fan_out=bool(config.get("fan_in_fan_out")),
    )  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    def absent(place: Path) -> ModelFolderError:
        return ModelFolderError(
            f"{place}: no {CONFIG}", "an adapter is a folder as PEFT writes it, or an .onnx_adapter file", "give one"
        )

    config = folder_json(folder, CONFIG, InputError, absent)
    if config.get("peft_type", "LORA") != "LORA":
        raise InputError(
            f"{folder}: peft_type is {config['peft_type']!r:.40}",
            "adapters here are LORA: two factors a product",
            _MERGE,
        )
    for name, why in _REFUSED.items():
        if config.get(name):
            raise InputError(f"{folder}: {name} is {config[name]!r:.80}", why, _MERGE)
    if config.get("bias", "none") != "none":
        raise InputError(
            f"{folder}: bias is {config['bias']!r:.40}", "biases of the base were trained beside the factors", _MERGE
        )
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
            raise InputError(f"{folder}: {name} is {patterns!r:.80}", "numbers by pattern are expected", "correct it")
    return config


def _missing(folder: Path) -> ModelFolderError:
    if (folder / PICKLE).is_file():
        return ModelFolderError(
            f"{folder}: the factors are in {PICKLE}, which is a pickle",
            "opening a pickle runs whatever code it holds, so it is never opened here",
            "save the adapter with safe_serialization=True",
        )
    return ModelFolderError(f"{folder}: no {WEIGHTS}", "it holds the factors", "download the adapter whole")


def _factor_of(name: str, path: Path) -> tuple[str, str]:
    """The module and the factor, "A" or "B", of a tensor such as `base_model.model.….q_proj.lora_A.weight`."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            inner = name[len(prefix) :]
            break
    else:
        inner = name
    for factor in "AB":
        before, found, after = inner.partition(f".lora_{factor}.")
        if found and after.split(".")[-1] == "weight" and after.count(".") <= 1:
            return before, factor
    reasons = {
        "lora_embedding": "the embedding was adapted, whose rows are looked up and not multiplied",
        "lora_magnitude_vector": _REFUSED["use_dora"],
        "modules_to_save": _REFUSED["modules_to_save"],
    }
    why = next((why for part, why in reasons.items() if part in name), "its name has neither lora_A nor lora_B")
    raise InputError(f"{path}: tensor {name!r:.200} is no factor of a product", why, _MERGE)


def _pair(file: SafetensorsFile, module: str, names: Mapping[str, str], config: Mapping[str, Any], path: Path) -> Pair:
    if len(names) != 2:
        raise InputError(
            f"{path}: {module!r} has no factor {'B' if 'A' in names else 'A'}", "A and B come in pairs",
            "save the adapter again",
        )  # fmt: skip
    a, b = (file.read(names[factor]) for factor in "AB")
    rank = _matching(config, "rank_pattern", "r", module, 8, path)
    alpha = _matching(config, "alpha_pattern", "lora_alpha", module, 8, path)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise InputError(
            f"{path}: {module!r} has A {list(a.shape)} and B {list(b.shape)}",
            "A is [rank, inputs] and B [outputs, rank], of one rank",
            "save the adapter again",
        )
    if len(a) != rank:
        raise InputError(
            f"{path}: {module!r} has rank {len(a)}, {CONFIG} says {rank:g}",
            "what is added is scaled by it, so both must agree",
            f"correct r or rank_pattern in {CONFIG}",
        )
    return Pair(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _matching(
    config: Mapping[str, Any], patterns: str, default: str, module: str, otherwise: float, path: Path
) -> float:
    """A number of the config: that of the first pattern which is the end of a module's name, or matches there."""
    found, key = config.get(default, otherwise), default
    for pattern, value in (config.get(patterns) or {}).items():
        try:
            if len(pattern) > _MOST_PATTERN:
                raise ValueError(f"it is longer than {_MOST_PATTERN} characters")
            if re2.fullmatch(rf"(.*\.)?({pattern})", module):
                found, key = value, f"{patterns}[{pattern!r:.80}]"
                break
        except (re2.error, ValueError, TypeError) as error:
            raise InputError(
                f"{path.parent / CONFIG}: {patterns} has {pattern!r:.80}", f"it is no pattern: {error}", "correct it"
            ) from error
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise InputError(f"{path.parent / CONFIG}: {key} is {found!r:.40}", "a finite number is expected", "correct it")
    if patterns == "rank_pattern" and found < 1:
        raise InputError(f"{path.parent / CONFIG}: {key} is {found}", "a rank is at least 1", "correct it")
    return float(found)


def write_peft(adapter: AdapterParameters, folder: Path, dtype: Any) -> None:
    """Write an adapter as PEFT does, scales in the second factors.

    Raises:
        InputError: it has arrays that are no factors, or the system refuses to write.
    """
    if adapter.values:
        raise InputError(
            f"{adapter.source}: {next(iter(adapter.values))!r} is no factor of a product",
            "PEFT's folders hold pairs of factors", "keep it as an .onnx_adapter file",
        )  # fmt: skip
    ranks = {module: len(pair.a) for module, pair in adapter.pairs.items()}
    most = max(ranks.values())
    others = {module: rank for module, rank in ranks.items() if rank != most}
    config = {
        "base_model_name_or_path": adapter.base, "bias": "none", "fan_in_fan_out": adapter.fan_in_fan_out,
        "inference_mode": True, "lora_alpha": most, "lora_dropout": 0.0, "peft_type": "LORA", "r": most,
        "rank_pattern": {re2.escape(module): rank for module, rank in others.items()},
        "alpha_pattern": {re2.escape(module): rank for module, rank in others.items()},
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}), "task_type": "CAUSAL_LM",
        **({BASE_HASH: adapter.base_hash} if adapter.base_hash else {}),
    }  # fmt: skip
    tensors = {}
    for module, pair in adapter.pairs.items():
        scaled = pair.b.astype(np.float32) * np.float32(pair.scale)
        tensors[f"{_PREFIXES[0]}{module}.lora_A.weight"] = np.ascontiguousarray(pair.a.astype(dtype))
        tensors[f"{_PREFIXES[0]}{module}.lora_B.weight"] = np.ascontiguousarray(scaled.astype(dtype))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
    except OSError as error:
        raise InputError(f"{folder}: cannot be written", str(error), "choose another place") from error
