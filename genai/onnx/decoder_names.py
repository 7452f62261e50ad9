"""What a decoder graph's inputs and outputs are called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphNames:
    """Names of a decoder's inputs and outputs; "%d" stands for the layer.

    `past` and `present`, where they are given, are tensors of keys and values together, in place of the other four.
    `inputs_embeds`: what decoders take that get their embeddings from a graph of its own.
    """

    input_ids: str
    attention_mask: str
    position_ids: str
    past_key: str
    past_value: str
    logits: str
    present_key: str
    present_value: str
    past: str = ""
    present: str = ""
    inputs_embeds: str = "inputs_embeds"

    @property
    def pasts(self) -> dict[str, str]:
        """Templates of the past tensors, each with that of the present tensor that takes its place."""
        if self.past:
            return {self.past: self.present}
        return {self.past_key: self.present_key, self.past_value: self.present_value}
