"""Compute the beam-search results that onnxruntime-genai's own tests expect (test/model_tests.cpp) with `genai`.

    python -m tools.ort_genai_beams CHECKOUT

CHECKOUT is a checkout of onnxruntime-genai's repository. The models tiny-random-gpt2-fp32, -fp32-cuda and -fp16-cuda
store keys and values in one tensor per layer. The last two are for CUDA; here their graphs run on the CPU. The original
test also requires equal tokens in float16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import genai

FOLDERS = ("tiny-random-gpt2-fp32", "tiny-random-gpt2-fp32-cuda", "tiny-random-gpt2-fp16-cuda")
PROMPTS = [
    [0, 0, 0, 0, 0, 52, 195, 731, 321, 301, 734, 620],
    [41, 554, 74, 622, 206, 222, 75, 223, 221, 198, 224, 572],
    [0, 0, 0, 52, 328, 219, 328, 206, 288, 227, 896, 328],
]
EXPECTED = [
    [131, 131, 131, 181, 638, 638, 638, 638],
    [292, 292, 292, 292, 292, 292, 292, 292],
    [328, 669, 669, 669, 669, 669, 669, 669],
]


def outputs(folder: Path) -> list[list[int]]:
    """Return the tokens that follow each prompt."""
    config = genai.Config(folder)
    config.clear_providers()
    with genai.Model(config, quiet=True) as model:
        params = genai.GeneratorParams(model)
        params.set_search_options(batch_size=3, max_length=20, num_beams=4, length_penalty=1.0)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(PROMPTS, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(row).tolist()[len(PROMPTS[row]) :] for row in range(3)]


def main(checkout: Path) -> int:
    """Print whether the tokens of each folder and prompt are as expected; return the number of differences."""
    wrong = 0
    for name in FOLDERS:
        folder = checkout / "test" / "models" / "hf-internal-testing" / name
        for row, (found, expected) in enumerate(zip(outputs(folder), EXPECTED, strict=True)):
            wrong += found != expected
            print(f"{name} prompt {row}: {'as there' if found == expected else f'{found}, there {expected}'}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
