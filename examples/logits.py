"""Print the most likely next tokens, forbid the first one, and print the token that the model selects instead."""

import sys

import numpy as np

import genai as og
from genai.models.folders import bundled_model

model = og.Model(sys.argv[1] if len(sys.argv) > 1 else bundled_model())
tokenizer = og.Tokenizer(model)
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 + 7?"}], add_generation_prompt=True)

with og.Generator(model, og.GeneratorParams(model)) as generator:
    generator.append_tokens(tokenizer.encode(prompt))
    logits = generator.get_logits()  # float32 [batch, 1, vocabulary]
    best = np.argsort(-logits[0, 0])[:5]
    print("likeliest:", [tokenizer.decode([int(token)]) for token in best])

    logits[0, 0, best[0]] = -np.inf
    generator.set_logits(logits)
    generator.generate_next_token()
    assert generator.get_next_tokens()[0] == best[1]
    print("without the first:", tokenizer.decode(generator.get_next_tokens()))
