"""Names of a decoder graph's inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphNames:
    """Names of a decoder's inputs and outputs; "%d" stands for the layer number.

    Attributes:
        past, present: names of tensors that contain both keys and values; if given, they replace the four separate
            names (past_key, past_value, present_key, present_value).
        past_conv, present_conv: names of the states of convolutions (see `kernels.ir.CausalConv`).
        past_recurrent, present_recurrent: names of the states of linear attention.
        inputs_embeds: input of decoders whose embeddings are computed by a separate graph.
        hidden_states: input of MTP heads with a row of the model's hidden states per token; "" = there is none.
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
    past_conv: str = "past.%d.conv"
    past_recurrent: str = "past.%d.recurrent"
    present_conv: str = "present.%d.conv"
    present_recurrent: str = "present.%d.recurrent"
    hidden_states: str = ""

    @property
    def pasts(self) -> dict[str, str]:
        """Templates of the past keys' and values' names, mapped to those of the tensors that replace them."""
        if self.past:
            return {self.past: self.present}
        return {self.past_key: self.present_key, self.past_value: self.present_value}

    @property
    def caches(self) -> dict[str, str]:
        """The same for keys, values and states."""
        states = {self.past_conv: self.present_conv, self.past_recurrent: self.present_recurrent}
        return {**self.pasts, **states}
