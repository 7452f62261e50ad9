"""The valid models, files and requests that bombs are made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import genai
from genai import AdapterFormat
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.models.folders import bundled_model
from tools.gguf_models import SHAPES, write_adapter, write_model
from tools.random_weights import RandomWeights

SPEC = DecoderSpec(
    model_type="llama",
    vocab_size=1536,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=16,
    context_length=512,
)
TEXT = "Tell me about bananas, " + "a" * 60 + "!"
_PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
_CHECKPOINT = {
    "model_type": "llama", "vocab_size": 1536, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Sound:
    """The valid files, written once into an empty folder when an object is created.

    Attributes:
        model: a model folder.
        checkpoint: the same weights as a Hugging Face folder.
        gguf: a GGUF file of another model.
        adapters: a folder with a PEFT folder, an `.onnx_adapter` file and a GGUF file.
        state: a saved state of the model.
    """

    def __init__(self, root: Path) -> None:
        self.model, self.checkpoint, self.adapters = root / "model", root / "checkpoint", root / "adapters"
        self.gguf, self.state = root / "model.gguf", root / "a.state"
        weights = RandomWeights(SPEC)
        write_model_folder(self.model, SPEC, ExportOptions(), weights, tokenizer_dir=bundled_model())
        write_model(self.gguf, SHAPES["llama"], "Q4_K")
        self.checkpoint.mkdir()
        save_file(dict(weights), self.checkpoint / "model.safetensors", {"format": "pt"})
        (self.checkpoint / "config.json").write_text(json.dumps(_CHECKPOINT))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(bundled_model() / name, self.checkpoint)
        self._write_adapters()

    def _write_adapters(self) -> None:
        peft = self.adapters / "peft"
        peft.mkdir(parents=True)
        random = np.random.default_rng(0)
        factors = {
            f"base_model.model.model.layers.0.self_attn.{part}_proj.lora_{side}.weight": shape
            for part, rows in (("q", 32), ("v", 16))
            for side, shape in (("A", (4, 32)), ("B", (rows, 4)))
        }
        arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in factors.items()}
        save_file(arrays, peft / "adapter_model.safetensors")
        (peft / "adapter_config.json").write_text(json.dumps(_PEFT))
        AdapterFormat.of(arrays).export_adapter(self.adapters / "a.onnx_adapter")
        write_adapter(self.adapters / "a.gguf", SHAPES["llama"])

    def save_state(self) -> None:
        """Write `state`. Call this in a separate process, because it computes."""
        with genai.LLM(self.model, threads=1, quiet=True) as llm:
            completion = llm.generate(TEXT, max_tokens=8, temperature=1.0, seed=3, keep_state=True)[0]
            assert completion.state is not None
            completion.state.save_state(self.state, {"note": [1, 2.5, "x"]})
