"""EXAONE 4: norms behind each part; where some layers have a window, the others do not rotate."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import decoder, window_fields


def describe(config: HFConfig) -> DecoderSpec:
    windows = window_fields(config, pattern=4, window=4096)
    return decoder(
        config,
        epsilon=1e-5,
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        rope_layers=windows.get("sliding_layers"),
        **windows,
    )


ARCHITECTURE = Architecture("exaone4", "EXAONE 4", describe)
