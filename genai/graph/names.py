"""What a decoder graph's inputs and outputs are called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphNames:
    """Names of a decoder's inputs and outputs; "%d" stands for the layer."""

    input_ids: str
    attention_mask: str
    position_ids: str
    past_key: str
    past_value: str
    logits: str
    present_key: str
    present_value: str
