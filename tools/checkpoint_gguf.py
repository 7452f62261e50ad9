"""Write a Llama or gpt-oss checkpoint as a GGUF file, as llama.cpp's convert_hf_to_gguf.py does, for tests.

python -m tools.checkpoint_gguf CHECKPOINT OUTPUT.gguf [TYPE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tools.gguf_models import add_value, close

_PRE_TOKENIZER = "qwen2"
"""llama.cpp's name for the pre-tokenizer of the bundled checkpoint."""
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(checkpoint: Path, path: Path, kind: str = "Q8_0") -> Path:
    """Write the file; `kind` is a type that the `gguf` package can quantise matrices to."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in {**_shape(config), **_vocabulary(checkpoint, config)}.items():
        add_value(writer, key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in load_file(checkpoint / "model.safetensors").items():
        part = name.split(".")[-2]
        weights = _interleaved(values, heads[part]) if part in heads else values
        _add(writer, _name(name), weights.astype(np.float32), kind)
    close(writer)
    return path


def _add(writer: Any, name: str, values: NDArray[np.float32], kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)


def _interleaved(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder rows for RoPE: the two rows of a pair are adjacent in GGUF, but half a head apart in the checkpoint."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def _name(name: str) -> str:
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    values = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["head_dim"], "rope.freq_base": config["rope_theta"],
    }  # fmt: skip
    return {f"llama.{key}": value for key, value in values.items()}


def _vocabulary(checkpoint: Path, config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    ids = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids |= special
    named = {id_: token for token, id_ in ids.items()}
    size = config["vocab_size"]
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _PRE_TOKENIZER,
        "tokenizer.ggml.tokens": [named.get(id_, f"[PAD{id_}]") for id_ in range(size)],
        "tokenizer.ggml.token_type": [_token_type(id_, named, special) for id_ in range(size)],
        "tokenizer.ggml.merges": pairs, "tokenizer.ggml.eos_token_id": config["eos_token_id"][0],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.chat_template": (checkpoint / "chat_template.jinja").read_text(encoding="utf-8"),
    }  # fmt: skip


def _token_type(id_: int, named: dict[int, str], special: dict[str, int]) -> int:
    """Return the GGUF token type: 3 = control, 1 = normal, 5 = unused."""
    return 3 if id_ in special.values() else 1 if id_ in named else 5


_GPT_OSS_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip
_OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight"}  # fmt: skip


def write_gpt_oss_gguf(checkpoint: Path, path: Path, vocabulary: dict[str, Any], kind: str = "F32") -> Path:
    """Write a gpt-oss checkpoint, whose experts are floats or MXFP4. MXFP4 experts stay exact.

    Args:
        vocabulary: the values of the keys tokenizer.*.
        kind: type of float experts.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    shape = {key.removeprefix("llama."): value for key, value in _shape(config).items()}
    shape |= {
        "attention.sliding_window": config["sliding_window"], "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"], "expert_feed_forward_length": config["intermediate_size"],
    }  # fmt: skip
    if scaling := config.get("rope_scaling"):
        shape |= {
            "rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }  # fmt: skip
    for key, value in {**{f"gpt-oss.{key}": value for key, value in shape.items()}, **vocabulary}.items():
        add_value(writer, key, value)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, values in tensors.items():
        base, _, part = name.rpartition("experts.")
        if not base:
            writer.add_tensor(_gpt_oss_name(name), values.astype(np.float32))
        elif not part.endswith("_scales"):
            _add_gpt_oss_experts(writer, f"blk.{name.split('.')[2]}", part, values, tensors, name, kind)
    close(writer)
    return path


def _gpt_oss_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    base, ending = (rest, "") if rest.endswith("sinks") else rest.rsplit(".", 1)
    return f"blk.{layer}.{_GPT_OSS_NAMES[base]}{'.' if ending else ''}{ending}"


def _add_gpt_oss_experts(
    writer: Any, layer: str, part: str, values: NDArray[Any], tensors: dict[str, NDArray[Any]], name: str, kind: str
) -> None:
    """Add the experts' matrices or biases; the rows of gate and up alternate in the checkpoint."""
    is_bias, is_mxfp4 = part.endswith("_bias"), part.endswith("_blocks")
    if is_mxfp4:
        values = _mxfp4_blocks(values, tensors[name.removesuffix("_blocks") + "_scales"])
    elif not is_bias:
        values = values.swapaxes(1, 2)
    split = {"gate": values[:, 0::2], "up": values[:, 1::2]} if part.startswith("gate_up") else {"down": values}
    for which, rows in split.items():
        target, rows = f"{layer}.ffn_{which}_exps.{'bias' if is_bias else 'weight'}", np.ascontiguousarray(rows)
        if is_mxfp4:
            writer.add_tensor(target, rows, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif is_bias or kind == "F32":
            writer.add_tensor(target, rows.astype(np.float32))
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(target, gguf.quantize(rows.astype(np.float32), number), raw_dtype=number)


def _mxfp4_blocks(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ggml's blocks [experts, rows, bytes]: the exponent, then elements i and i + 16 in the byte i."""
    elements = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = elements[..., :16] | elements[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(*blocks.shape[:2], -1)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
