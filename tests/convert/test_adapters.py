"""Adapters beside bases of several architectures: against PEFT with transformers, and against merged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import genai
from genai.convert import ExportOptions
from genai.convert.build import execute, plan_build
from genai.engine.decoder import compute as compute_pending
from genai.lora.names import module_of
from genai.lora.parameters import input_names, write_onnx_adapter
from genai.lora.read import read_adapter
from tools.random_weights import random_tensor

FOLDER = Path(__file__).parent / "adapter_goldens"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
SEED = 8
TOLERANCE = 1e-4


def write_adapter(folder: Path, config: dict[str, Any], shapes: dict[str, Any], seed: int = SEED) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: random_tensor(name, tuple(shape), seed) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def logits(model: genai.Model, tokens: list[int], mix: Any = None) -> np.ndarray:
    decoder = model.decoder
    sequence = decoder.open()
    sequence.adapt(mix)
    sequence.append(tokens)
    result = compute_pending(decoder, [sequence], all_rows=True)[0].copy()
    sequence.close()
    return result


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert np.abs(actual - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_as_peft_with_transformers(name: str, golden: Any, golden_folder: Any, tmp_path: Path) -> None:
    with safe_open(FOLDER / f"{name}.safetensors", "np") as file:
        metadata, expected = file.metadata(), file.get_tensor("logits")
    folder = write_adapter(tmp_path / "a", json.loads(metadata["config"]), json.loads(metadata["tensors"]))
    tokens = golden(name).tokens
    for device in ("cpu", "reference"):
        with genai.Model(golden_folder(name), accuracy="fp32", device=device) as model:
            before = logits(model, tokens)
            adapters = genai.Adapters(model)
            adapters.load(folder, "a")
            close(logits(model, tokens, adapters.mix("a")), expected)
            assert np.abs(before - expected).max() > 0.1
            np.testing.assert_array_equal(logits(model, tokens), before)


def test_five_architectures() -> None:
    assert set(NAMES) >= {"llama", "qwen2", "phi3", "gemma2", "mixtral"}


BASES = (
    "llama",
    "qwen2",
    "phi3",
    "gemma2",
    "mixtral",
    "gpt2",
    "olmo2",
    "stablelm",
    "qwen3",
    "phi",
    "qwen2_moe",
    "starcoder2",
)


@pytest.mark.parametrize("name", BASES)
def test_as_merged_weights(name: str, golden: Any, golden_folder: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    """Every projection that the checkpoint has, with ranks that are no multiples of anything."""
    if not (Path(__file__).parent / "goldens" / f"{name}.safetensors").exists():
        pytest.skip(f"there is no golden {name}")
    case = golden(name)
    shapes: dict[str, Any] = {}
    transposed = name == "gpt2"
    for key, shape in sorted(case.shapes.items()):
        module = key.removesuffix(".weight")
        if len(shape) == 2 and key.endswith(".weight") and module_of(module) is not None:
            rows, columns = shape[::-1] if transposed else shape
            rank = 5
            shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, columns)
            shapes[f"base_model.model.{module}.lora_B.weight"] = (rows, rank)
    assert shapes
    folder = write_adapter(tmp_path / "a", {"r": 5, "lora_alpha": 2.5, "fan_in_fan_out": transposed}, shapes)
    checkpoint = case.write_checkpoint(tmp_path / "checkpoint", letter_tokenizer)
    plan = plan_build(checkpoint, ExportOptions(precision="fp32"), merge=(read_adapter(folder), 1.0))
    built = execute(plan, tmp_path / "merged")
    with genai.Model(built, accuracy="fp32") as model:
        expected = logits(model, case.tokens)
    with genai.Model(golden_folder(name), accuracy="fp32", lora=True) as model:
        adapters = genai.Adapters(model)
        adapters.load(folder, "a")
        close(logits(model, case.tokens, adapters.mix("a")), expected)
        close(logits(model, case.tokens, adapters.mix({"a": 0.0})), logits(model, case.tokens), 0.0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_of_graphs_merge_like_those_of_checkpoints(
    name: str, golden: Any, letter_tokenizer: Path, tmp_path: Path
) -> None:
    """Names are the graph's, and nothing says how the checkpoint stores its matrices; one of them is square."""
    case = golden(name)
    module = {"llama": "model.layers.1.self_attn.o_proj", "gpt2": "transformer.h.1.attn.c_proj"}[name]
    rows, columns = case.shapes[f"{module}.weight"]
    shapes = {"A": (5, columns), "B": (rows, 5)}
    tensors = {f"base_model.model.{module}.lora_{factor}.weight": shape for factor, shape in shapes.items()}
    read = read_adapter(write_adapter(tmp_path / "a", {"r": 5, "fan_in_fan_out": name == "gpt2"}, tensors))
    write_onnx_adapter(read, tmp_path / "x.onnx_adapter", "float32", names=input_names(read))
    checkpoint, found = case.write_checkpoint(tmp_path / "checkpoint", letter_tokenizer), []
    for adapter in (read, read_adapter(tmp_path / "x.onnx_adapter")):
        plan = plan_build(checkpoint, ExportOptions(precision="fp32"), merge=(adapter, 0.5))
        with genai.Model(execute(plan, tmp_path / f"merged {len(found)}"), accuracy="fp32") as model:
            found.append(logits(model, case.tokens))
    close(found[1], found[0], 1e-6)
    with pytest.raises(genai.InputError, match="is not finite"):
        execute(plan_build(checkpoint, ExportOptions(precision="fp32"), merge=(read, 1e300)), tmp_path / "large")
