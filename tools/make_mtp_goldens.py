"""Write the goldens of MTP heads in tests/convert/mtp_goldens, with layers of transformers (needs torch).

    python tools/make_mtp_goldens.py [NAME ...]

transformers has no MTP heads. The tool therefore composes a head of its parts: the layer, the rotation and the mask are
those of a decoder with one layer, which reads the projection of the normalised embeddings and vectors.

A golden is a safetensors file. It holds `hidden_states`, the vectors of the decoder for the prompt of the golden with
the same name in tests/convert/goldens, and the `logits` and the `hidden_states_out` of the head. Row i belongs to the
vector of token i and to the embedding of token i + 1. The metadata holds the names and shapes of the head's tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.make_goldens import FOLDER as GOLDENS
from tools.random_weights import random_tensor

NAMES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next")
# The names of the parts of a head that a checkpoint stores as a further layer.
PARTS = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"
}  # fmt: skip
FOLDER = GOLDENS.parent / "mtp_goldens"


def model_of(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    """Return a decoder of transformers with these weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in config.items() if key != "model_type"}
    tied = "lm_head.weight" not in weights  # the configuration of a nested decoder may contradict the files
    made = AutoConfig.for_model(config["model_type"], **sizes | {"tie_word_embeddings": tied})
    made._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    tensors = {name: torch.tensor(array) for name, array in with_joined_experts(weights).items()}
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model


def with_joined_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with all experts of a layer in one, as transformers has them."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in [name for name in tensors if ".mlp.experts." in name and name.endswith(".weight")]:
        layer, _, rest = name.partition(".mlp.experts.")
        found.setdefault(f"{layer}.mlp.experts", {})[rest.removesuffix(".weight")] = tensors[name]
    joined = {
        name: array for name, array in tensors.items() if ".mlp.experts." not in name or not name.endswith(".weight")
    }
    for path, parts in found.items():
        experts = range(1 + max(int(name.partition(".")[0]) for name in parts))
        both = [np.concatenate([parts[f"{one}.{part}_proj"] for part in ("gate", "up")]) for one in experts]
        joined |= {f"{path}.gate_up_proj": np.stack(both)}
        joined |= {f"{path}.down_proj": np.stack([parts[f"{one}.down_proj"] for one in experts])}
    return joined


def make_golden(name: str) -> None:
    """Write one golden."""
    import torch
    import transformers

    with safe_open(GOLDENS / f"{name}.safetensors", "np") as file:
        metadata, tokens = file.metadata(), file.get_tensor("input_ids")
    config, seed = json.loads(metadata["config"]), int(metadata["seed"])
    shapes = {key: tuple(shape) for key, shape in json.loads(metadata["tensors"]).items()}
    config, nested = (config["text_config"], True) if "text_config" in config else (config, False)
    made = {key: random_tensor(key, shape, seed) for key, shape in shapes.items() if "visual" not in key}
    weights = {key.replace("model.language_model.", "model."): value for key, value in made.items()} if nested else made
    hidden = config["hidden_size"]
    one = {**config, "num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    one |= {key: 1 for key in ("decoder_sparse_step",) if key in config}
    one |= {key: 0 for key in ("first_k_dense_replace",) if key in config}
    one |= {key: ["sparse"] for key in ("mlp_layer_types",) if key in config}
    with torch.no_grad():
        vectors = model_of(config, weights).model(torch.tensor(tokens[None])).last_hidden_state
        head = {f"mtp.{key}": shape for key, shape in layer_shapes(one).items()}
        if name != "qwen3_5_moe":  # as most checkpoints
            head = dict(with_experts_apart(head))
        head["mtp.fc.weight"] = (hidden, 2 * hidden)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            head[f"mtp.{norm}.weight"] = (hidden,)
        stored = {key: stored_name(key, config) for key in head}
        own = {key: random_tensor(stored[key], shape, seed) for key, shape in head.items()}
        inside = {f"model.{key.removeprefix('mtp.')}": own[key] for key in head if "fc" not in key}
        outside = {key: weights[key] for key in ("model.embed_tokens.weight", "lm_head.weight") if key in weights}
        model = model_of(one, inside | outside)
        norm = type(model.model.norm)
        parts = []
        for key, value in (
            ("embedding", model.model.embed_tokens(torch.tensor(tokens[None, 1:]))),
            ("hidden", vectors[:, :-1]),
        ):
            module = norm(hidden, eps=config["rms_norm_eps"])
            module.weight.copy_(torch.tensor(own[f"mtp.pre_fc_norm_{key}.weight"]))
            parts.append(module(value))
        projected = torch.cat(parts, -1) @ torch.tensor(own["mtp.fc.weight"]).T
        states = model.model(inputs_embeds=projected).last_hidden_state
        logits = model.lm_head(states)
    FOLDER.mkdir(exist_ok=True)
    found = {"hidden_states": vectors, "hidden_states_out": states, "logits": logits}
    arrays = {key: np.ascontiguousarray(value[0].numpy()) for key, value in found.items()}
    path, tensors = FOLDER / f"{name}.safetensors", {stored[key]: shape for key, shape in head.items()}
    save_file(arrays, path, {"tensors": json.dumps(tensors), "transformers": transformers.__version__})
    print(f"{name}: {len(head)} tensors, logits spread by {arrays['logits'].std():.3g}, {path.stat().st_size} bytes")


def stored_name(name: str, config: dict[str, Any]) -> str:
    """Return the name in a checkpoint of a tensor of the head."""
    if config["model_type"].startswith("qwen"):
        return name
    path = f"model.layers.{config['num_hidden_layers']}."
    for ours, stored in {**PARTS, "layers.0": ""}.items():
        if name.startswith(f"mtp.{ours}."):
            return path + (f"{stored}." if stored else "") + name.removeprefix(f"mtp.{ours}.")
    raise ValueError(name)


def with_experts_apart(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of tensors, with one tensor for each matrix of each expert."""
    for name, shape in shapes.items():
        path, found, part = name.partition(".mlp.experts.")
        if not found:
            yield name, shape
            continue
        count, rows, columns = shape
        for expert in range(count):
            for matrix in ("gate", "up") if part == "gate_up_proj" else ("down",):
                wide = rows // 2 if part == "gate_up_proj" else rows
                yield f"{path}.mlp.experts.{expert}.{matrix}_proj.weight", (wide, columns)


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a decoder with one layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **sizes))
    return {
        key.removeprefix("model."): tuple(value.shape)
        for key, value in model.state_dict().items()
        if key.startswith("model.layers.")
    }


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        make_golden(wanted)
