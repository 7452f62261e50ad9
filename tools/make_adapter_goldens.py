"""Write the adapter goldens of tests/convert: results of PEFT and transformers (needs torch, transformers and peft).

    python tools/make_adapter_goldens.py [NAME ...]

The base models are the models of tools/make_goldens.py. A golden holds the `logits` of the prompt with the adapter. Its
metadata holds adapter_config.json as written by PEFT, and the name and shape of every factor. The factors are not
stored, because tools.random_weights can recreate them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from golden_cases import CASES, VOCAB
from make_goldens import PROMPT, SEED

from tools.random_weights import random_tensor

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "convert" / "adapter_goldens"
ADAPTER_SEED = 8
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ALL = [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]
# Base model -> arguments of PEFT's LoraConfig.
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"r": 6, "lora_alpha": 9, "target_modules": _ALL, "alpha_pattern": {"v_proj": 2},
              "rank_pattern": {"k_proj": 3, "layers.2.mlp.up_proj": 17}},
    "qwen2": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    "phi3": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "gemma2": {"r": 5, "lora_alpha": 5, "target_modules": _ALL},
    "mixtral": {"r": 4, "lora_alpha": 6, "target_modules": _ATTENTION},
}  # fmt: skip


def make_golden(name: str) -> None:
    """Write one golden."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, arguments = CASES[name]
    config = AutoConfig.for_model(model_type, **arguments)
    with tempfile.TemporaryDirectory() as work:
        checkpoint, adapter = Path(work) / "base", Path(work) / "adapter"
        AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
        stored = load_file(checkpoint / "model.safetensors")
        save_file(
            {key: random_tensor(key, tensor.shape, SEED) for key, tensor in stored.items()},
            checkpoint / "model.safetensors",
            {"format": "pt"},
        )
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
        base = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
        fresh = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]))
        fresh.save_pretrained(adapter)
        shapes = {key: list(tensor.shape) for key, tensor in load_file(adapter / "adapter_model.safetensors").items()}
        factors = {key: random_tensor(key, tuple(shape), ADAPTER_SEED) for key, shape in shapes.items()}
        save_file(factors, adapter / "adapter_model.safetensors", {"format": "pt"})
        base = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
        model = peft.PeftModel.from_pretrained(base, adapter)
        written = json.loads((adapter / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = name
    tokens = np.random.default_rng(SEED).integers(3, VOCAB, PROMPT)
    with torch.no_grad():
        logits = model(torch.tensor(tokens[None])).logits[0].numpy()
    metadata = {"config": json.dumps(written), "tensors": json.dumps(shapes), "peft": peft.__version__}
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.safetensors"
    save_file({"logits": np.ascontiguousarray(logits)}, path, metadata)
    print(f"{name}: {len(shapes)} factors, logits spread by {logits.std():.3g}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ADAPTERS:
        make_golden(wanted)
