"""Adapters in mlx-lm's format: a folder with adapter_config.json and adapters.safetensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, ModelFolderError
from ..models.folders import readable
from ..weight_files.safetensors import read_safetensors
from .parameters import AdapterParameters, paired
from .peft import CONFIG
from .selection import check_mlx_keys, last_layers

WEIGHTS, OLD_WEIGHTS = "adapters.safetensors", "adapters.npz"
_FIELDS = ("fine_tune_type", "lora_parameters", "lora_layers")
_FACTORS = {".lora_a": "A", ".lora_b": "B"}
_DORA = "DoRA scales the columns of the merged weight, which changes the base's weights"
_FUSE = "merge the adapter into the base with mlx_lm.fuse, and build a model folder from the result"


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Return True if the content of adapter_config.json is in mlx-lm's format."""
    return "peft_type" not in config and any(name in config for name in _FIELDS)


def read_mlx(folder: Path, config: Mapping[str, Any]) -> AdapterParameters:
    """Read an adapter folder.

    mlx-lm computes x @ lora_a @ lora_b * scale, with lora_a [inputs, rank] and lora_b [rank, outputs].

    Raises:
        ModelFolderError: a file is missing.
        InputError: a file is damaged, or the kind of adapter is not supported.
    """
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        why = _DORA if kind == "dora" else "only LORA, with two factors per linear layer, is supported"
        raise InputError(f"{folder}: fine_tune_type is {kind!r:.40}", why, _FUSE)
    scale, rank = _scale(folder / CONFIG, config)
    path = folder / WEIGHTS
    with readable(folder):
        if not path.is_file():
            raise _missing(folder)
    tensors = read_safetensors(path)
    names: dict[str, set[str]] = {}
    for name in tensors:
        if name.endswith(".m"):
            raise InputError(f"{path}: tensor {name!r:.200} is a magnitude of DoRA", _DORA, _FUSE)
        module, factor = name[:-7], _FACTORS.get(name[-7:], "")
        if not factor:
            why = "the name ends with neither lora_a nor lora_b"
            raise InputError(f"{path}: tensor {name!r:.200} is not a factor of a linear layer", why, _FUSE)
        names.setdefault(module, set()).add(factor)
    pairs = {}
    for module, factors in names.items():
        if len(factors) != 2:
            raise InputError(
                f"{path}: {module!r} has no factor {'B' if 'A' in factors else 'A'}", "A and B come in pairs",
                "save the adapter again",
            )  # fmt: skip
        a, b = tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"]
        if a.ndim == 3 or b.ndim == 3:
            raise InputError(
                f"{path}: {module!r} has a pair of factors per expert", "experts are not LoRA targets", _FUSE
            )
        pairs[module] = paired(path, module, a.T, b.T, scale)
        if rank and len(pairs[module].a) != rank:
            raise InputError(
                f"{path}: {module!r} has rank {len(pairs[module].a)}, but {CONFIG} has rank {rank:g}",
                "the two files belong to different adapters",
                "save the adapter again",
            )
    if not pairs:
        raise InputError(
            f"{path}: the file contains no factors",
            "an adapter has at least one pair of factors",
            "save the adapter again",
        )
    check_mlx_keys(folder / CONFIG, config.get("lora_parameters", config).get("keys"), pairs)
    return AdapterParameters(
        folder, pairs, "mlx", base=str(config.get("model") or ""),
        last_layers=last_layers(folder / CONFIG, config, pairs),
    )  # fmt: skip


def _scale(path: Path, config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the scale of the products, and the rank; 0 = not recorded.

    Versions of mlx-lm that write "lora_layers" multiply the scale by alpha / rank. Later versions ignore alpha.
    """
    given = config.get("lora_parameters", config)
    if not isinstance(given, Mapping):
        raise InputError(
            f"{path}: lora_parameters is {given!r:.80}", "an object is expected", "correct the field in this file"
        )
    scale = _number(path, "scale", given.get("scale"))
    rank = _number(path, "rank", given.get("rank", 0))
    if "lora_layers" in config and "num_layers" not in config and "alpha" in given:
        if not rank:
            raise InputError(f"{path}: there is no rank", "the scale is multiplied by alpha / rank", "set rank")
        scale *= _number(path, "alpha", given["alpha"]) / rank
    return scale, rank


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30 or math.isnan(value):
        raise InputError(
            f"{path}: {name} is {value!r:.40}", "a finite number is expected", "correct the number in this file"
        )
    if name == "rank" and value < 0:
        raise InputError(f"{path}: rank is {value}", "a rank must be at least 1", "correct the rank in this file")
    return float(value)


def _missing(folder: Path) -> ModelFolderError:
    if (folder / OLD_WEIGHTS).is_file():
        return ModelFolderError(
            f"{folder}: the factors are in {OLD_WEIGHTS}",
            f"old versions of mlx-lm write this file; the toolkit reads {WEIGHTS}",
            f'save the arrays of the file with mlx.core.save_safetensors("{WEIGHTS}", arrays)',
        )
    return ModelFolderError(
        f"{folder}: there is no {WEIGHTS}",
        "this file contains the factors of the adapter",
        "copy the complete adapter",
    )
