"""Which format a checkpoint is in, and who reads it: one table, by quantization_config.quant_method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, UnsupportedModelError, did_you_mean
from ..hf_config import HFConfig
from ..options import Precision
from . import auto_round, awq, bitsandbytes, compressed_tensors, fp8, gptq, hqq, mlx, mxfp4
from .matrices import Reader

# What config.json calls them, and the files that older tools wrote instead, with the method that these are of.
KEYS = ("quantization_config", "quantization")
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True)
class Format:
    """A format of quantised checkpoints.

    Attributes:
        title: for people. read: finds its matrices.
        precision: how they are stored unless another way is asked for.
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
    """How the weights of a checkpoint are quantised: the format, and its settings, already checked."""

    method: str
    format: Format
    settings: HFConfig

    @property
    def precision(self) -> Precision:
        """How weights are stored unless another way is asked for; where floats of 8 bits are most, as integers."""
        is_float = str(self.settings.get("format")) in ("float-quantized", "naive-quantized")
        return "int8" if is_float else self.format.precision


def quantisation_of(
    values: Mapping[str, Any], old: Mapping[str, Mapping[str, Any]] | None = None
) -> StoredQuantisation | None:
    """The quantisation that config.json names; None for a float checkpoint.

    Args:
        values: of config.json.
        old: the values of those of OLD_FILES that there are.

    Raises:
        UnsupportedModelError: a method, or a format of one, that is not known here. ConfigError: settings of wrong
            types.
    """
    key = next((key for key in KEYS if values.get(key)), None)
    settings: Any = values[key] if key else None
    if key is None:
        if not old:
            return None
        name, settings = next(iter(old.items()))
        settings = {"quant_method": OLD_FILES[name], **settings}
    if not isinstance(settings, dict):
        raise ConfigError(f"config.json: {key} is {settings!r:.80}", "expected an object", "correct the file")
    # MLX writes its settings under both names, without a method.
    default = "mlx" if "group_size" in settings and "bits" in settings else None
    method = settings.get("quant_method", default)
    method = _OTHER_NAMES.get(method, method) if isinstance(method, str) else method
    if not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedModelError(
            f"config.json: the quant_method is {method!r:.80}",
            f"quantised checkpoints are read in these formats: {', '.join(FORMATS)}",
            did_you_mean(str(method), FORMATS, "get the float checkpoint, and run genai build --precision int4 on it"),
        )
    found = StoredQuantisation(method, FORMATS[method], HFConfig(settings, part=key or "the quantisation"))
    list(found.format.read({}, found.settings))
    return found
