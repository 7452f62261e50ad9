"""Write the goldens of tests/llm/test_generation_config.py: replies of transformers that obey generation_config.json.

    python tools/make_generation_config_goldens.py [COUNT]      (needs torch and transformers)

Each case consists of a prompt, keys of generation_config.json, and the outputs. The sequences that the keys forbid or
change are parts of the output that the model generates without these keys, so that the keys change the output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.make_beam_goldens import EOS, SPEC, generated, transformers_model, write_cases

PATH = Path(__file__).resolve().parent.parent / "tests" / "llm" / "generation_config_goldens.json"
SEED, COUNT, NEW = 4, 80, 14


def random_case(model: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Return a random prompt and keys of generation_config.json."""
    prompt = rng.integers(3, SPEC["vocab_size"], int(rng.integers(1, 12))).tolist()
    penalties = {
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3])),
        "no_repeat_ngram_size": int(rng.choice([0, 0, 3])),
        "max_new_tokens": NEW,
        "eos_token_id": [EOS],
    }
    (free,), _ = generated(model, prompt, **penalties)
    known, at = [*prompt, *free], len(prompt)

    def part() -> list[int]:
        """A part of the text that ends in the output, or a random token after one of its tokens."""
        end = at + int(rng.integers(len(free))) + 1
        start = max(0, end - int(rng.integers(1, 5)))
        return [*known[start : end - 1], int(rng.integers(64)) if rng.random() < 0.2 else known[end - 1]]

    keys: dict[str, Any] = {**penalties, "num_beams": int(rng.choice([1, 1, 3]))}
    if rng.random() < 0.7:
        keys["bad_words_ids"] = [part() for _ in range(int(rng.integers(1, 6)))]
    if rng.random() < 0.5:
        keys["sequence_bias"] = [[part(), float(rng.normal() * 3)] for _ in range(int(rng.integers(1, 6)))]
    if rng.random() < 0.4:
        keys["begin_suppress_tokens"] = [free[0], *rng.integers(3, 64, int(rng.integers(0, 30))).tolist()]
    if rng.random() < 0.2:
        keys["suppress_tokens"] = rng.integers(3, 64, 4).tolist()
    outputs, scores = generated(model, prompt, **keys)
    return {"prompt": prompt, "keys": keys, "free": free, "outputs": outputs, "scores": scores}


def main() -> None:
    """Write the goldens."""
    model, rng = transformers_model(SEED), np.random.default_rng(SEED)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    write_cases(PATH, SEED, [random_case(model, rng) for _ in range(count)])


if __name__ == "__main__":
    main()
