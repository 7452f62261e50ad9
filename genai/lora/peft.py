"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import re2
from numpy.typing import NDArray
from safetensors.numpy import save

from ..common.atomic_files import whole_folder
from ..errors import InputError, ModelFolderError
from ..models.folders import folder_json, readable
from ..weight_files.safetensors import read_safetensors
from .parameters import AdapterParameters, already_exists, checkpoint_name, narrowed, paired, scaled
from .selection import check_peft_selection

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# The field in which this project records the base that an adapter was trained on; see `store.base_identity`.
BASE_HASH = "genai_base_sha256"
_PREFIXES = ("base_model.model.", "base_model.")
# The maximum number of combinations of a pattern and a module. Matching a pattern takes a few microseconds.
_MOST_PATTERN, _MOST_TRIALS = 1000, 1_000_000
_QUIETLY = re2.Options()
_QUIETLY.log_errors = False

# Config fields of adapters with more than two factors per linear layer, and why these adapters are not supported.
_REFUSED = {
    "use_dora": "DoRA scales the columns of the merged weight, which changes the base's weights",
    "use_qalora": "QA-LoRA pools its inputs in groups",
    "lora_bias": "the factor B has a bias",
    "modules_to_save": "whole modules were trained in addition to the factors, and replace modules of the base",
    "trainable_token_indices": "rows of the embedding were trained",
    "alora_invocation_tokens": "activated LoRA, which starts in the middle of a prompt, is not supported",
    "target_parameters": "parameters of experts were adapted, but experts are not LoRA targets",
    "layer_replication": "layers of the base are repeated",
    "arrow_config": "Arrow mixes adapters depending on their inputs",
    "corda_config": "CorDA changes the base's weights",
    "lora_ga_config": "LoRA-GA changes the base's weights",
    "megatron_config": "Megatron's parallel layers are split differently",
    "use_bdlora": "BD-LoRA stores one of the factors in blocks",
    "kasa_config": "KaSA truncates the base's weights and scales the factors' ranks",
    "monteclora_config": "MonteCLoRA mixes randomly drawn factors",
    "velora_config": "VeLoRA has parameters in addition to the factors",
}
# Initialisations that subtract the initial factors from the base's weights. These adapters fit only the changed base.
_TAKEN_OUT_OF_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_MERGE = "merge the adapter into the base with PEFT (merge_and_unload), and build a model folder from the result"


def read_peft(folder: Path) -> AdapterParameters:
    """Read an adapter folder. Nothing in it is executed, and no path in it is followed.

    Raises:
        ModelFolderError: a file is missing.
        InputError: a file is damaged, or the kind of adapter is not supported.
    """
    config = _config(folder)
    path = folder / WEIGHTS
    with readable(folder):
        if not path.is_file():
            raise _missing(folder)
    tensors = read_safetensors(path)
    names: dict[str, dict[str, str]] = {}
    for name in tensors:
        module, factor = _factor_of(name, path)
        if factor in names.setdefault(module, {}):
            raise InputError(
                f"{path}: {module!r} has two factors {factor}",
                "the file contains several adapters",
                "save each adapter to a separate folder",
            )
        names[module][factor] = name
    check_peft_selection(folder / CONFIG, config, names)
    ranks, alphas = (_Numbers(config, *fields, folder, len(names)) for fields in _FIELDS)
    pairs = {}
    for module, factor_names in names.items():
        a, b = _arrays(tensors, module, factor_names, path)
        rank, alpha = ranks.of(module), alphas.of(module)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[module] = paired(path, module, a, b, scale)
        if len(a) != rank:
            raise InputError(
                f"{path}: {module!r} has rank {len(a)}, but {CONFIG} has rank {rank:g}",
                "the rank determines the scale, so the two ranks must be equal",
                f"in {CONFIG}, set r or rank_pattern to the rank of the factors",
            )
    if not pairs:
        raise InputError(
            f"{path}: the file contains no factors",
            "an adapter has at least one pair of factors",
            "save the adapter again",
        )
    return AdapterParameters(
        folder, pairs, "peft", base=str(config.get("base_model_name_or_path") or ""),
        base_hash=str(config.get(BASE_HASH) or ""), fan_in_fan_out=bool(config.get("fan_in_fan_out")),
    )  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's adapter_config.json."""

    def absent(path: Path) -> ModelFolderError:
        return ModelFolderError(
            f"{path}: there is no {CONFIG}",
            "an adapter is a folder of PEFT or mlx-lm, an .onnx_adapter file, or a GGUF file",
            "pass the path of an adapter",
        )

    return folder_json(folder, CONFIG, InputError, absent)


def _config(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    if config.get("peft_type", "LORA") != "LORA":
        raise InputError(
            f"{folder}: peft_type is {config['peft_type']!r:.40}",
            "only LORA, with two factors per linear layer, is supported",
            _MERGE,
        )
    for name, why in _REFUSED.items():
        if config.get(name):
            raise InputError(f"{folder}: {name} is {config[name]!r:.80}", why, _MERGE)
    if config.get("bias", "none") != "none":
        raise InputError(
            f"{folder}: bias is {config['bias']!r:.40}",
            "biases of the base were trained in addition to the factors",
            _MERGE,
        )
    initialisation = config.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.lower().startswith(_TAKEN_OUT_OF_THE_BASE):
        raise InputError(
            f"{folder}: init_lora_weights is {initialisation!r:.40}",
            "this initialisation changes the base's weights, so the adapter fits only the changed base",
            "save the adapter with PEFT's path_initial_model_for_weight_conversion, or use the changed base and set "
            f"init_lora_weights to true in {CONFIG}",
        )
    for name in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(config.get(name) or False, bool):
            raise InputError(
                f"{folder}: {name} is {config[name]!r:.40}",
                "true or false is expected",
                "set the field to true or false in adapter_config.json",
            )
    return config


def _missing(folder: Path) -> ModelFolderError:
    if (folder / PICKLE).is_file():
        return ModelFolderError(
            f"{folder}: the factors are in {PICKLE}, which is a pickle",
            "loading a pickle can run arbitrary code, so pickles are never loaded",
            "save the adapter with safe_serialization=True",
        )
    return ModelFolderError(
        f"{folder}: there is no {WEIGHTS}",
        "this file contains the factors of the adapter",
        "download the complete adapter",
    )


def _factor_of(name: str, path: Path) -> tuple[str, str]:
    """Return the module and the factor, "A" or "B", of a tensor such as `base_model.model.….q_proj.lora_A.weight`."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            inner = name[len(prefix) :]
            break
    else:
        inner = name
    for factor in "AB":
        before, separator, after = inner.partition(f".lora_{factor}.")
        if separator and after.split(".")[-1] == "weight" and after.count(".") <= 1:
            return before, factor
    reasons = {
        "base_layer": "the embedding or the head was adapted, and its weight was saved with the factors",
        "lora_embedding": "the embedding was adapted, but an embedding is a lookup and not a matmul",
        "lora_magnitude_vector": _REFUSED["use_dora"],
        "modules_to_save": _REFUSED["modules_to_save"],
    }
    why = next((why for part, why in reasons.items() if part in name), "the name contains neither lora_A nor lora_B")
    raise InputError(f"{path}: tensor {name!r:.200} is not a factor of a linear layer", why, _MERGE)


def _arrays(
    tensors: Mapping[str, NDArray[Any]], module: str, names: Mapping[str, str], path: Path
) -> tuple[NDArray[Any], NDArray[Any]]:
    if len(names) != 2:
        raise InputError(
            f"{path}: {module!r} has no factor {'B' if 'A' in names else 'A'}", "A and B come in pairs",
            "save the adapter again",
        )  # fmt: skip
    return tensors[names["A"]], tensors[names["B"]]


# The pattern field, the default field and the minimum value, for each number in the config.
_FIELDS = (("rank_pattern", "r", 1.0), ("alpha_pattern", "lora_alpha", -math.inf))
_MOST_NUMBER = float(np.finfo(np.float32).max)


class _Numbers:
    """A number that the config sets per module.

    It is chosen as in PEFT: the first pattern in the config's order that matches the whole name of the module, or the
    end of the name after a dot, determines the number.

    Args:
        config: the config.
        patterns, default: names of the fields.
        least: minimum value.
        folder: the adapter's folder, for messages.
        modules: number of modules.
    """

    def __init__(
        self, config: Mapping[str, Any], patterns: str, default: str, least: float, folder: Path, modules: int
    ) -> None:
        self._path, self._least = folder / CONFIG, least
        numbers = config.get(patterns) or {}
        if not isinstance(numbers, dict):
            raise InputError(
                f"{folder}: {patterns} is {numbers!r:.80}",
                "an object of patterns and numbers is expected",
                "correct the field in adapter_config.json",
            )
        if len(numbers) * modules > _MOST_TRIALS:
            raise InputError(
                f"{folder}: {patterns} has {len(numbers)} patterns for {modules} modules",
                f"the number of patterns times the number of modules is limited to {_MOST_TRIALS:,}",
                "use fewer patterns, each of which matches several modules",
            )
        self._default = self._number(default, config.get(default, 8))
        self._numbers = [
            (self._pattern(patterns, pattern), self._number(f"{patterns}[{pattern!r:.80}]", value))
            for pattern, value in numbers.items()
        ]

    def of(self, module: str) -> float:
        """Return the number for a module."""
        return next((number for pattern, number in self._numbers if pattern.fullmatch(module)), self._default)

    def _pattern(self, patterns: str, pattern: str) -> Any:
        try:
            if len(pattern) > _MOST_PATTERN:
                raise ValueError(f"the pattern is longer than {_MOST_PATTERN} characters")
            return re2.compile(rf"(.*\.)?({pattern})", _QUIETLY)
        except (re2.error, ValueError) as error:
            said = error.args[0] if error.args else error
            why = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
            raise InputError(
                f"{self._path}: the pattern {pattern!r:.80} in {patterns} is not supported",
                f"{why} (look-around and back-references are not supported, because they could take unlimited time)",
                "replace the pattern with the names of the modules",
            ) from error

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_NUMBER:
            raise InputError(
                f"{self._path}: {name} is {value!r:.40}",
                "a finite number is expected",
                "correct the number in this file",
            )
        if value < self._least:
            raise InputError(
                f"{self._path}: {name} is {value}", "a rank must be at least 1", "correct the rank in this file"
            )
        return float(value)


def write_peft(adapter: AdapterParameters, folder: Path, dtype: Any) -> None:
    """Write an adapter in PEFT's format, with the scales included in factor B.

    Raises:
        InputError: the adapter has arrays that are not factors, or numbers outside the type's range; the folder is not
            empty; or writing fails.
    """
    if adapter.values:
        raise InputError(
            f"{adapter.source}: {next(iter(adapter.values))!r} is not a factor of a linear layer",
            "PEFT folders contain only pairs of factors", "write an .onnx_adapter file instead",
        )  # fmt: skip
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise already_exists(folder)
    names = {module: checkpoint_name(module) for module in adapter.pairs}
    ranks = {names[module]: len(pair.a) for module, pair in adapter.pairs.items()}
    most = max(ranks.values())
    others = {re2.escape(module): rank for module, rank in ranks.items() if rank != most}
    config = {
        "base_model_name_or_path": adapter.base, "bias": "none", "fan_in_fan_out": adapter.fan_in_fan_out,
        "inference_mode": True, "lora_alpha": most, "lora_dropout": 0.0, "peft_type": "LORA", "r": most,
        "rank_pattern": others, "alpha_pattern": others, "target_modules": sorted(ranks), "task_type": "CAUSAL_LM",
        **({BASE_HASH: adapter.base_hash} if adapter.base_hash else {}),
    }  # fmt: skip
    tensors = {}
    for module, pair in adapter.pairs.items():
        for factor, array in zip("AB", scaled(pair), strict=True):
            name = f"{_PREFIXES[0]}{names[module]}.lora_{factor}.weight"
            tensors[name] = narrowed(array, dtype, adapter.source, module)
    try:
        with whole_folder(folder) as unfinished:
            (unfinished / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            # save_file would raise the library's own error if the disk is full.
            (unfinished / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    except OSError as error:
        raise InputError(f"{folder}: the adapter cannot be written", str(error), "choose another folder") from error
