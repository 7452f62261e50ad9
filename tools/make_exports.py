"""Write the goldens of tests/decoder/exports: tiny decoders exported by torch.onnx, Optimum and onnxruntime-genai.

    python tools/make_exports.py [NAME ...]

The tool needs torch and transformers, optimum-onnx for the cases of Optimum, and onnxruntime-genai for the cases of its
builder. The graphs of torch.onnx and Optimum use only plain operators. Past keys and values are inputs, and present
keys and values are outputs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from safetensors.numpy import save_file

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "decoder" / "exports"
VOCAB, LAYERS, PROMPT = 40, 2, 24
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Sizes that GPT-2 names differently.
OTHER_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
# name -> (model_type, attention implementation, changes). Cases with "dynamo" in the name use torch's newer exporter,
# cases with "optimum" use Optimum, cases with "builder" use onnxruntime-genai's builder for CPUs, and the others use
# torch's older exporter.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_eager": ("llama", "eager", {}),
    "qwen2_sdpa": ("qwen2", "sdpa", {"head_dim": 4}),
    "mistral_window": ("mistral", "eager", {"sliding_window": 7}),
    "gpt_neox_sdpa": ("gpt_neox", "sdpa", {"num_key_value_heads": 6, "head_dim": None, "rotary_pct": 0.5}),
    "llama_dynamo": ("llama", "eager", {}),
    "qwen2_sdpa_dynamo": ("qwen2", "sdpa", {"head_dim": 4}),
    "gemma2_softcap": ("gemma2", "eager", {"sliding_window": 7, "query_pre_attn_scalar": 6}),
    "qwen3_optimum": ("qwen3", "sdpa", {}),
    # Optimum exports sdpa, which ignores the softcap.
    "llama_builder_fp16": ("llama", "eager", {}),
    "qwen3_builder_bf16": ("qwen3", "eager", {}),
    "phi_builder_fp16": ("phi", "eager", {"num_key_value_heads": 6, "head_dim": 4, "partial_rotary_factor": 0.5}),
    "gemma2_optimum": ("gemma2", "sdpa", {"sliding_window": 7, "query_pre_attn_scalar": 6}),
    "gemma3_optimum": (
        "gemma3_text",
        "sdpa",
        {"sliding_window": 7, "query_pre_attn_scalar": 6, "sliding_window_pattern": 2},
    ),
    "qwen3_opset23_dynamo": ("qwen3", "sdpa", {}),
    "cohere_optimum": ("cohere", "sdpa", {"head_dim": 4}),
    "gpt2_optimum": ("gpt2", "sdpa", {"n_embd": 24, "n_layer": LAYERS, "n_head": 6, "n_positions": 64, "n_inner": 20}),
    "gpt_neo_optimum": (
        "gpt_neo",
        "eager",
        {
            "num_key_value_heads": 6,
            "head_dim": None,
            "num_layers": LAYERS,
            "num_heads": 6,
            "window_size": 7,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "stablelm_optimum": ("stablelm", "sdpa", {"partial_rotary_factor": 0.5, "head_dim": 4}),
}


def make_export(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, attention, changes = CASES[name]
    torch.manual_seed(0)
    small = {name: value for name, value in SMALL.items() if model_type != "gpt2" or name not in OTHER_NAMES}
    config = AutoConfig.for_model(model_type, **{**small, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    by_builder = "builder" in name
    exporter = _export_by_builder if by_builder else _export_by_optimum if "optimum" in name else _export_by_torch
    exporter(name, model, folder)
    shorten(folder / "model.onnx")
    prompt = np.random.default_rng(0).integers(3, VOCAB, PROMPT)
    with torch.no_grad():
        logits = model(torch.tensor(prompt[None])).logits[0].numpy()
    if by_builder:  # its weights are rounded to 16 bits
        logits = logits_of_float32(folder / "model.onnx", prompt, config)
    save_file({"input_ids": prompt, "logits": np.ascontiguousarray(logits)}, folder / "golden.safetensors")
    (folder / "genai_config.json").write_text(json.dumps(genai_config(config), indent=1) + "\n")


def _export_by_optimum(name: str, model: Any, folder: Path) -> None:
    from optimum.exporters.onnx import main_export

    with TemporaryDirectory() as source, TemporaryDirectory() as target:
        model.save_pretrained(source)
        task = "text-generation-with-past"
        main_export(source, target, task=task, do_validation=False, no_post_process=False)
        shutil.copy(Path(target) / "model.onnx", folder)


def _export_by_builder(name: str, model: Any, folder: Path) -> None:
    from tokenizers import Tokenizer, models

    with TemporaryDirectory() as source, TemporaryDirectory() as target, TemporaryDirectory() as cache:
        model.save_pretrained(source)
        letters = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *map(chr, range(65, 65 + VOCAB - 3))])}
        Tokenizer(models.BPE(letters, [])).save(f"{source}/tokenizer.json")
        Path(source, "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target, "-c", cache]
        command += ["-e", "cpu", "-p", name.rpartition("_")[2]]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"})
        onnx.save(onnx.load(Path(target) / "model.onnx"), folder / "model.onnx")


def logits_of_float32(path: Path, prompt: np.ndarray, config: Any) -> np.ndarray:
    """Return onnxruntime's logits of a graph in 16 bits, after all its values were widened to float32."""
    import onnxruntime

    model, narrow = onnx.load(path), (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type in narrow:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    held = [attribute for node in model.graph.node for attribute in node.attribute]
    for tensor in (*model.graph.initializer, *(attribute.t for attribute in held if attribute.HasField("t"))):
        if tensor.data_type in narrow:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
            )
    for attribute in held:
        if attribute.name == "to" and attribute.i in narrow:
            attribute.i = onnx.TensorProto.FLOAT
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {"input_ids": prompt[None], "attention_mask": np.ones((1, PROMPT), np.int64)}
    feeds["position_ids"] = np.arange(PROMPT)[None]
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.zeros((1, config.num_key_value_heads, 0, head_size(config)), np.float32)
    feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
    return np.asarray(session.run(["logits"], feeds)[0])[0]


def _export_by_torch(name: str, model: Any, folder: Path) -> None:
    import torch

    config, size = model.config, head_size(model.config)
    kinds = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
    past_names = [f"past_key_values.{kind}" for kind in kinds]
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    past = [torch.randn(2, kv_heads, 4, size) for _ in kinds]
    ids, mask = torch.randint(3, VOCAB, (2, 5)), torch.ones(2, 9, dtype=torch.long)
    positions = torch.arange(4, 9)[None].expand(2, -1).contiguous()
    tokens = {"input_ids": {0: "b", 1: "s"}, "attention_mask": {0: "b", 1: "t"}, "position_ids": {0: "b", 1: "s"}}
    torch.onnx.export(
        wrapped(model),
        (ids, mask, positions, *past),
        str(folder / "model.onnx"),
        input_names=[*tokens, *past_names],
        output_names=["logits", *(f"present.{kind}" for kind in kinds)],
        **_exporter(name, tokens, past_names),
    )


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _exporter(name: str, tokens: dict[str, Any], past_names: list[str]) -> dict[str, Any]:
    import torch

    if "dynamo" not in name:
        axes = {**tokens, **{past: {0: "b", 2: "p"} for past in past_names}}
        return {"dynamic_axes": axes, "opset_version": 17, "dynamo": False}
    free = torch.export.Dim.DYNAMIC
    given = [dict.fromkeys((0, 1), free) for _ in tokens]
    shapes = (*given, tuple({0: free, 2: free} for _ in past_names))
    # From opset 23 on, attention, rotations and norms are operators.
    return {
        "dynamic_shapes": shapes,
        "opset_version": 23 if "opset23" in name else 18,
        "dynamo": True,
        "external_data": False,
    }


def wrapped(model: Any) -> Any:
    """Return the model with a separate argument for each past tensor, as a graph has a separate input."""
    import torch
    from transformers import DynamicCache

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
            cache = DynamicCache()
            for layer in range(LAYERS):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": cache}
            result = self.model(input_ids, **given)
            present = [tensor for layer in result.past_key_values.layers for tensor in (layer.keys, layer.values)]
            return (result.logits, *present)

    return Wrapped()


def shorten(path: Path) -> None:
    """Shorten or remove the names of nodes and inner values, because names are most of a tiny export's bytes."""
    model = onnx.load(path)
    kept = {value.name for value in [*model.graph.input, *model.graph.output]}
    made = dict.fromkeys(name for node in model.graph.node for name in node.output if name and name not in kept)
    names = {name: f"v{i}" for i, name in enumerate(made)}
    for node in model.graph.node:
        node.name, node.doc_string = "", ""
        del node.metadata_props[:]
        for fields in (node.input, node.output):
            fields[:] = [names.get(name, name) for name in fields]
    del model.graph.value_info[:]
    for holder in (model, model.graph, *model.graph.initializer, *model.graph.input, *model.graph.output):
        del holder.metadata_props[:]
    onnx.save(model, path)


def genai_config(config: Any) -> dict[str, Any]:
    decoder = {
        "filename": "model.onnx",
        "head_size": head_size(config),
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "num_hidden_layers": LAYERS,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "position_ids": "position_ids",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {"type": config.model_type, "vocab_size": VOCAB, "context_length": 64, "decoder": decoder}
    return {"model": {**model, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}, "search": {}}


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make_export(case)
