"""Names of layers and projections in checkpoints, adapters and graphs, and the single name that all variants map to."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

_LAYERS = {"layers", "layer", "h", "blocks", "block"}
_ATTENTION = re.compile("attn|attention|attentions")
# Parts of names that do not contain projections with LoRA targets.
EXPERTS = re.compile("experts?$|moe$|block_sparse_moe$")
# Part of the name of a value whose columns were put into the order of the matrix that reads it.
REORDERED = "/order_"
_SHARED = re.compile("shared_experts?$")
# Parts of names that precede the layers of models other than the decoder.
_ELSEWHERE = re.compile("vision|visual|image|audio|speech|encoder$")
_MOST_DIGITS = 6

# The known names of each projection: anywhere, in attention layers, and in feed-forward layers.
_ANYWHERE = {
    "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj", "qkv_proj": "qkv_proj",
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "Wqkv": "qkv_proj", "c_attn": "qkv_proj",
    "W_pack": "qkv_proj", "gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj",
    "gate_up_proj": "gate_up_proj", "fc1": "up_proj", "fc2": "down_proj", "c_fc": "up_proj", "fc_in": "up_proj",
    "fc_out": "down_proj",
    "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj",
}  # fmt: skip
_IN_ATTENTION = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "query": "q_proj", "key": "k_proj", "value": "v_proj",
    "dense": "o_proj", "out_proj": "o_proj", "c_proj": "o_proj", "wqkv": "qkv_proj",
}  # fmt: skip
_IN_FEED_FORWARD = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "c_proj": "down_proj"}
# Fused projections, each with its parts in the order of the columns.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Module(NamedTuple):
    """A projection of a layer, such as (3, "q_proj"); in a shared expert, the name is like "shared_expert.up_proj"."""

    layer: int
    projection: str

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.projection}"


def module_of(name: str) -> Module | None:
    """Return the projection named by a name with dots or slashes; None if adapters cannot change it."""
    parts = re.split(r"[./]", name)
    indices = [i for i, part in enumerate(parts[:-2]) if part in _LAYERS and _is_number(parts[i + 1])]
    if not indices or any(_ELSEWHERE.search(part) for part in parts[: indices[0]]):
        return None
    inside = parts[indices[0] + 2 :]
    is_shared = any(_SHARED.match(part) for part in inside)
    if any(EXPERTS.search(part) and not _SHARED.match(part) for part in inside) and not is_shared:
        return None
    if any(part.startswith("lora_") for part in inside):
        return None
    in_attention = any(_ATTENTION.search(part) for part in inside)
    known = {**_ANYWHERE, **(_IN_ATTENTION if in_attention else _IN_FEED_FORWARD)}
    projection = next((known[part] for part in inside if part in known), None)
    if projection is None:
        return None
    return Module(int(parts[indices[0] + 1]), f"shared_expert.{projection}" if is_shared else projection)


def likely_module_name(name: str) -> str:
    """Return the likely projection at the end of a name, whether known or not; the name itself if it has no layer.

    >>> likely_module_name("base_model.model.model.layers.3.self_attn.q_prj")
    'layers.3.q_prj'
    """
    parts = re.split(r"[./]", name)
    layers = [number for layer, number in pairwise(parts) if layer in _LAYERS and _is_number(number)]
    return f"layers.{int(layers[0])}.{parts[-1]}" if layers else name


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
