"""Write a checkpoint as a GGUF file with every matrix in Q4_0 or another type (needs the gguf package).

usage: write_gguf.py CHECKPOINT FILE [TYPE]

Llama, Qwen 2, and Qwen 3 with experts are supported. The vocabulary is a dummy with the right size, because
measurements use only token ids.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.)experts\.(\d+)\.(\w+)\.weight")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def main() -> None:
    """Write the file."""
    checkpoint, output = Path(sys.argv[1]), sys.argv[2]
    matrices = gguf.GGMLQuantizationType[sys.argv[3] if len(sys.argv) > 3 else "Q4_0"]
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(output, ARCHITECTURES[config["model_type"]])
    add_sizes(writer, config)
    add_vocabulary(writer, config["vocab_size"])
    for name, values in stacked(tensors(checkpoint / "model.safetensors"), config.get("num_experts", 0)):
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = interleaved(values, heads)
        wide = values.ndim == 1 or name.endswith("mlp.gate.weight")  # norms and routers
        kind = gguf.GGMLQuantizationType.F32 if wide else matrices
        writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    if matrices != gguf.GGMLQuantizationType.F32:
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{matrices.name}"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: Any, config: dict[str, Any]) -> None:
    """Add the decoder's sizes."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_size)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_vocab_size(config["vocab_size"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_vocabulary(writer: Any, size: int) -> None:
    """Add a vocabulary of the 256 bytes in byte-level BPE notation, followed by dummy tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + number) for number in range(256))
    letters = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    kinds = [gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(letters + [f"token {number}" for number in range(256, size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names and float32 values of the tensors in a bfloat16 or float16 file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "F16":
            yield name, data[begin:end].view(np.float16).astype(np.float32).reshape(entry["shape"])
            continue
        bits = data[begin:end].view(np.uint16).astype(np.uint32) << 16
        yield name, bits.view(np.float32).reshape(entry["shape"])


def stacked(found: Iterator[tuple[str, Any]], experts: int) -> Iterator[tuple[str, Any]]:
    """Yield the given tensors, but each layer's experts as one array [experts, rows, columns]."""
    parts: dict[str, list[Any]] = {}
    for name, values in found:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, values
            continue
        whole = f"{match[1]}experts.{match[3]}.weight"
        parts.setdefault(whole, []).append(values)
        if len(parts[whole]) == experts:
            yield whole, np.stack(parts.pop(whole))


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor: blk.3.attn_q.weight for model.layers.3.self_attn.q_proj.weight."""
    stem, _, part = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{part}"
    _, _, layer, place = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[place]}.{part}"


def interleaved(rows: Any, heads: int) -> Any:
    """Return the rows of a query or key projection in ggml's order for Llama's RoPE, in which pairs are adjacent."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


if __name__ == "__main__":
    main()
