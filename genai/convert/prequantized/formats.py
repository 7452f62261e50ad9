"""Formats of quantised checkpoints and their readers, by quantization_config.quant_method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, UnsupportedModelError
from ..hf_config import HFConfig
from ..options import Precision
from . import auto_round, awq, bitsandbytes, compressed_tensors, fp8, gptq, hqq, mlx, mxfp4
from .matrices import Reader

# The keys in config.json, and the files that older tools wrote instead, each with its method.
KEYS = ("quantization_config", "quantization")
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True)
class Format:
    """A format of quantised checkpoints.

    title: human-readable name.
    read: finds the format's matrices.
    precision: default storage format.
    """

    title: str
    read: Reader
    precision: Precision = "kept"


FORMATS: Mapping[str, Format] = {
    "awq": Format("AWQ", awq.read),
    "gptq": Format("GPTQ", gptq.read),
    "auto-round": Format("AutoRound", auto_round.read),
    "compressed-tensors": Format("compressed-tensors", compressed_tensors.read),
    "fp8": Format("FP8", fp8.read, "int8"),
    "fbgemm_fp8": Format("FP8 (fbgemm)", fp8.read, "int8"),
    "bitsandbytes": Format("bitsandbytes", bitsandbytes.read),
    "hqq": Format("HQQ", hqq.read),
    "mxfp4": Format("MXFP4", mxfp4.read),
    "mlx": Format("MLX", mlx.read),
}
_OTHER_NAMES = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "compressed_tensors": "compressed-tensors",
}


@dataclass(frozen=True)
class StoredQuantisation:
    """The quantisation of a checkpoint's weights: the format, and its validated settings."""

    method: str
    format: Format
    settings: HFConfig

    @property
    def precision(self) -> Precision:
        """The default storage format; integers if most weights are 8-bit floats."""
        is_float = str(self.settings.get("format")) in ("float-quantized", "naive-quantized")
        return "int8" if is_float else self.format.precision


def quantisation_of(
    values: Mapping[str, Any], old: Mapping[str, Mapping[str, Any]] | None = None
) -> StoredQuantisation | None:
    """Return the quantisation that config.json describes, or None for a float checkpoint.

    Args:
        values: values in config.json.
        old: values of the OLD_FILES that exist.

    Raises:
        UnsupportedModelError: the method or the variant of its format is not supported.
        ConfigError: settings have wrong types.
    """
    key = next((key for key in KEYS if values.get(key)), None)
    settings: Any = values[key] if key else None
    if key is None:
        if not old:
            return None
        name, settings = next(iter(old.items()))
        settings = {"quant_method": OLD_FILES[name], **settings}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"config.json: {key} is {settings!r:.80}", "the value must be a JSON object", "correct config.json"
        )
    # MLX writes its settings under both keys, without a method.
    default = "mlx" if "group_size" in settings and "bits" in settings else None
    method = settings.get("quant_method", default)
    method = _OTHER_NAMES.get(method, method) if isinstance(method, str) else method
    if not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedModelError(
            f"config.json: quant_method is {method!r:.80}",
            f"the supported methods are {', '.join(FORMATS)}",
            "run genai build --precision int4 on the float checkpoint",
        )
    found = StoredQuantisation(method, FORMATS[method], HFConfig(settings, part=key or "the quantisation settings"))
    list(found.format.read({}, found.settings))
    return found
