"""A window that only genai_config.json names is applied to the graph's attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import genai as og
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.errors import ConfigError, UnsupportedModelError
from tools.random_weights import RandomWeights

SPEC = DecoderSpec(
    model_type="mistral",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=16,
    context_length=64,
)
TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 64, 30)]
Change = Callable[[onnx.ModelProto, dict[str, Any]], None]


def folder_with(spec: DecoderSpec, path: Path, change: Change | None = None, **options: Any) -> Path:
    folder = write_model_folder(path, spec, ExportOptions(precision="fp32", **options), RandomWeights(spec, seed=1))
    if change is not None:
        model = onnx.load(folder / "model.onnx")
        config = json.loads((folder / "genai_config.json").read_text())
        change(model, config["model"]["decoder"])
        onnx.save(model, folder / "model.onnx")
        (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


def logits(folder: Path) -> np.ndarray:
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=40)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([TOKENS], np.int32))
    found: np.ndarray = generator.get_output("logits")[0]
    return found


def without_windows(decoder: dict[str, Any], **window: Any) -> Change:
    """Move the windows from the graph to genai_config.json."""

    def change(model: onnx.ModelProto, config: dict[str, Any]) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "local_window_size":
                    attribute.i = -1
        config.pop("sliding_window", None)
        config |= {**decoder, **({"sliding_window": window} if window else {})}

    return change


@pytest.mark.parametrize(
    ("layers", "decoder", "window"),
    [
        (None, {}, {}),
        (None, {}, {"layers": [0, 1, 2]}),
        ((0, 2), {}, {"layers": [0, 2]}),
        ((1,), {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, {}),
    ],
    ids=["all layers", "list of all", "list of some", "layer_types"],
)
def test_windows_of_the_configuration(
    layers: Any, decoder: dict[str, Any], window: dict[str, Any], tmp_path: Path, reference_logits: Any
) -> None:
    spec = replace(SPEC, sliding_window=7, sliding_layers=layers)
    folder = folder_with(spec, tmp_path / "a", without_windows(decoder, window_size=7, **window))
    expected = reference_logits(spec, RandomWeights(spec, seed=1), TOKENS)
    full = reference_logits(SPEC, RandomWeights(spec, seed=1), TOKENS)
    found = logits(folder)
    np.testing.assert_allclose(found, expected[-len(found) :], atol=2e-4)
    assert np.abs(full[-1] - expected[-1]).max() > 0.01


@pytest.mark.parametrize("size", [0, -1, 64, 500])
def test_windows_without_effect(size: int, tmp_path: Path, reference_logits: Any) -> None:
    folder = folder_with(SPEC, tmp_path / "a", without_windows({}, window_size=size))
    expected = reference_logits(SPEC, RandomWeights(SPEC, seed=1), TOKENS)
    found = logits(folder)
    np.testing.assert_allclose(found, expected[-len(found) :], atol=2e-4)


def test_windows_of_the_graph_take_precedence(tmp_path: Path, reference_logits: Any) -> None:
    """A window without a list of layers describes a graph whose layers differ."""
    spec = replace(SPEC, sliding_window=7, sliding_layers=(1,))

    def change(model: onnx.ModelProto, config: dict[str, Any]) -> None:
        config["sliding_window"] = {"window_size": 7}

    expected = reference_logits(spec, RandomWeights(spec, seed=1), TOKENS)
    found = logits(folder_with(spec, tmp_path / "a", change))
    np.testing.assert_allclose(found, expected[-len(found) :], atol=2e-4)


@pytest.mark.parametrize("layers", [[3], [-1], ["0"], [True]])
def test_layers_that_the_model_does_not_have(layers: list[Any], tmp_path: Path) -> None:
    folder = folder_with(SPEC, tmp_path / "a", without_windows({}, window_size=7, layers=layers))
    with pytest.raises(ConfigError, match=r"sliding_window.layers contains (?s:.)*0 to 2(?s:.)*correct the list"):
        og.Model(str(folder))


def test_an_operator_without_windows(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto, config: dict[str, Any]) -> None:
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                past = node.input[3:5]
                node.op_type = "MultiHeadAttention"
                del node.input[3:]
                node.input.extend(["", "", "", *past])
        config["sliding_window"] = {"window_size": 7}

    folder = folder_with(SPEC, tmp_path / "a", change)
    with pytest.raises(UnsupportedModelError, match=r"window_size = 7(?s:.)*MultiHeadAttention(?s:.)*has no window"):
        og.Model(str(folder))
