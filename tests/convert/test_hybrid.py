"""Checkpoints of hybrid decoders in the forms in which they are published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from genai.convert import ExportOptions, build_model, plan_build
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.errors import InputError, UnsupportedModelError
from genai.models.config import Config
from genai.models.decoder_graph import read_decoder, read_decoder_file
from genai.onnx.types import TensorType

FLOATS = ExportOptions(precision="fp32")


def joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with all experts of a layer in one."""
    found, kept = dict[str, dict[str, list[np.ndarray]]](), dict[str, np.ndarray]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            kept[name] = tensor
            continue
        parts = found.setdefault(match[1], {"gate": [], "up": [], "down": []})[match[3]]
        parts.insert(int(match[2]), tensor)
    for prefix, parts in found.items():
        both = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        kept |= {f"{prefix}.gate_up_proj": np.stack(both), f"{prefix}.down_proj": np.stack(parts["down"])}
    return kept


def test_joined_experts_and_draft_heads(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    checkpoint = golden("qwen3_5_moe").write_checkpoint(tmp_path / "checkpoint", letter_tokenizer)
    (file,) = checkpoint.glob("*.safetensors")
    apart = build_model(checkpoint, tmp_path / "apart", FLOATS)
    tensors = joined(load_file(file))
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file({**tensors, "mtp.fc.weight": np.ones((3, 3), np.float32)}, file)
    together = build_model(checkpoint, tmp_path / "together", FLOATS)
    for name in ("model.onnx", "model.onnx.data"):
        assert (together / name).read_bytes() == (apart / name).read_bytes()
    save_file({**tensors, "extra.fc.weight": np.ones((3, 3), np.float32)}, file)
    with pytest.raises(InputError, match="1 tensors that its configuration does not use"):
        build_model(checkpoint, tmp_path / "extra", FLOATS)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"layer_types": ["linear_attention", "mamba"] * 4}, UnsupportedModelError, "layer_types .* 'mamba'"),
        ({"linear_num_value_heads": 5}, InputError, "5 value heads and 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, InputError, "kernels of 1"),
        ({"linear_conv_kernel_dim": 1000}, InputError, "kernels of 1000"),
        ({"linear_value_head_dim": 1 << 30}, InputError, "a state can have at most"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(
    golden: Any, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    config = {**golden("qwen3_5_text").config, **changes}
    if "layer_types" in changes:
        config["num_hidden_layers"] = 8
    with pytest.raises(error, match=match):
        find("qwen3_5_text").describe(HFConfig(config))


@pytest.mark.parametrize(("name", "state"), [("lfm2", "past.0.conv"), ("qwen3_5_text", "past.0.recurrent")])
def test_states_that_contradict_their_operators(golden_folder: Any, name: str, state: str) -> None:
    config = Config(golden_folder(name))
    model = read_decoder_file(config)
    (value,) = (one for one in model.graph.inputs if one.name == state)
    assert isinstance(value.type, TensorType) and value.type.shape is not None
    value.type = TensorType(value.type.dtype, (*value.type.shape[:-1], 7))
    with pytest.raises(UnsupportedModelError) as caught:
        read_decoder(config, model=model)
    assert f"the state {state!r} has" in caught.value.why and "computes states of" in caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("gemma3n_text", "embed_tokens_per_layer"), ("gemma4", "embed_tokens_per_layer"), ("lfm2", "conv.conv")],
)
def test_tensors_that_are_missing(golden: Any, letter_tokenizer: Path, tmp_path: Path, name: str, tensor: str) -> None:
    checkpoint = golden(name).write_checkpoint(tmp_path / "checkpoint", letter_tokenizer)
    (file,) = checkpoint.glob("*.safetensors")
    save_file({key: value for key, value in load_file(file).items() if tensor not in key}, file)
    with pytest.raises(InputError, match=rf"the checkpoint lacks \d+ tensors .*{tensor}"):
        plan_build(checkpoint)
