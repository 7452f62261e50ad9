"""AutoRound: its checkpoints have the layout of GPTQ or of AWQ, and say which."""

from __future__ import annotations

from ...errors import UnsupportedModelError
from ..hf_config import HFConfig
from . import awq, gptq
from .matrices import Files, Matrices


def read(files: Files, settings: HFConfig) -> Matrices:
    """As `packing_format` says; what lies behind its colon, or the kernel of AutoRound's that reads GPTQ's layout."""
    form = settings.text("packing_format", "backend", default="auto_round:auto_gptq")
    kind = form.rpartition(":")[2]
    if "awq" in kind:
        return awq.read(files, settings)
    if kind in ("auto_gptq", "gptq", "gptqmodel", "exllamav2", "auto_round", "tritonv2", "tritonv2_zp", "triton"):
        return gptq.read(files, settings)
    raise UnsupportedModelError(
        f"quantization_config.packing_format is {form!r}",
        "of AutoRound's layouts auto_round:auto_gptq and auto_round:auto_awq are read",
        "look for the checkpoint of the same model in one of these, or build from the float one",
    )
