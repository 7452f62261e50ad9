"""Folders of onnxruntime-genai's own builder for CPUs: they run batched, and give onnxruntime-genai's logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

import genai
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.tensors import tensor_shapes
from genai.engine.decoder import compute as compute_pending
from tools.random_weights import random_tensor

pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.drawn(2)]

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 15.0,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """One checkpoint and the arguments of the other builder."""

    architecture: str
    model_type: str
    precision: str
    extra: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "fp32": Case("LlamaForCausalLM", "llama", "fp32"),
    "int8": Case("LlamaForCausalLM", "llama", "int8"),
    "int4": Case("LlamaForCausalLM", "llama", "int4"),
    "zero_points": Case("LlamaForCausalLM", "llama", "int4", ("is_symmetric=false",)),
    "block_16": Case("LlamaForCausalLM", "llama", "int4", ("block_size=16",)),
    "qdq": Case("LlamaForCausalLM", "llama", "int4", ("use_qdq=true",)),
    "pruned_head": Case("LlamaForCausalLM", "llama", "int4", ("prune_lm_head=true",)),
    "separate_qkv": Case("LlamaForCausalLM", "llama", "int4", ("disable_qkv_fusion=true",)),
    "gathered": Case("LlamaForCausalLM", "llama", "int4", ("op_types_to_quantize=MatMul/Gather",)),
    "shared": Case("LlamaForCausalLM", "llama", "int4", ("shared_embeddings=true",), TIED),
    "tied_fp32": Case("LlamaForCausalLM", "llama", "fp32", (), TIED),
    "tied_int4": Case("LlamaForCausalLM", "llama", "int4", (), TIED),
    "tied_int8": Case("LlamaForCausalLM", "llama", "int8", (), TIED),
    "llama3": Case("LlamaForCausalLM", "llama", "fp32", (), LLAMA3),
    "qwen2": Case("Qwen2ForCausalLM", "qwen2", "int4", (), {"use_sliding_window": False}),
    "qwen3": Case("Qwen3ForCausalLM", "qwen3", "int4", (), TIED),
    # Without layer_types theirs writes a folder that onnxruntime-genai cannot run.
    "mistral_window": Case(
        "MistralForCausalLM",
        "mistral",
        "fp32",
        (),
        {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
    ),
    "gemma2": Case("Gemma2ForCausalLM", "gemma2", "fp32", (), GEMMA),
    "gemma2_int4": Case("Gemma2ForCausalLM", "gemma2", "int4", (), GEMMA),
}
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 320, 36)]
PROMPT = 20


@pytest.mark.parametrize("name", CASES)
def test_same_logits(name: str, tmp_path: Path, byte_tokenizer_dir: Path, og_logits: Any) -> None:
    for module in ("torch", "transformers", "onnx_ir", "onnxruntime_genai"):
        pytest.importorskip(module)
    folder = run_their_builder(tmp_path, CASES[name], byte_tokenizer_dir)
    exact = set_accuracy_level(folder, 1)
    theirs = og_logits(folder, TOKENS, PROMPT)[-(len(TOKENS) - PROMPT) :]
    with genai.Model(folder, accuracy="fp32") as model:
        assert model.info.flattened, model.info.reason
        sequence, rows = model.decoder.open(), []
        sequence.append(TOKENS[:PROMPT])
        compute_pending(model.decoder, [sequence])
        for token in TOKENS[PROMPT:]:
            sequence.append([token])
            rows.append(compute_pending(model.decoder, [sequence])[0])
    ours = np.concatenate(rows)
    # onnxruntime fuses the QDQ form with activations of 8 bits, whatever the graph says.
    tolerance = 1e-4 if exact or CASES[name].precision == "fp32" else 0.05
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


def run_their_builder(tmp_path: Path, case: Case, tokenizer: Path) -> Path:
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "theirs"
    checkpoint.mkdir()
    config = {"architectures": [case.architecture], "model_type": case.model_type, **SIZES, **case.config}
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = tensor_shapes(find(case.model_type).describe(HFConfig(config)))
    tensors = {name: random_tensor(name, shape, 3) for name, shape in shapes.items()}
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    for file in tokenizer.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", output, "-e", "cpu"]
    command += ["-p", case.precision, "-c", tmp_path / "cache"]
    command += ["--extra_options", *case.extra] if case.extra else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return output


def set_accuracy_level(folder: Path, level: int) -> bool:
    """Let every block-quantised product compute in fp32; False if there is none."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    levels = [a for node in model.graph.node for a in node.attribute if a.name == "accuracy_level"]
    for attribute in levels:
        attribute.i = level
    onnx.save(model, folder / "model.onnx")
    return bool(levels)
