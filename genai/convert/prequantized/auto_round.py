"""AutoRound: checkpoints in the layout of GPTQ or AWQ, as stated in `packing_format`."""

from __future__ import annotations

from ...errors import UnsupportedModelError
from ..hf_config import HFConfig
from . import awq, gptq
from .matrices import Files, Matrices

_LESS_ONE = ("auto_gptq", "gptq", "tritonv2_zp")
_GPTQ = (*_LESS_ONE, "gptqmodel", "exllamav2", "auto_round", "tritonv2", "triton")


def read(files: Files, settings: HFConfig) -> Matrices:
    """Read a checkpoint according to its `packing_format`. AutoGPTQ's layout stores zero points minus 1."""
    format = settings.text("packing_format", "backend", default="auto_round:auto_gptq")
    kind = format.rpartition(":")[2]
    if "awq" in kind:
        return awq.read(files, settings)
    if kind not in _GPTQ:
        raise UnsupportedModelError(
            f"quantization_config.packing_format is {format!r}",
            "the supported formats are auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq",
            "use a checkpoint of the same model in one of these formats, or the float checkpoint",
        )
    return gptq.matrices(files, settings, 1 if kind in _LESS_ONE else 0)
