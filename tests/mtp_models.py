"""Folders with an MTP head that is a copy of the model's own first layer, so that many proposals are accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from tools.random_weights import RandomWeights

SPEC: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 16,
    "context_length": 1024,
    "eos_token_ids": (2, 0),
}
HIDDEN = SPEC["hidden_size"]
BLOCK: dict[str, Any] = {
    "enabled": True,
    "filename": "mtp.onnx",
    "num_hidden_layers": 1,
    "num_key_value_heads": SPEC["num_key_value_heads"],
    "head_size": SPEC["head_size"],
    "main_hidden_states": "hidden_states",
    "inputs": {
        "input_ids": "input_ids",
        "hidden_states": "hidden_states",
        "attention_mask": "attention_mask",
        "position_ids": "position_ids",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    },
    "outputs": {
        "logits": "logits",
        "hidden_states": "hidden_states_out",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    },
}


def write_with_head(
    folder: Path, tokenizer: Path, changes: dict[str, Any] | None = None, *, precision: str = "fp32", seed: int = 2
) -> Path:
    """Write a model folder with a head.

    Args:
        folder: the folder.
        tokenizer: the folder of the tokenizer.
        changes: changes of SPEC. With several layers, the head is a layer with other random weights.
        precision: storage of the weights.
        seed: seed of the random weights.
    """
    spec = DecoderSpec(**{**SPEC, **(changes or {})})
    options = ExportOptions(precision=precision)
    write_model_folder(folder, spec, options, RandomWeights(spec, seed=seed), tokenizer_dir=tokenizer)
    if spec.num_layers == 1:
        source = onnx.load(folder / "model.onnx", load_external_data=False)
    else:
        single = DecoderSpec(**SPEC)
        write_model_folder(folder / "one", single, options, RandomWeights(single, seed=seed), tokenizer_dir=tokenizer)
        source = onnx.load(folder / "one" / "model.onnx")
        shutil.rmtree(folder / "one")
    onnx.save(with_hidden_input(source, seed), folder / "mtp.onnx")
    main = onnx.load(folder / "model.onnx", load_external_data=False)
    onnx.save(with_hidden_output(main, BLOCK["main_hidden_states"]), folder / "model.onnx")
    edit_block(folder, **BLOCK)
    return folder


def edit_block(folder: Path, **changes: Any) -> None:
    """Change keys of model.mtp in a folder's configuration; None removes a key."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    block = {**config["model"].get("mtp", {}), **changes}
    config["model"]["mtp"] = {key: value for key, value in block.items() if value is not None}
    path.write_text(json.dumps(config))


def with_hidden_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model with the input of its output layer as another output."""
    graph = model.graph
    (head,) = (node for node in graph.node if "logits" in node.output)
    graph.node.append(helper.make_node("Identity", [head.input[0]], [name]))
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch_size", "sequence", HIDDEN]))
    return model


def with_hidden_input(model: onnx.ModelProto, seed: int, width: int = HIDDEN) -> onnx.ModelProto:
    """Return the model as a head: hidden states change the embeddings by a small amount."""
    graph = model.graph
    matrix = np.random.default_rng(seed).normal(0, 1e-4, (width, HIDDEN)).astype(np.float32)
    graph.initializer.append(numpy_helper.from_array(matrix, "fc"))
    index, embedding = next((i, node) for i, node in enumerate(graph.node) if "input_ids" in node.input)
    (embedded,) = embedding.output
    embedding.output[0] = f"{embedded}/alone"
    nodes = [
        helper.make_node("MatMul", ["hidden_states", "fc"], ["projected"]),
        helper.make_node("Add", [f"{embedded}/alone", "projected"], [embedded]),
    ]
    for offset, node in enumerate(nodes, 1):
        graph.node.insert(index + offset, node)
    shape = ["batch_size", "sequence_length", width]
    graph.input.append(helper.make_tensor_value_info("hidden_states", TensorProto.FLOAT, shape))
    return with_hidden_output(model, BLOCK["outputs"]["hidden_states"])
