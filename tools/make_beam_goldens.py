"""Write the goldens of tests/engine/test_beam_goldens.py: transformers' beam search on a small random decoder.

    python tools/make_beam_goldens.py [COUNT]      (needs torch and transformers)

Each case consists of a prompt, options of `generate`, and the outputs with their scores. The weights are not stored:
`tools.random_weights` recreates them, here for transformers and in the tests for a model folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PATH = Path(__file__).resolve().parent.parent / "tests" / "engine" / "beam_goldens.json"
SEED, COUNT, EOS = 3, 200, 2
SPEC: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 16,
    "context_length": 128,
    "eos_token_ids": (EOS,),
}


def random_case(rng: np.random.Generator) -> dict[str, Any]:
    """Return a random prompt, and options with transformers' names; `eos_token_id` is a list."""
    beams = int(rng.integers(2, 9))
    new = int(rng.integers(1, 25))
    return {
        "prompt": rng.integers(3, SPEC["vocab_size"], int(rng.integers(1, 41))).tolist(),
        "num_beams": beams,
        "num_return_sequences": int(rng.integers(1, beams + 1)),
        "length_penalty": float(rng.choice([-1.0, 0.0, 0.5, 1.0, 1.0, 2.0])),
        "early_stopping": [True, False, "never"][int(rng.integers(3))],
        "max_new_tokens": new,
        "min_new_tokens": int(rng.choice([0, 0, min(3, new), min(8, new)])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3, 0.8])),
        "no_repeat_ngram_size": int(rng.choice([0, 0, 2, 3])),
        "eos_token_id": [EOS, *rng.choice(np.arange(3, SPEC["vocab_size"]), int(rng.integers(0, 4)), False).tolist()],
    }


def transformers_model(seed: int) -> Any:
    """Return the random decoder in transformers."""
    import torch
    import transformers

    from genai.convert import DecoderSpec
    from tools.random_weights import RandomWeights

    spec = DecoderSpec(**SPEC)
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_size,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {name: torch.tensor(np.ascontiguousarray(value)) for name, value in RandomWeights(spec, seed).items()}
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and not [key for key in missing.missing_keys if "rotary" not in key], missing
    return model


def generated(model: Any, prompt: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """Return the outputs of greedy decoding or beams up to their stop tokens, and the scores of beams."""
    import torch

    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    outputs, ends = [row[len(prompt) :].tolist() for row in found.sequences], options["eos_token_id"]
    stops = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in outputs]
    scores = found.sequences_scores.tolist() if options.get("num_beams", 1) > 1 else []
    return [row[:stop] for row, stop in zip(outputs, stops, strict=True)], [round(score, 5) for score in scores]


def write_cases(path: Path, seed: int, cases: list[dict[str, Any]]) -> None:
    """Write the goldens, one case per line."""
    import transformers

    lines = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(f'{{"transformers": "{transformers.__version__}", "seed": {seed}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} cases, {path.stat().st_size} bytes")


def main() -> None:
    """Write the goldens."""
    model = transformers_model(SEED)
    rng = np.random.default_rng(SEED)
    cases = []
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT):
        case = random_case(rng)
        options = {name: value for name, value in case.items() if name != "prompt"}
        case["outputs"], case["scores"] = generated(model, case["prompt"], **options)
        cases.append(case)
    write_cases(PATH, SEED, cases)


if __name__ == "__main__":
    main()
