"""Names of a decoder graph's inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphNames:
    """Names of a decoder's inputs and outputs; "%d" stands for the layer number.

    Attributes:
        past, present: names of tensors that contain both keys and values; if given, they replace the four separate
            names (past_key, past_value, present_key, present_value).
        inputs_embeds: input of decoders whose embeddings are computed by a separate graph.
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
        """Templates of the past tensors' names, mapped to those of the present tensors that replace them."""
        if self.past:
            return {self.past: self.present}
        return {self.past_key: self.present_key, self.past_value: self.present_value}
