"""The float checkpoint: a Hugging Face Llama folder with float16 weights, small enough for the repository.

Everything after training (evaluation, quantisation, LoRA) starts from this folder, so no step needs a new training run.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .model import Pebble, PebbleConfig
from .tokenizer import IM_END_ID, PAD_ID, load_tokenizer, save_tokenizer

CHECKPOINT = Path(__file__).parent / "checkpoint"


def hugging_face_config(config: PebbleConfig) -> dict[str, Any]:
    """Return config.json for transformers' LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": [IM_END_ID, PAD_ID],
        "pad_token_id": PAD_ID,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.context_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float16",
        "vocab_size": config.vocab_size,
    }


def save_checkpoint(model: Pebble, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, model.safetensors (float16) and the tokenizer files."""
    save_tokenizer(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(model.config), indent=2) + "\n")
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only the owner can read


def load_checkpoint(folder: Path) -> tuple[Pebble, Tokenizer]:
    """Load the model in float32 and its tokenizer."""
    raw = json.loads((folder / "config.json").read_text())
    config = PebbleConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_size=raw["head_dim"],
        context_length=raw["max_position_embeddings"],
        rope_theta=raw["rope_theta"],
        rms_norm_eps=raw["rms_norm_eps"],
        tie_embeddings=raw["tie_word_embeddings"],
    )
    model = Pebble(config)
    tensors = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval(), load_tokenizer(folder)


def from_training_run(run: Path) -> tuple[Pebble, Tokenizer, dict[str, Any]]:
    """Return the latest state of a training run: model, tokenizer, and the progress record."""
    state = torch.load(run / "checkpoint.pt", weights_only=True, map_location="cpu")
    tokenizer = load_tokenizer(run / "tokenizer")
    model = Pebble(PebbleConfig(vocab_size=tokenizer.get_vocab_size()))
    model.load_state_dict(state["model"])
    return model.eval(), tokenizer, state["progress"]
