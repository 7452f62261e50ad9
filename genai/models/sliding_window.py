"""Applies model.decoder.sliding_window of genai_config.json to attention operators whose graph has no window.

Some exporters (onnxruntime-genai's builder for some devices) write the window of a model to genai_config.json only, and
`local_window_size = -1` into the graph. A graph that has windows is the authority, unless the configuration lists the
layers.
"""

from __future__ import annotations

import re

from ..errors import UnsupportedModelError
from ..onnx.decoder_names import GraphNames
from ..onnx.ir import Graph
from .config import ModelConfig

_ATTRIBUTE = "local_window_size"
# Attention operators of com.microsoft that have a cache and no attribute for a window, with the input of past keys.
_WITHOUT_WINDOW = {"MultiHeadAttention": 6, "Attention": 4, "DecoderMaskedMultiHeadAttention": 5}
_PAST_KEY = 3


def apply_sliding_window(graph: Graph, config: ModelConfig) -> None:
    """Set the window of each GroupQueryAttention node of a layer that the configuration gives a window.

    Raises:
        UnsupportedModelError: such a layer has another attention operator, which has no window.
    """
    window, names = config.decoder.sliding_window, config.decoder.names
    if window is None or window >= config.context_length:
        return
    with_window = [node for node in graph.nodes if node.key == ("com.microsoft", "GroupQueryAttention")]
    if config.decoder.windowed_layers is None and any(int(node.attribute(_ATTRIBUTE, -1)) > 0 for node in with_window):
        return
    for index, node in enumerate(with_window):
        layer = _layer(node.input(_PAST_KEY), names, index)
        if config.decoder.has_window(layer) and int(node.attribute(_ATTRIBUTE, -1)) <= 0:
            node.set_attribute(_ATTRIBUTE, window)
    others = (node for node in graph.nodes if node.domain == "com.microsoft" and node.op_type in _WITHOUT_WINDOW)
    for index, node in enumerate(others):
        if node.input(_WITHOUT_WINDOW[node.op_type]) and config.decoder.has_window(
            _layer(node.input(_WITHOUT_WINDOW[node.op_type]), names, index)
        ):
            raise no_window(config, f"the operator {node.op_type} ({node.name!r}) has no window")


def no_window(config: ModelConfig, why: str) -> UnsupportedModelError:
    """Return the error for a window that cannot be applied."""
    return UnsupportedModelError(
        f"model.decoder.sliding_window.window_size = {config.decoder.sliding_window} in genai_config.json",
        f"the window cannot be applied, because {why}",
        "export the model with GroupQueryAttention; or remove the key, if the model attends to all tokens",
    )


def _layer(past_key: str, names: GraphNames, index: int) -> int:
    """Return the layer number in the name of a past key; `index` if the name has another form."""
    for template in (names.past_key, names.past):
        if template and (match := re.fullmatch(re.escape(template).replace("%d", r"(\d{1,20})"), past_key)):
            return int(match[1])
    return index
