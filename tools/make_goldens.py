"""Write the goldens of tests/convert: transformers' results on tiny random checkpoints (needs torch and transformers).

    python tools/make_goldens.py [NAME ...]

A golden is a safetensors file. It holds `input_ids`; `logits` of the whole prompt in one step; `stepped_logits` of the
same prompt token by token, if they differ; and `greedy`, 32 tokens. Its metadata holds the configuration, and the name
and shape of every tensor of the checkpoint. The weights are not stored, because tools.random_weights can recreate them.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from golden_cases import CASES, VOCAB

from tools.random_weights import random_tensor

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "convert" / "goldens"
SEED = 7
PROMPT, GREEDY = 40, 32
# Types for which transformers 5.24 computes other logits with a cache than without one.
_WRONG_WITH_A_CACHE = ("bamba",)


def make_golden(name: str) -> None:
    """Write one golden."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model_type, arguments = CASES[name]
    automatic = AutoModelForImageTextToText if "vision_config" in arguments else AutoModelForCausalLM
    # transformers cannot make tiny readers of pictures for some types, so their text decoder is computed alone.
    alone = "text_config" in arguments and "vision_config" not in arguments
    made_as = (arguments["text_config"]["model_type"], arguments["text_config"]) if alone else (model_type, arguments)
    config = AutoConfig.for_model(
        made_as[0], **{key: value for key, value in made_as[1].items() if key != "model_type"}
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        automatic.from_config(config).save_pretrained(checkpoint)
        numbers = load_file(checkpoint / "model.safetensors")
        stored = {key: list(tensor.shape) for key, tensor in numbers.items()}
        names = {key: re.sub(r"^model\.", "model.language_model.", key) if alone else key for key in stored}
        weights = {
            key: random_tensor(names[key], tuple(shape), SEED) if shape else numbers[key]
            for key, shape in stored.items()
        }
        save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
        model, loading = automatic.from_pretrained(
            checkpoint,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
        written = json.loads((checkpoint / "config.json").read_text())
    # Single numbers are constants of the architecture.
    stored = {names[key]: shape for key, shape in stored.items() if shape}
    if alone:
        written = {"model_type": model_type, "architectures": None, "text_config": written}
    problems = {key: value for key, value in loading.items() if value and key != "error_msgs"}
    if problems:
        raise SystemExit(f"{name}: transformers did not load every tensor unchanged: {problems}")
    tokens = np.random.default_rng(SEED).integers(3, VOCAB, PROMPT)
    rope = written.get("rope_parameters") or {}
    with torch.no_grad():
        whole = logits_of(model, tokens)[0]
        keep = rope.get("rope_type") != "longrope" and model_type not in _WRONG_WITH_A_CACHE
        stepped, greedy = step_by_step(model, tokens, keep=keep)
    arrays = {"input_ids": tokens, "logits": whole, "greedy": np.array(greedy)}
    if np.abs(stepped - whole).max() > 1e-4 * np.abs(whole).max():
        arrays["stepped_logits"] = stepped
    metadata = {
        "config": json.dumps(written),
        "tensors": json.dumps(stored),
        "seed": str(SEED),
        "transformers": transformers.__version__,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.safetensors"
    save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, path, metadata)
    print(f"{name}: {len(stored)} tensors, logits spread by {whole.std():.3g}, {path.stat().st_size} bytes")


def logits_of(model: Any, tokens: Any, past: Any = None) -> tuple[np.ndarray, Any]:
    """Return the logits [length, vocabulary] of tokens that follow a cache, and the cache with these tokens added."""
    import torch

    # Mamba-2 ignores an argument `past_key_values`.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    result = model(torch.tensor(np.array(tokens)[None]), **{name: past}, use_cache=True)
    return result.logits[0].numpy(), getattr(result, name)


def step_by_step(model: Any, tokens: np.ndarray, *, keep: bool) -> tuple[np.ndarray, list[int]]:
    """Return the logits of the prompt fed token by token, and the greedy tokens that follow.

    Args:
        keep: False to recompute each prefix, for models whose rotation of all tokens depends on the length (LongRoPE),
            and for models whose cache is wrong.
    """
    past, rows, ids = None, [], [int(token) for token in tokens]
    for length in range(1, len(tokens) + GREEDY):
        if keep:
            logits, past = logits_of(model, ids[length - 1 : length], past)
        else:
            logits, _ = logits_of(model, ids[:length])
        rows.append(logits[-1])
        if length >= len(tokens):
            ids.append(int(rows[-1].argmax()))
    return np.array(rows[: len(tokens)]), ids[len(tokens) :]


if __name__ == "__main__":
    for wanted in sys.argv[1:] or CASES:
        make_golden(wanted)
