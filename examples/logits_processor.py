"""Use a logits processor that lets the model write only digits."""

import sys

import numpy as np

import genai

with genai.LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    size = llm.model.config.model.vocab_size
    texts = [llm.tokenizer.decode([token]) for token in range(size)]
    allowed = np.array([text.isdigit() for text in texts])
    allowed[llm.tokenizer.eos_token_ids] = True

    def digits_only(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
        """Change the logits in place. Called before each token, with the prompt and the output so far."""
        logits[~allowed] = -np.inf

    for question in ("What is 12 + 7?", "Which is bigger, 31 or 13?", "Spell the word cat."):
        free = llm.chat(question).text
        forced = llm.chat(question, logits_processors=[digits_only], max_tokens=8).text
        assert forced == "" or forced.isdigit()
        print(f"{question} {free!r} -> {forced!r}")
