"""Node for node, name for name: our graph against what onnxruntime-genai's builder makes of the same checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

from genai.convert import DecoderSpec, ExportOptions, LongRope, write_model_folder
from tools.random_weights import RandomWeights

pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.drawn(2)]

LLAMA = DecoderSpec(
    model_type="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_size=16,
    context_length=256,
    pad_token_id=0,
)
LONG = LongRope(
    short_factor=tuple(1.0 + 0.05 * i for i in range(8)),
    long_factor=tuple(1.5 + 0.5 * i for i in range(8)),
    original_max_position_embeddings=4096,
)


@dataclass(frozen=True)
class Case:
    """One checkpoint, what config.json says besides sizes, the real builder's arguments, and our options."""

    architecture: str
    spec: DecoderSpec
    config: dict[str, Any]
    arguments: tuple[str, ...]
    options: ExportOptions


CASES = {
    "llama_int4": Case("LlamaForCausalLM", LLAMA, {}, ("int4",), ExportOptions()),
    "llama_fp32_biases": Case(
        "LlamaForCausalLM",
        replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True),
        {"attention_bias": True, "mlp_bias": True},
        ("fp32",),
        ExportOptions(precision="fp32"),
    ),
    "llama_tied_int8": Case(
        "LlamaForCausalLM",
        replace(LLAMA, tie_word_embeddings=True),
        {},
        ("int8", "disable_qkv_fusion=true"),
        ExportOptions(precision="int8", packed_qkv=False),
    ),
    "llama_tied_fp32": Case(
        "LlamaForCausalLM",
        replace(LLAMA, tie_word_embeddings=True),
        {},
        ("fp32", "prune_lm_head=true"),
        ExportOptions(precision="fp32", prune_lm_head=True),
    ),
    "qwen2_int4": Case(
        "Qwen2ForCausalLM",
        replace(LLAMA, model_type="qwen2", qkv_bias=True),
        {"use_sliding_window": False},
        ("int4", "is_symmetric=false", "block_size=16"),
        ExportOptions(symmetric=False, block_size=16),
    ),
    "qwen3_tied_int4": Case(
        "Qwen3ForCausalLM",
        replace(LLAMA, model_type="qwen3", qk_norm=True, tie_word_embeddings=True),
        {},
        ("int4",),
        ExportOptions(),
    ),
    "mistral_window_int4": Case(
        "MistralForCausalLM",
        replace(LLAMA, model_type="mistral", sliding_window=8),
        {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
        ("int4",),
        ExportOptions(),
    ),
    "gemma2_fp32": Case(
        "Gemma2ForCausalLM",
        replace(
            LLAMA,
            model_type="gemma2",
            hidden_activation="gelu_tanh",
            tie_word_embeddings=True,
            post_norms=True,
            norm_weight_offset=1.0,
            embedding_scale=8.0,
            attention_softcap=20.0,
            logit_softcap=15.0,
            sliding_window=8,
            sliding_layers=(0,),
        ),
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
            "sliding_window": 8,
        },
        ("fp32",),
        ExportOptions(precision="fp32"),
    ),
    "phi3_long_rope_fp32": Case(
        "Phi3ForCausalLM",
        replace(LLAMA, model_type="phi3", context_length=8192, rope_scaling=LONG),
        {
            "original_max_position_embeddings": 4096,
            # The real builder reads "type", transformers reads "rope_type".
            "rope_parameters": {
                "rope_type": "longrope",
                "type": "longrope",
                "rope_theta": 10000.0,
                "factor": 2.0,
                **asdict(LONG),
            },
        },
        ("fp32",),
        ExportOptions(precision="fp32"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_folder(name: str, tmp_path: Path, byte_tokenizer_dir: Path) -> None:
    for module in ("torch", "transformers", "onnx_ir", "onnxruntime_genai"):
        pytest.importorskip(module)
    case = CASES[name]
    weights = dict(RandomWeights(case.spec, seed=4))
    theirs = run_real_builder(tmp_path, case, weights, byte_tokenizer_dir)
    options = replace(case.options, half_scales=False)
    ours = write_model_folder(tmp_path / "ours", case.spec, options, weights)

    assert read_config(ours) == read_config(theirs)
    our_model, their_model = (onnx.load(folder / "model.onnx") for folder in (ours, theirs))
    assert our_model.ir_version == their_model.ir_version
    assert opsets(our_model) == opsets(their_model)
    compare_graphs(our_model.graph, their_model.graph)


def run_real_builder(tmp_path: Path, case: Case, weights: dict[str, Any], tokenizer: Path) -> Path:
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "theirs"
    checkpoint.mkdir()
    save_file(checkpoint_tensors(case, weights), checkpoint / "model.safetensors", {"format": "pt"})
    (checkpoint / "config.json").write_text(json.dumps(hf_config(case)), encoding="utf-8")
    for file in tokenizer.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    precision, *extra = case.arguments
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", output, "-e", "cpu"]
    command += ["-p", precision, "-c", tmp_path / "cache", *(["--extra_options", *extra] if extra else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return output


def hf_config(case: Case) -> dict[str, Any]:
    spec = case.spec
    return {
        "architectures": [case.architecture],
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_size,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0],
        "pad_token_id": spec.pad_token_id,
        **case.config,
    }


def checkpoint_tensors(case: Case, weights: dict[str, Any]) -> dict[str, Any]:
    """The tensors as this architecture's checkpoints hold them: phi3 packs some."""
    if case.spec.model_type != "phi3":
        return weights
    tensors = dict(weights)
    for layer in range(case.spec.num_layers):
        path = f"model.layers.{layer}"
        parts = [tensors.pop(f"{path}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"{path}.self_attn.qkv_proj.weight"] = np.concatenate(parts)
        parts = [tensors.pop(f"{path}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{path}.mlp.gate_up_proj.weight"] = np.concatenate(parts)
    return tensors


def read_config(folder: Path) -> Any:
    return json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))


def opsets(model: onnx.ModelProto) -> set[tuple[str, int]]:
    return {(opset.domain, opset.version) for opset in model.opset_import}


def compare_graphs(ours: onnx.GraphProto, theirs: onnx.GraphProto) -> None:
    assert ours.name == theirs.name
    assert [value(v) for v in ours.input] == [value(v) for v in theirs.input]
    assert [value(v) for v in ours.output] == [value(v) for v in theirs.output]
    # They also list what constants and initialisers are.
    stored = {tensor.name for tensor in theirs.initializer}
    stored |= {name for node in theirs.node if node.op_type == "Constant" for name in node.output}
    assert {value(v) for v in ours.value_info} == {value(v) for v in theirs.value_info if v.name not in stored}

    our_nodes, their_nodes = ({node.name: node for node in graph.node} for graph in (ours, theirs))
    assert our_nodes.keys() == their_nodes.keys()
    for name, node in our_nodes.items():
        compare_nodes(node, their_nodes[name])

    our_tensors, their_tensors = ({t.name: t for t in graph.initializer} for graph in (ours, theirs))
    assert our_tensors.keys() == their_tensors.keys()
    for name, tensor in our_tensors.items():
        compare_tensors(name, numpy_helper.to_array(tensor), numpy_helper.to_array(their_tensors[name]))


def value(info: onnx.ValueInfoProto) -> tuple[Any, ...]:
    tensor = info.type.tensor_type
    return info.name, tensor.elem_type, tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)


def compare_nodes(ours: onnx.NodeProto, theirs: onnx.NodeProto) -> None:
    assert (ours.domain, ours.op_type) == (theirs.domain, theirs.op_type)
    assert (list(ours.input), list(ours.output)) == (list(theirs.input), list(theirs.output))
    mine, other = ({a.name: helper.get_attribute_value(a) for a in node.attribute} for node in (ours, theirs))
    assert mine.keys() == other.keys(), ours.name
    for name, attribute in mine.items():
        if isinstance(attribute, onnx.TensorProto):
            arrays = (numpy_helper.to_array(tensor) for tensor in (attribute, other[name]))
            compare_tensors("cos_cache" if "cache" in ours.name else ours.name, *arrays)
        elif isinstance(attribute, onnx.GraphProto):
            compare_graphs(attribute, other[name])
        else:
            assert attribute == other[name], (ours.name, name)


def compare_tensors(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
    if name in ("cos_cache", "sin_cache"):
        # Libraries differ in the last bit of powers, cosines and sines; the angle multiplies that by the position.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-7 * max(1, len(ours) / 4), err_msg=name)
    else:
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
