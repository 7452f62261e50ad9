"""Models without layers: the logits after a token are a row of a table. Every token can be predicted by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

VOCAB, EOS = 10, 9


def after(changes: Mapping[int, int] = {}) -> np.ndarray:
    """A table in which token i + 1 follows token i, and 0 follows 8, except for the given tokens."""
    table = np.full((VOCAB, VOCAB), -20.0, np.float32)
    for token in range(VOCAB):
        table[token, changes.get(token, (token + 1) % 9)] = 20.0
    return table


def write_graph(path: Path, table: ArrayLike, *, last_row_only: bool = False, switch: int | None = None) -> None:
    """Write a graph. From a total length of `switch` on, token 4 follows every token."""
    rows = np.asarray(table, np.float32)
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "sequence"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["batch", "total"]),
    ]
    constants = {"table": rows, "one": np.array(1), "last": np.array([-1]), "switch": np.array(switch or 0)}
    fours = np.zeros_like(rows)
    fours[:, 4] = 1
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["rows"])]
    if switch is not None:
        constants["fours"] = fours
        nodes += [
            helper.make_node("Shape", ["attention_mask"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "one"], ["total"]),
            helper.make_node("GreaterOrEqual", ["total", "switch"], ["is_late"]),
            helper.make_node("Gather", ["fours", "input_ids"], ["late"]),
            helper.make_node("Where", ["is_late", "late", "rows"], ["chosen"]),
        ]
    name = "rows" if switch is None else "chosen"
    ending = ["Gather", [name, "last"], {"axis": 1}] if last_row_only else ["Identity", [name], {}]
    nodes.append(helper.make_node(ending[0], ending[1], ["logits"], **ending[2]))
    width = 1 if last_row_only else "sequence"
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", width, rows.shape[1]])]
    used = {each for node in nodes for each in node.input}
    initializers = [numpy_helper.from_array(value, key) for key, value in constants.items() if key in used]
    graph = helper.make_graph(nodes, "table", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, path)


def block(filename: str = "model.onnx", **changes: Any) -> dict[str, Any]:
    """A decoder block of genai_config.json."""
    sizes = dict.fromkeys(("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads"), 1)
    names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    shown = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    return {
        "session_options": {"provider_options": []},
        "filename": filename,
        **sizes,
        "num_hidden_layers": 0,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
        "outputs": {"logits": "logits", **shown},
        **changes,
    }


def write_config(
    folder: Path, draft: Mapping[str, Any] | None = None, speculative: Mapping[str, Any] | None = None, **model: Any
) -> Path:
    described = {
        "type": "llama", "vocab_size": VOCAB, "context_length": 64, "bos_token_id": 0, "eos_token_id": [EOS],
        "pad_token_id": 0, "decoder": block(), **model,
    }  # fmt: skip
    if draft is not None:
        described["draft"] = draft
    config: dict[str, Any] = {"model": described, "search": {"max_length": described["context_length"]}}
    if speculative is not None:
        config["speculative"] = speculative
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


def table_model(folder: Path, table: ArrayLike, **config: Any) -> Path:
    """Write a model folder, and return it."""
    folder.mkdir(parents=True)
    write_graph(folder / "model.onnx", table)
    return write_config(folder, **config)


def drafted_model(
    folder: Path, table: ArrayLike, draft_table: ArrayLike, *, draft_switch: int | None = None, **config: Any
) -> Path:
    """Write a model folder with a draft model, and return it."""
    table_model(folder, table, draft=block("draft.onnx"), **config)
    write_graph(folder / "draft.onnx", draft_table, switch=draft_switch)
    return folder
